"""How an answer ends, and the KL divergence over the likeliest tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings
from kvaudit.engines.embedded.decode import TOP_LOGPROBS, check, margins_of, reference_of
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.engines.endings import Answer, Ending, coarse_kl
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, PromptSegment, Sampling


def ended(text: str, limit: int = 99, stop: tuple[str, ...] = (), end_ids: frozenset[int] = frozenset()) -> Answer:
    ending = Ending(TinyTokenizer(), Sampling(limit, stop), end_ids)
    for character in text:
        if ending.push(ord(character)):
            break
    assert ending.answer is not None
    return ending.answer


@pytest.mark.parametrize(
    ("given", "generated", "text", "reason"),
    [
        ({"text": "ab,cd", "stop": (",",)}, "ab,", "ab", "stop"),
        ({"text": "ab--cd", "stop": ("--",)}, "ab--", "ab", "stop"),
        ({"text": "ab-cd!", "stop": ("--", "d")}, "ab-cd", "ab-c", "stop"),
        ({"text": "abc", "limit": 2}, "ab", "ab", "length"),
        ({"text": "a,", "limit": 2, "stop": (",",)}, "a,", "a", "stop"),
        ({"text": "ab$cd", "end_ids": frozenset({ord("$")})}, "ab$", "ab", "stop"),
        ({"text": "$", "end_ids": frozenset({ord("$")})}, "$", "", "stop"),
        ({"text": ",a", "stop": (",",)}, ",", "", "stop"),
    ],
)
def test_answers_end_at_a_stop_string_an_end_token_or_the_limit(given, generated, text, reason) -> None:
    answer = ended(**given)
    assert (answer.generated, answer.text, answer.finish_reason) == (tuple(map(ord, generated)), text, reason)
    assert answer.token_ids == tuple(map(ord, text))


class TwoCharacters(TinyTokenizer):
    """One token, two characters: a stop string may begin inside a token."""

    def decode(self, token_ids):
        return "".join(f"{chr(i)}." for i in token_ids)


def test_a_token_that_the_stop_string_cuts_is_not_part_of_the_answer() -> None:
    ending = Ending(TwoCharacters(), Sampling(9, (".b",)), frozenset())
    assert not ending.push(ord("a"))
    assert ending.push(ord("b"))
    assert ending.answer == Answer((97, 98), (), "a", "stop")


def test_coarse_kl_is_the_exact_one_when_nothing_is_left_out_and_never_above_it() -> None:
    draw = torch.Generator().manual_seed(0)
    theirs, ours = torch.randn(2, 5, 4 * TOP_LOGPROBS, generator=draw, dtype=torch.float64).unbind()
    p, q = (3 * theirs).log_softmax(-1), (3 * theirs + 0.5 * ours).log_softmax(-1)
    exact = float((p.exp() * (p - q)).sum(-1).mean())
    everything = coarse_kl(p.numpy(), q.numpy())
    assert everything == pytest.approx(exact, rel=1e-6)
    top = p.topk(TOP_LOGPROBS, -1)
    coarse = coarse_kl(top.values.numpy(), q.gather(-1, top.indices).numpy())
    assert 0 < coarse <= exact
    assert coarse == pytest.approx(exact, rel=0.05)
    assert coarse_kl(top.values.numpy(), top.values.numpy()) == 0


def test_a_reference_held_against_its_own_logits_differs_in_nothing() -> None:
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    generated = tuple(logits.argmax(-1).tolist())
    reference = reference_of(Answer(generated, generated, "", "length"), list(logits))
    assert np.asarray(reference.top_ids).shape == (4, TOP_LOGPROBS)
    assert [row[0] for row in reference.top_ids] == list(generated)
    checked = check(logits, reference)
    assert checked.choices.tolist() == list(generated)
    assert checked.kl == pytest.approx(0, abs=1e-6)
    assert checked.logprob == pytest.approx(float(logits.log_softmax(-1).max(-1).values.sum()), rel=1e-5)
    best = logits.sort(-1).values
    np.testing.assert_allclose(checked.margins, (best[:, -1] - best[:, -2]).numpy(), rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_and_no_answer(bad: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = bad
    with pytest.raises(EngineError, match="not finite"):
        margins_of(logits)
    assert np.isnan(coarse_kl(np.full((1, 3), np.nan), np.zeros((1, 3))))


def test_a_model_that_overflows_is_an_error_and_no_pass() -> None:
    model = tiny_model("llama")
    model.model.layers[-1].mlp.down_proj.weight.fill_(float("inf"))
    engine = EmbeddedEngine(
        weights_of(model, torch.float32, torch.device("cpu")), TinyTokenizer(), EngineSettings(), {}
    )
    prompt = Prompt((1, 2, 3), (PromptSegment("query", "q", 0, 3),))
    with pytest.raises(EngineError, match="not finite"):
        engine.serve("r", "request", prompt, Sampling(3), None)
