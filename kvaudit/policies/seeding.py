"""The random generator of a request, the same in every arm and engine (DESIGN 4)."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, request_id: str) -> np.random.Generator:
    """Seeded by (run seed, request id)."""
    digest = hashlib.sha256(f"{seed}:{request_id}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))
