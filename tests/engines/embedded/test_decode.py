"""Checking an answer in one teacher-forced pass gives what step-by-step decoding gives, near ties too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import pytest
import torch
from blend_cases import CHUNK_LOOKUPS, POLICIES, engine_of, looked_at, model_of, policy_named, prompt_of, words_drawn
from slow_reference import SlowEngine
from tiny_models import FAMILY_SETTINGS, TinyTokenizer, tiny_model

from kvaudit.engines import PRESETS, EngineSettings, Gap, Mask, Switches, WriteBack
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.errors import EngineError
from kvaudit.records import FULL_PREFILL, Reference, Sampling, Served

SYLLABLES = ["a", "b", "ab", "ba", "aab", "é", " "]
END_IDS = (11, 44, 77)


@dataclass(frozen=True)
class Syllables(TinyTokenizer):
    """Tokens of one to three letters, so that stop strings begin and end inside tokens; ids from 120 on are the two
    halves of a letter of two bytes, so that the text of an answer is not the text of its tokens put together."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self._piece(token_id) for token_id in token_ids).decode("utf-8", errors="replace")

    def _piece(self, token_id: int) -> bytes:
        return bytes([0xC3, 0xA9][token_id % 2 :][:1]) if token_id >= 120 else SYLLABLES[token_id % 7].encode()


@cache
def weights_with_ties(family: str, near_ties: bool) -> Any:
    """Weights of a model with end tokens; with near ties, every second row of its head is all but the row before."""
    model = tiny_model(family, 5, eos_token_id=list(END_IDS))
    if near_ties:
        rows = model.lm_head.weight
        noise = torch.randn(rows[1::2].shape, generator=torch.Generator().manual_seed(1))
        rows[1::2] = rows[::2] + noise * torch.logspace(-8, -6, len(rows) // 2)[:, None]
    return weights_of(model, torch.float32, torch.device("cpu"))


def opened(family: str, near_ties: bool, switches: Switches) -> EmbeddedEngine:
    settings = EngineSettings(recompute_ratio=0.3, switches=switches, device="cpu")
    engine = EmbeddedEngine(weights_with_ties(family, near_ties), Syllables(), settings, {})
    engine.blender.auxiliary = looked_at
    return engine


def drawn_switches(drawn: random.Random) -> Switches:
    return Switches(
        *(drawn.choice(each) for each in (get_args(Mask), get_args(Gap), CHUNK_LOOKUPS, get_args(WriteBack))),
        suffix=drawn.choice(["after", "with-rows"]),
        check_layer=drawn.randrange(3),
    )


def drawn_sampling(drawn: random.Random) -> Sampling:
    stop = drawn.choice([(), ("abab",), ("baa", "é"), ("b b",), ("bb", "abb"), ("never",)])
    return Sampling(drawn.choice([1, 2, 5, 9, 14]), stop)


def outcome(served: Served) -> tuple[tuple[int, ...], str, str]:
    return served.answer_ids, served.answer_text, served.finish_reason


@pytest.mark.parametrize("near_ties", [False, True], ids=["", "near-ties"])
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_one_pass_is_step_by_step(family: str, near_ties: bool) -> None:
    """72 requests for each family and 120 with near ties; histories, switches, limits and stops are drawn."""
    drawn, seen = random.Random(f"{family} {near_ties}"), Counter[str]()
    for _ in range(30 if near_ties else 18):
        switches = drawn_switches(drawn)
        stepping, checking = opened(family, near_ties, switches), opened(family, near_ties, switches)
        for number, words in enumerate(words_drawn(drawn, 4)):
            request = (f"r{number}", "request", prompt_of(words), drawn_sampling(drawn))
            policy = policy_named(drawn.choice([*POLICIES, FULL_PREFILL]))
            full = checking.serve(*request, None)
            checked = checking.serve(*request, policy, full.reference)
            stepped = stepping.serve(*request, policy)
            assert outcome(checked) == outcome(stepped)
            seen[checked.finish_reason] += 1
            seen["same" if checked.answer_ids == full.answer_ids else "other"] += 1
            if stepped.margin is not None and stepped.margin < 1e-5:
                seen["near tie"] += 1
    assert min(seen[what] for what in ("stop", "length", "same", "other")) >= 3, "too few cases of a kind"
    assert bool(seen["near tie"]) == near_ties


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_answer_is_what_greedy_decoding_and_the_stop_rules_say(family: str) -> None:
    """Against the slow reference's tokens, cut by a rule that is written here."""
    model, drawn = tiny_model(family, 5, eos_token_id=list(END_IDS)), random.Random(family)
    switches, seen = PRESETS["lmcache"], Counter[str]()
    engine, slow = opened(family, False, switches), SlowEngine(model, switches, 0.3)
    for number, words in enumerate(words_drawn(drawn, 20)):
        prompt, sampling, policy = prompt_of(words), drawn_sampling(drawn), policy_named("every")
        served = engine.serve(f"r{number}", "request", prompt, sampling, policy)
        result = slow.serve(f"r{number}", prompt, policy)
        generated = slow.greedy(prompt, result, sampling.max_tokens, END_IDS)
        text, reason = cut(generated, sampling)
        assert (served.answer_text, served.finish_reason) == (text, reason)
        assert served.answer_ids == tuple(generated[: len(served.answer_ids)])
        assert not set(served.answer_ids) & set(END_IDS)
        seen[reason] += 1
    assert len(seen) == 2


def cut(generated: Sequence[int], sampling: Sampling) -> tuple[str, str]:
    """The text before the first stop string or end token, and why it ends there."""
    for count, token_id in enumerate(generated, 1):
        if token_id in END_IDS:
            return Syllables().decode(generated[: count - 1]), "stop"
        text = Syllables().decode(generated[:count])
        found = [text.index(stop) for stop in sampling.stop if stop in text]
        if found:
            return text[: min(found)], "stop"
    return Syllables().decode(generated), "length"


def test_a_limit_of_zero_decodes_nothing() -> None:
    served = engine_of(Switches()).serve("r", "prelude", prompt_of("i0 d0 q0"), Sampling(0), policy_named("none"))
    assert outcome(served) == ((), "", "length")


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_check_measures(preset: str) -> None:
    """KL(full prefill || this run), log-probability and margin along the full-prefill answer, from the reference."""
    switches, prompts = PRESETS[preset], ["i0 s0 d0 s0 d1 s0 q0", "i0 s0 d1 s0 d0 s0 q0", "i0 s0 d3 s0 d1 s0 q1"]
    engine, slow = engine_of(switches, 0.15), SlowEngine(model_of("llama"), switches, 0.15)
    for number, prompt in enumerate(map(prompt_of, prompts)):
        request, policy = (f"r{number}", "request", prompt, Sampling(5)), policy_named("every")
        reference = engine.serve(*request, None).reference
        assert reference is not None
        served = engine.serve(*request, policy, reference)
        answer = reference.generated_ids
        full = slow.forced(prompt, slow.serve(f"r{number}", prompt, None), answer)
        run = slow.forced(prompt, slow.serve(f"r{number}", prompt, policy), answer)
        assert answer == tuple(full.argmax(1).tolist())
        left, right = full.log_softmax(1), run.log_softmax(1)
        assert served.kl == pytest.approx(float((left.exp() * (left - right)).sum(1).mean()), rel=1e-3, abs=1e-5)
        logprobs = right[range(len(answer)), list(answer)]
        assert served.reference_logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)
        best = run.topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        leaves = [t for t, token_id in enumerate(answer) if int(run[t].argmax()) != token_id]
        assert served.margin == pytest.approx(margins[leaves[0]] if leaves else min(margins), abs=1e-3)


@pytest.mark.parametrize("answer", [(), (1, 2, 3, 4, 5, 6)])
def test_a_reference_made_under_another_limit_is_refused(answer: tuple[int, ...]) -> None:
    request = ("r", "request", prompt_of("i0 d0 q0"), Sampling(5))
    with pytest.raises(EngineError, match="the limit is 5"):
        engine_of(Switches()).serve(*request, policy_named("none"), Reference(answer))


def test_a_reference_that_does_not_end_the_answer_is_decoded_on() -> None:
    request = ("r", "request", prompt_of("i0 d0 q0"), Sampling(5))
    whole = engine_of(Switches()).serve(*request, policy_named("none"))
    made = engine_of(Switches()).serve(*request, None).reference
    assert made is not None
    short = Reference(made.generated_ids[:2], made.top_ids[:2], made.top_logprobs[:2])
    assert outcome(engine_of(Switches()).serve(*request, policy_named("none"), short)) == outcome(whole)
