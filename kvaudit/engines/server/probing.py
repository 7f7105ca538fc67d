"""A prompt of our own, sent to see what is in the cache: it comes back with cached tokens, or it does not."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Literal

from kvaudit.engines.server.target import Answered, Target
from kvaudit.records import Sampling, Wording

Lines = Literal[20, 80]
SHORT: Lines = 20
"""Some 350 tokens: a chunk of 256, LMCache's, and several blocks of most prefix caches."""
LONG: Lines = 80
"""Some 1,200 tokens, for servers that keep nothing of a short prompt, and for times that tell."""
_CLEAR, _CLEAR_MS = 0.7, 5.0
"""Where every warm TTFT is below this share of every cold one, and by so much, TTFT tells them apart."""
_FRAME_SHARE = 1 / 2
"""Of a repeated prompt's cached tokens; where new prompts share more, a leftover could pass for their frame."""
_TRIES = 5
_WITNESSES = 3
"""Prompts of which none may come fast where times tell: one that is slow may have been held up by something else."""
ASKED = Sampling(1)


def new_prompt(lines: Lines, *, chat: bool) -> Wording:
    """A prompt that no server has seen, and that shares no beginning with any other."""
    name = secrets.token_hex(8)
    numbers = [f"{name} line {number} holds {number * 7919 % 1000}." for number in range(lines)]
    text = "\n".join([*numbers, "Repeat the last number."])
    return Wording(messages=(("user", text),)) if chat else Wording(text=text)


@dataclass(slots=True)
class Probe:
    """`kept`: how many tokens of a repeated prompt of this kind came from the cache.

    `frame`: how many of a new one, behind others of this kind: what begins a text, and the head of a chat's template;
    None where they are too many to tell a new prompt from a known one.
    `cold_from`: a TTFT in milliseconds from which on a prompt was computed; None where times do not tell.
    """

    target: Target
    chat: bool
    lines: Lines
    kept: int
    frame: int | None = 0
    cold_from: float | None = None
    _witnesses: list[Wording] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._witnesses = [self.new()]

    @property
    def wording(self) -> Wording:
        return self._witnesses[0]

    @property
    def proven(self) -> bool:
        """Whether a prompt of this kind was seen to come from the cache, so that one that does not says something."""
        return self.kept > 0

    def new(self) -> Wording:
        """A further prompt of this kind."""
        return new_prompt(self.lines, chat=self.chat)

    @property
    def by(self) -> str:
        """What tells a cold prompt from a warm one; the same however the times came out today."""
        if self.target.counter.way is None:
            return "time to first token, where that tells"
        return self.target.counter.way if self.proven else "nothing: a prompt of kvaudit's own was not cached"

    def warm(self) -> None:
        """Make sure that a cache which keeps anything keeps the probe."""
        for wording in self._witnesses:
            self.target.ask(wording, ASKED)

    def is_cached(self) -> bool | None:
        """Whether more than its frame came from the cache; None where nobody can tell. It is in the cache afterwards.

        The frame alone says nothing: servers that warm up when they start have computed it too.
        """
        told = [self._cached(self.target.ask(wording, ASKED)) for wording in self._witnesses]
        return True if any(told) else None if None in told else False

    def learn_frame(self) -> None:
        """From the probe itself, before anything was reset: it is new, and comes behind others of its kind."""
        cached = self.target.ask(self.wording, ASKED).cached or 0
        self.frame = cached if cached <= _FRAME_SHARE * self.kept else None

    def learn_times(self) -> None:
        """How long prompts take that are new, and that are known, where the server counts nothing."""
        cold, warm = list[float](), list[float]()
        for _ in range(_TRIES):
            wording = self.new()
            cold.append(_ttft(self.target.ask(wording, ASKED)))
            warm.append(_ttft(self.target.ask(wording, ASKED)))
        if max(warm) < _CLEAR * min(cold) and min(cold) - max(warm) > _CLEAR_MS:
            self.cold_from = (max(warm) + min(cold)) / 2
            self._witnesses += [self.new() for _ in range(_WITNESSES - 1)]

    def _cached(self, answered: Answered) -> bool | None:
        if answered.cached is not None:
            return True if answered.cached > (self.frame or 0) else False if self.proven else None
        return None if self.cold_from is None else _ttft(answered) < self.cold_from


def _ttft(answered: Answered) -> float:
    reply = answered.reply
    return reply.total_ms if reply.ttft_ms is None else reply.ttft_ms
