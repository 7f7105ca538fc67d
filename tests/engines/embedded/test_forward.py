"""The forward pass against transformers' own, for every family and rotary variant, and on the real model."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ROTARY, VOCABULARY, tiny_model

from kvaudit.engines.embedded.forward import ROWS_PER_BLOCK, Rotation, Transformer
from kvaudit.engines.embedded.weights import weights_of

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def token_ids(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("rope", sorted(ROTARY))
@pytest.mark.parametrize("family", FAMILIES)
def test_full_prefill_has_the_logits_of_transformers(family: str, rope: str) -> None:
    model = tiny_model(family, 3, rope)
    transformer = Transformer(weights_of(model, torch.float32, CPU))
    ids = token_ids(300)
    hidden = transformer.extend(ids, transformer.arena(len(ids)), 0, every_row=True)
    torch.testing.assert_close(transformer.logits(hidden), model(torch.tensor([ids])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_extending_a_prefix_equals_one_pass(family: str) -> None:
    transformer = Transformer(weights_of(tiny_model(family, 5), torch.float32, CPU))
    ids = token_ids(3 * ROWS_PER_BLOCK)
    whole, parts = transformer.arena(len(ids)), transformer.arena(len(ids))
    expected = transformer.extend(ids, whole, 0)
    start = 0
    for stop in (1, 40, 40 + ROWS_PER_BLOCK + 7, len(ids) - 1, len(ids)):
        last = transformer.extend(ids[start:stop], parts, start)
        start = stop
    torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_transformers(dtype: torch.dtype) -> None:
    model = tiny_model("llama", 3)
    transformer = Transformer(weights_of(model, dtype, CPU))
    ids = token_ids(64)
    logits = transformer.logits(transformer.extend(ids, transformer.arena(64), 0))
    expected = tiny_model("llama", 3).to(dtype)(torch.tensor([ids])).logits[0, -1:].float()
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_rotation_in_place_is_the_rotation_and_moving_is_exact() -> None:
    transformer = Transformer(weights_of(tiny_model("llama", 0, "yarn"), torch.float32, CPU))
    raw = torch.randn(2, 9, 16)
    moved = raw.clone()
    transformer.rotation(31, 40).in_place(moved)
    assert torch.equal(moved, transformer.rotation(31, 40).of(raw))
    assert not torch.equal(moved, transformer.rotation(30, 39).of(raw))


def test_rotations_beyond_the_first_table_are_those_of_a_longer_one() -> None:
    transformer = Transformer(weights_of(tiny_model("llama"), torch.float32, CPU))
    short = transformer.rotation(1000, 1024)
    grown = transformer.rotation(1000, 3000)
    assert torch.equal(grown[slice(0, 24)].cos, short.cos)
    assert torch.equal(grown[slice(0, 24)].sin, short.sin)
    assert isinstance(grown, Rotation)
    assert len(grown.cos) == 2000


@pytest.mark.parametrize("rows", [1, 5, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 3 * ROWS_PER_BLOCK])
def test_blocks_see_exactly_their_limits(rows: int) -> None:
    transformer = Transformer(weights_of(tiny_model("llama", 1), torch.float32, CPU))
    keys = 4 * ROWS_PER_BLOCK
    draw = torch.Generator().manual_seed(rows)
    limits = torch.randperm(keys, generator=draw)[:rows].sort().values
    q = torch.randn(transformer.heads, rows, transformer.head_dim, generator=draw)
    k, v = torch.randn(2, transformer.kv_heads, keys, transformer.head_dim, generator=draw).unbind()
    group = transformer.heads // transformer.kv_heads
    expected = torch.empty_like(q)
    for head in range(transformer.heads):
        for row in range(rows):
            seen = slice(0, int(limits[row]) + 1)
            scores = k[head // group, seen] @ q[head, row] / transformer.head_dim**0.5
            expected[head, row] = scores.softmax(0) @ v[head // group, seen]
    got = transformer.attend(q, k, v, transformer.visibility(limits))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.model
def test_smollm2_has_the_logits_and_greedy_answers_of_transformers() -> None:
    from real_model import transformers_model

    from kvaudit.engines import EngineSettings
    from kvaudit.engines.embedded.engine import EmbeddedEngine
    from kvaudit.models.files import resolve_model
    from kvaudit.models.tokenizer import load_tokenizer
    from kvaudit.records import Prompt, PromptSegment, Sampling

    files = resolve_model("smollm2-135m")
    model, tokenizer = transformers_model(files), load_tokenizer(files)
    weights = weights_of(model, torch.float32, CPU)
    engine = EmbeddedEngine(weights, tokenizer, EngineSettings(), {})
    text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is"
    for ids in (tokenizer.encode(text), token_ids(700, 7, weights.vocabulary)):
        theirs = model(torch.tensor([ids])).logits[0, -1]
        prompt = Prompt(tuple(ids), (PromptSegment("query", "q", 0, len(ids)),))
        torch.testing.assert_close(engine.prefill("r", "request", prompt, None).logits, theirs, atol=1e-3, rtol=0)
        served = engine.serve("r", "request", prompt, Sampling(16), None)
        generated = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=16, min_new_tokens=1, pad_token_id=0
        )[0, len(ids) :].tolist()
        assert served.reference is not None
        assert list(served.reference.generated_ids) == generated
