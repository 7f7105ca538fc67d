"""The worker inside real vLLM with real LMCache, on the CPU. What is asserted of LMCache is what it does, not what it
should do."""

import numpy as np
import pytest
from worker_jobs import SEPARATOR, prompt_of
from worker_rig import answers, open_rig, words

from kvaudit.policies import Policy
from kvaudit.policies.bounds import RecomputeAll, ReuseAll
from kvaudit.policies.legolink import LegoLink
from kvaudit.policies.rounding import watched
from kvaudit.policies.tokens import TokenTopK
from kvaudit.policy_specs.files import import_file
from kvaudit.records import Prompt, PromptSegment

pytestmark = [pytest.mark.real, pytest.mark.model]

INSTRUCTION = words(99, 20)
A, B, C = (words(seed, 40 + 3 * seed) for seed in range(3))
LAYERS, WIDTH = 30, 192


def asking(*documents, query=77):
    parts = [("instruction", INSTRUCTION), *(("document", each) for each in documents), ("query", words(query, 12))]
    return prompt_of(*parts)


def raw(ids):
    return Prompt(tuple(ids), (PromptSegment("document", "x", 0, len(ids)),))


FIRST, SWAPPED, MISSED = asking(A, B), asking(B, A, query=78), asking(A, C, B, query=79)


@pytest.fixture(scope="module")
def rig():
    with open_rig() as opened:
        yield opened


@pytest.fixture(autouse=True)
def empty(rig):
    assert rig.clear() == {"entries": 0, "size_bytes": 0}


def test_health_says_what_is_in_force(rig):
    health = rig.running.rpc("kvaudit_health")
    connector = health["connector"]
    assert (health["model"], health["layers"], health["device"]) == ("LlamaForCausalLM", LAYERS, "cpu")
    assert connector["roles"] == ["SCHEDULER", "WORKER"]
    assert all(connector[name] for name in ("hooked", "engine", "blender", "model_registered", "shim"))
    assert connector["trouble"] is None
    assert connector["settings"]["separator_ids"] == list(SEPARATOR)
    assert connector["settings"]["blend_check_layers"] == [1]


def test_the_first_writer_stays_and_is_known(rig):
    rig.serve(FIRST, request_id="first")
    held = rig.keys()
    assert {each["writer"] for each in held.values()} == {"first"}
    assert {each["layers"] for each in held.values()} == {LAYERS}
    _, record = rig.serve(SWAPPED, request_id="second")
    assert record.errors == ()
    assert [(p.segment, p.write_ordinal, p.old_position, p.new_position) for p in record.provenance] == [
        (0, 0, 0, 0),
        (2, 2, 64, 22),
        (4, 1, 22, 67),
    ]
    assert {p.writer_request_id for p in record.provenance} == {"first"}
    assert [(w.position, w.tokens, w.computed_over) for w in record.writes] == [(109, 12, (0, 2, 1))]
    assert {key: each for key, each in rig.keys().items() if key in held} == held


def arm(rig, mode, policy=lambda: None):
    rig.clear()
    return [rig.serve(prompt, mode, policy()) for prompt in (FIRST, SWAPPED, MISSED, SWAPPED)]


def test_token_topk_through_the_hook_is_lmcaches_own_selection(rig):
    untouched, hooked = arm(rig, "own"), arm(rig, "policy", TokenTopK)
    noticed = arm(rig, "policy", lambda: watched(TokenTopK(), follow=False))
    for (own, one), (ours, two), (theirs, three) in zip(untouched, hooked, noticed, strict=True):
        assert answers(own) == answers(ours) == answers(theirs)
        assert one.errors == two.errors == three.errors == ()
        assert (one.failure, two.failure, three.failure) == (None, None, None)
        if one.blended is not None:
            assert one.blended.k == max(1, int(0.15 * one.blended.tokens)) == len(one.blended.selected)
            assert one.blended.selected.tolist() == two.blended.selected.tolist()
            assert one.blended.deviation.tobytes() == two.blended.deviation.tobytes()
            assert three.decided is not None
            assert three.untimed_seconds > 0


def test_full_prefill_neither_reads_nor_writes(rig):
    cold, record = rig.serve(SWAPPED, "prefill")
    assert rig.keys() == {}
    assert record.writes == ()
    rig.serve(FIRST)
    held = rig.keys()
    warm, record = rig.serve(SWAPPED, "prefill")
    assert answers(warm) == answers(cold)
    assert rig.keys() == held
    assert (record.looked_up, record.reused_tokens, record.blended, record.errors) == (0, 0, None, ())


def test_nothing_and_everything_can_be_recomputed(rig):
    everything = tuple(range(len(SWAPPED.token_ids)))
    rig.serve(FIRST)
    _, reused = rig.serve(SWAPPED, "policy", ReuseAll(), rows=everything)
    rig.clear()
    rig.serve(FIRST)
    _, recomputed = rig.serve(SWAPPED, "policy", RecomputeAll(), rows=everything)
    n = reused.blended.tokens
    assert (n, reused.blended.k, recomputed.blended.k) == (107, 0, 107)
    assert reused.blended.deviation.tobytes() == recomputed.blended.deviation.tobytes()
    hits = [range(chunk.start, chunk.end) for chunk in reused.chunks if chunk.loaded]
    gaps = [position for position in range(n) if not any(position in hit for hit in hits)]
    assert gaps == [20, 21, 65, 66]
    for layer in range(LAYERS):
        assert np.flatnonzero(~reused.rows.keys[layer].any(1)).tolist() == gaps
    # Recomputed from the check layer on; below it even a selected separator stays zero.
    assert np.flatnonzero(~recomputed.rows.keys[0].any(1)).tolist() == gaps
    assert recomputed.rows.keys[1:].any(2).all()
    _, full = rig.serve(SWAPPED, "prefill", rows=everything)
    at_check_layer = recomputed.rows.keys[1, :n] - full.rows.keys[1, :n]
    assert recomputed.rows.keys.shape == (LAYERS, len(everything), WIDTH)
    assert np.abs(at_check_layer).max() < 1e-4


def test_a_miss_hides_later_hits_and_is_computed_over_the_blended_state(rig):
    rig.serve(FIRST)
    everything = tuple(range(len(MISSED.token_ids)))
    _, record = rig.serve(MISSED, rows=everything)
    assert [chunk.loaded for chunk in record.chunks] == [True, True, False, False, False]
    assert [chunk.stored for chunk in record.chunks] == [True] * 5
    assert [(w.position, w.computed_over) for w in record.writes] == [(64, (0, 1)), (157, (0, 1))]
    _, full = rig.serve(MISSED, "prefill", rows=everything)
    missed = slice(64, 110)
    difference = np.abs(record.rows.keys[:, missed] - full.rows.keys[:, missed]).max((1, 2))
    assert difference[0] == 0
    assert difference[1] > 0.01


def test_prompts_without_separators_are_one_chunk(rig):
    joined = raw((*INSTRUCTION, *A))
    rig.serve(joined)
    assert rig.serve(raw((*INSTRUCTION, *B)))[1].looked_up == 0
    assert rig.serve(joined)[1].looked_up == len(joined.token_ids)


@pytest.mark.parametrize(
    ("ids", "reached"),
    [
        ((*SEPARATOR, *INSTRUCTION, *SEPARATOR, *A), 0),
        ((*INSTRUCTION, *SEPARATOR, *SEPARATOR, *A), 20),
        ((*INSTRUCTION, *SEPARATOR, *A, *SEPARATOR), 62),
    ],
)
def test_an_empty_chunk_is_a_miss_for_ever(rig, ids, reached):
    rig.serve(raw(ids))
    assert rig.serve(raw(ids))[1].looked_up == reached


def test_vllms_own_reset_says_yes_and_empties_nothing(rig):
    rig.serve(FIRST)
    held = rig.keys()
    assert rig.running._llm.reset_prefix_cache(reset_connector=True) is True
    assert rig.keys() == held
    assert rig.clear() == {"entries": 0, "size_bytes": 0}
    assert rig.serve(FIRST)[1].looked_up == 0


USERS_POLICY = """
from dataclasses import dataclass
import numpy as np
from kvaudit.policies import Policy
from neighbour import descending

@dataclass(frozen=True)
class Mine(Policy):
    name = "mine"
    def select(self, context):
        return context.positions[descending(context.deviation)[: context.k]]
"""


def test_a_users_file_is_followed_in_the_engines_own_process(rig, tmp_path):
    (tmp_path / "mine.py").write_text(USERS_POLICY)
    (tmp_path / "neighbour.py").write_text("def descending(values):\n    return (-values).argsort(kind='stable')\n")
    policy = import_file(tmp_path / "mine.py").module.Mine()
    rig.serve(FIRST)
    _, own = rig.serve(SWAPPED)
    rig.clear()
    rig.serve(FIRST)
    _, mine = rig.serve(SWAPPED, "policy", watched(policy, follow=False))
    assert mine.failure is None
    assert mine.decided == 0
    assert mine.blended.selected.tolist() == own.blended.selected.tolist()


class Broken(Policy):
    name = "broken"

    def select(self, context):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("policy", "told"), [(LegoLink(), "starts at the first-layer"), (Broken(), "failed: ValueError: no")]
)
def test_a_policy_that_fails_leaves_the_engine_alive(rig, policy, told):
    rig.serve(FIRST)
    assert told in rig.serve(SWAPPED, "policy", policy)[1].failure.message
    assert rig.serve(SWAPPED)[1].failure is None
