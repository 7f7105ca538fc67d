"""Does a chunk that moves keep its keys, turned to where it stands now?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Lab
from kvaudit.doctor.checks.measuring import PLAIN, Scale, distance
from kvaudit.policies import Floats

NAME = "position"

Pairs = Callable[[Floats], NDArray[np.complex128]]
Turn = tuple[Callable[[Floats], Floats], float]


def position(lab: Lab) -> Finding:
    """A chunk is loaded where it was written, then further back by as many tokens as lie between two equal runs of
    tokens in it.

    At layer 0 a key depends on its token and position alone, so these two runs tell, in the engine's own numbers, how
    keys turn over this distance; at every layer the keys of the moved chunk must be turned so, and no other way. Its
    values are the control: they do not change where the chunk was only moved.
    """
    lead, filler, between = (lab.chunk() for _ in range(3))
    shift = len(between) + lab.gap_tokens
    core = lab.chunk(lab.unit // 2)
    moved = (*core, *lab.chunk(shift - len(core)), *core)
    lab.store(lead, moved)
    lab.store(filler, between)
    here = lab.rows(lead, moved, at=lab.at((lead, moved), 1))
    there = lab.rows(lead, between, moved, at=lab.at((lead, between, moved), 2))
    layer = max(here.layer, there.layer)
    turned, misfit = _turn(here.rows.keys[:1], shift, len(core))
    scale = Scale(max(lab.scale.noise, misfit))
    keys, keys_moved = here.rows.keys[layer:], there.rows.keys[layer:]
    evidence = {
        "from keys that are turned": distance(turned(keys), keys_moved),
        "from keys that are not": distance(keys, keys_moved),
        "turn": distance(keys, turned(keys)),
        "products changed": distance(_products(keys), _products(keys_moved)),
        "values changed": distance(here.rows.values[layer:], there.rows.values[layer:]),
        "noise": scale.noise,
    }
    if lab.scale.differs("the change of a moved chunk's values", evidence["values changed"]):
        raise Inconclusive("the chunk's values changed as well: it was not only moved", evidence)
    if not scale.plain(evidence["turn"]):
        raise Inconclusive("keys turn too little over this distance to be told apart", evidence)
    return _told(scale, evidence)


def _told(scale: Scale, evidence: dict[str, float]) -> Finding:
    if not scale.differs("the difference of moved keys from turned ones", evidence["from keys that are turned"]):
        return Finding(NAME, "seen", "keys are turned to where a chunk stands", "--keys moved", evidence)
    if not scale.differs("the difference of moved keys from unturned ones", evidence["from keys that are not"]):
        return Finding(NAME, "seen", "keys stay turned for where they were written", "--keys unmoved", evidence)
    return Finding(NAME, "seen", "keys change, but not to those of the new place", evidence=evidence)


def _turn(keys: Floats, shift: int, tokens: int) -> Turn:
    """How keys turn over `shift` positions, out of rotated keys [1, P, G, D] of layer 0 whose first `tokens` positions
    hold the tokens that stand `shift` positions later too; and by how much (relative) these keys do not fit it.

    A rotary embedding turns pairs of dimensions by an angle that is the same in all layers and heads. Which dimensions
    make a pair (i and i + D/2, or 2 i and 2 i + 1) is the reading that fits.
    """
    near, far = keys[:, :tokens], keys[:, shift : shift + tokens]
    turns = [_fitted(pairs, back, near, far) for pairs, back in ((_halves, _from_halves), (_neighbours, _interleaved))]
    turn = min(turns, key=lambda turn: turn[1])
    if turn[1] * PLAIN > distance(near, far):
        raise Inconclusive("the keys of equal tokens at layer 0 are no rotation apart", {"misfit": turn[1]})
    return turn


def _fitted(pairs: Pairs, back: Callable[[NDArray[np.complex128]], Floats], near: Floats, far: Floats) -> Turn:
    product = (pairs(near).conj() * pairs(far)).sum((0, 1, 2))
    angle = product / np.abs(product)

    def turned(keys: Floats) -> Floats:
        return back(pairs(keys) * angle)

    return turned, distance(far, turned(near))


def _halves(keys: Floats) -> NDArray[np.complex128]:
    left, right = np.split(keys.astype(np.float64), 2, -1)
    return left + 1j * right


def _from_halves(pairs: NDArray[np.complex128]) -> Floats:
    return np.concatenate([pairs.real, pairs.imag], -1).astype(np.float32)


def _neighbours(keys: Floats) -> NDArray[np.complex128]:
    wide = keys.astype(np.float64)
    return wide[..., ::2] + 1j * wide[..., 1::2]


def _interleaved(pairs: NDArray[np.complex128]) -> Floats:
    return np.stack([pairs.real, pairs.imag], -1).reshape(*pairs.shape[:-1], -1).astype(np.float32)


def _products(keys: Floats) -> NDArray[np.float64]:
    """Inner products [L, G, P, P] of a chunk's keys within a head, which no pure move changes."""
    heads = keys.astype(np.float64).transpose(0, 2, 1, 3)
    return heads @ heads.transpose(0, 1, 3, 2)
