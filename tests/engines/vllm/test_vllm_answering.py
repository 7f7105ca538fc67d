"""An answer of vLLM's ends by the embedded engine's rules and is held against full prefill's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvaudit.engines.scripted import ByteTokenizer
from kvaudit.engines.vllm.answering import against, answer, margin_of, reference_of
from kvaudit.engines.vllm.launch import Asked, Token
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, PromptSegment, Reference, Sampling

PROMPT = Prompt((1, 2), (PromptSegment("query", "q", 0, 2),))
END = 256


class Speaking:
    """Stands for vLLM: says these tokens, one by one, until it is told to stop."""

    def __init__(self, *token_ids):
        self.token_ids, self.said = token_ids, []

    def ask(self, token_ids, max_tokens, ended, top=None, salt=None, end_ids=()):
        assert token_ids == PROMPT.token_ids
        asked = Asked()
        for token_id in self.token_ids[:max_tokens]:
            asked.tokens.append(token(token_id))
            self.said.append(token_id)
            if ended(token_id) or token_id in end_ids:
                break
        return asked


def token(token_id, **others):
    logprob = math.log(0.5)
    return Token(token_id, {token_id: logprob, **(others or {1000: math.log(0.25)})}, 0)


def spoken(text, sampling, end_ids=frozenset({END})):
    running = Speaking(*text)
    answered = answer(running, PROMPT, sampling, ByteTokenizer(), end_ids)
    return answered.answer, bytes(t for t in running.said if t < END).decode()


def test_an_answer_ends_with_a_stop_string_which_is_no_part_of_it():
    made, said = spoken(b"12,34", Sampling(10, (",",)))
    assert (made.text, made.token_ids, made.finish_reason, said) == ("12", (49, 50), "stop", "12,")
    assert made.generated == (49, 50, 44)


def test_an_answer_ends_with_an_end_token():
    made, _ = spoken([49, END, 50], Sampling(10))
    assert (made.text, made.generated, made.finish_reason) == ("1", (49, END), "stop")


def test_an_answer_ends_at_its_limit():
    made, said = spoken(b"12345", Sampling(3))
    assert (made.text, made.finish_reason, said) == ("123", "length", "123")


def test_a_prelude_has_no_answer():
    running = Speaking(49, 50)
    answered = answer(running, PROMPT, Sampling(0), ByteTokenizer(), frozenset())
    assert (answered.answer, running.said) == (None, [49])


def test_an_answer_without_an_end_is_an_error():
    with pytest.raises(EngineError, match="vLLM gave 2 tokens of 5 and no end"):
        spoken(b"12", Sampling(5))


def row(token_id, *logprobs):
    ids = [token_id, *range(500, 499 + len(logprobs))]
    return Token(token_id, dict(zip(ids, logprobs, strict=True)), 0)


def test_a_reference_keeps_the_likeliest_tokens_of_every_step():
    made = reference_of([row(7, -0.1, -3.0, -4.0), row(8, -0.2, -2.0)])
    assert made.generated_ids == (7, 8)
    np.testing.assert_array_equal(made.top_ids, [[7, 500], [8, 500]])
    np.testing.assert_allclose(made.top_logprobs, [[-0.1, -3.0], [-0.2, -2.0]])


def test_the_same_run_has_no_divergence_and_its_own_log_probability():
    steps = [row(7, -0.1, -3.0), row(8, -0.2, -2.0)]
    held = against(steps, reference_of(steps))
    assert held["kl"] == pytest.approx(0.0, abs=1e-6)
    assert held["reference_logprob"] == pytest.approx(-0.3)
    assert held["margin"] == pytest.approx(1.8)


def test_divergence_is_that_of_the_distributions():
    full, run = [row(7, math.log(0.6), math.log(0.3))], [row(7, math.log(0.5), math.log(0.2))]
    expected = 0.6 * math.log(0.6 / 0.5) + 0.3 * math.log(0.3 / 0.2) + 0.1 * math.log(0.1 / 0.3)
    assert against(run, reference_of(full))["kl"] == pytest.approx(expected, rel=1e-5)


def test_a_token_that_the_run_does_not_show_counts_as_one_of_the_others():
    full = Reference((7,), [[7, 999]], [[math.log(0.6), math.log(0.3)]])
    expected = 0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)
    assert against([row(7, math.log(0.5), math.log(0.2))], full)["kl"] == pytest.approx(expected)


def test_once_the_answer_has_left_the_reference_there_is_no_divergence():
    held = against([row(7, -0.1, -3.0), row(9, -0.5, -0.9)], Reference((7, 8, 4)))
    assert held == {"margin": pytest.approx(0.4)}


def test_an_answer_cut_short_has_followed_the_reference_only_so_far():
    assert against([row(7, -0.1, -3.0)], Reference((7, 8))) == {"margin": pytest.approx(2.9)}


def test_the_margin_is_that_of_the_two_best():
    assert margin_of(row(7, -0.5, -1.5, -9.0)) == pytest.approx(1.0)
