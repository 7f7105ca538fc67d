"""TTFT of a reusing request against full prefill, and of our full prefill against transformers' own, as ratios.

    python tests/bench/ttft.py [--documents 24 84] [--repeats 3] [--threads N] [--model smollm2-135m]

Each figure is a ratio of medians measured in turn in this one run. Documents have 89 tokens, the recompute ratio is
5 %, the mask exact and gaps recomputed; every chunk is cached from one document earlier, so that all of them move.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from kvaudit.engines import PRESETS, EngineSettings
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.models.files import resolve_model
from kvaudit.models.tokenizer import load_tokenizer
from kvaudit.plugins import load
from kvaudit.records import Prompt, PromptSegment, Sampling

sys.path.insert(0, str(Path(__file__).parents[1]))
from real_model import transformers_model

DOCUMENT_TOKENS = 89
POLICIES = ("token-topk", "document-aligned", "single-window", "fixed-chunk", "random-document", "none")


def rolling_prompt(first: int, documents: int, suffix: int) -> Prompt:
    """Instruction, `documents` documents from number `first` on, and a query that no other prompt has."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.randint(500, 40000, (first + documents, DOCUMENT_TOKENS), generator=draw).tolist()
    parts = [("instruction", [600 + i for i in range(20)])]
    parts += [("document", ids) for ids in pool[first:]]
    parts.append(("query", [41000 + suffix + i for i in range(24)]))
    token_ids: list[int] = []
    segments = []
    for kind, ids in parts:
        segments.append(PromptSegment(kind, f"{kind}:{ids[0]}", len(token_ids), len(token_ids) + len(ids)))
        token_ids += ids
    return Prompt(tuple(token_ids), tuple(segments))


def milliseconds(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return 1000 * (perf_counter() - began)


def measure(hf_model: torch.nn.Module, engine: EmbeddedEngine, documents: int, repeats: int) -> None:
    times: dict[str, list[float]] = {}
    engine.serve("warm", "prelude", rolling_prompt(0, documents, 0), Sampling(0), load("policies", "none")())
    engine.serve("warm", "prelude", rolling_prompt(1, documents, 0), Sampling(0), load("policies", "none")())
    for repeat in range(repeats + 1):
        prompt = rolling_prompt(1, documents, 100 * (repeat + 1))
        token_ids = torch.tensor([prompt.token_ids])
        with torch.inference_mode():
            theirs = milliseconds(lambda ids=token_ids: hf_model(ids, logits_to_keep=1, use_cache=True))
        ours = engine.serve("full", "request", prompt, Sampling(1), None).ttft_ms
        times.setdefault("transformers", []).append(theirs)
        times.setdefault("full-prefill", []).append(ours)
        for name in POLICIES:
            fresh = rolling_prompt(1, documents, 100 * (repeat + 1) + 10 * (POLICIES.index(name) + 1))
            times.setdefault(name, []).append(
                engine.serve(name, "request", fresh, Sampling(1), load("policies", name)()).ttft_ms
            )
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    tokens = len(prompt.token_ids)
    print(f"{documents} documents, {tokens} tokens, {torch.get_num_threads()} threads")
    print(f"  full prefill / transformers' forward (SDPA): {medians['full-prefill'] / medians['transformers']:.2f}")
    for name in POLICIES:
        print(f"  speed-up over full prefill, {name:17} {medians['full-prefill'] / medians[name]:6.2f} x")
    print("  medians, ms: " + ", ".join(f"{name} {value:.0f}" for name, value in medians.items()))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--documents", type=int, nargs="+", default=[24, 84])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int)
    options.add_argument("--model", default="smollm2-135m")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    files = resolve_model(given.model)
    hf_model = transformers_model(files)
    settings = EngineSettings(model=given.model, recompute_ratio=0.05, switches=PRESETS["ideal"])
    weights = weights_of(hf_model, torch.float32, torch.device("cpu"))
    engine = EmbeddedEngine(weights, load_tokenizer(files), settings, {})
    for documents in given.documents:
        engine.reset()
        measure(hf_model, engine, documents, given.repeats)


if __name__ == "__main__":
    main()
