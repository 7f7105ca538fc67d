"""Limits of what an audit bears, and what they are where the user sets none. Imports nothing of ours, so that a
command line can show them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NOISE = 0.0
"""The share of answers that a second run of the same order may give differently, under full prefill and policies."""
MAX_RETRIED = 0.01
"""The share of an arm's requests that may have been sent to a server more than once: each changes the history."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Shares from 0 to 1."""

    noise: float = MAX_NOISE
    retried: float = MAX_RETRIED
