"""Limits that hold where the user sets none. Imports nothing, so that a command line can show them."""

from __future__ import annotations

MAX_NOISE = 0.0
"""The share of answers that a second run of the same order may give differently, under full prefill and policies."""
MAX_RETRIED = 0.01
"""The share of an arm's requests that may have been sent to a server more than once: each changes the history."""
