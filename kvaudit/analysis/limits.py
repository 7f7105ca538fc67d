"""Limits that hold where the user sets none. Imports nothing, so that a command line can show them."""

from __future__ import annotations

MAX_NOISE = 0.0
"""The share of answers that a second run of the same order may give differently, under full prefill and policies."""
