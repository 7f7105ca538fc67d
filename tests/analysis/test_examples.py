import pyarrow as pa
from audit_runs import BuiltRun, arm_lines, full_prefill, run

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.examples import PER_POLICY, Example
from kvaudit.schema import TABLES

FULL = "a b c d"


def examples(orders: dict[str, str], full: str = FULL, **options) -> tuple[Example, ...]:
    built = run(full_prefill(full) + arm_lines("p", orders, full, orders["chronological"]), **options)
    return analyse(built, None, built.provenance).examples


def test_the_worst_requests_come_first():
    found = examples(
        {
            "chronological": "a b c d e f",
            "reversed": "a y c d exx f",
            "shuffle-1": "a z c d e f",
            "shuffle-2": "a b cx d e f",
        },
        "a b c d e f",
    )
    # r1 differs in five of six pairs, r2 and r4 in three; of those two r4 is further away.
    assert [(example.request_id, example.differing_pairs) for example in found] == [("r1", 5), ("r4", 3), ("r2", 3)]
    assert {example.compared_pairs for example in found} == {6}


def test_no_more_than_a_few_are_shown_for_each_policy():
    assert len(examples({"chronological": FULL, "reversed": "x x x x"})) == PER_POLICY


def test_an_example_tells_every_answer_and_who_gave_it():
    (example,) = examples(
        {"chronological": FULL, "reversed": "a bxx c d", "shuffle-1": FULL, "shuffle-2": "a bxxx c d"},
        columns=lambda arm, _: {"margin": 0.25, "first_difference": 1} if arm.order == "shuffle-2" else {},
    )
    assert (example.reference_text, example.agreeing) == ("b", ("chronological", "shuffle-1"))
    assert [(answer.text, answer.orders, answer.edit_distance) for answer in example.answers] == [
        ("bxxx", ("shuffle-2",), 3),
        ("bxx", ("reversed",), 2),
    ]
    assert (example.answers[0].margin, example.answers[0].first_difference) == (0.25, 1)
    assert example.arms == ("p.shuffle-2", "p.chronological")


def test_a_policy_s_own_error_is_shown_without_history():
    (example,) = examples({"chronological": "a x c d", "reversed": "a x c d"})
    assert (example.differing_pairs, example.agreeing, example.arms) == (0, (), ("p.chronological", None))


def test_two_wrong_answers_are_held_against_each_other():
    (example,) = examples({"chronological": "a x c d", "reversed": "a xx c d"})
    assert example.arms == ("p.reversed", "p.chronological")


def test_an_error_of_full_prefill_leaves_the_orders_to_be_told():
    (example,) = examples({"chronological": "a x c d", "reversed": "a y c d"}, "a ! c d")
    assert (example.reference_text, example.agreeing) == (None, ())
    assert sorted(answer.text for answer in example.answers) == ["x", "y"]
    assert {answer.edit_distance for answer in example.answers} == {None}


def provenance(arm_id: str, segment: int, writer: str, **fields):
    return {
        "arm_id": arm_id,
        "request_id": "r1",
        "segment": segment,
        "content_id": f"c{segment}",
        "writer_request_id": writer,
        "writer_part": "request",
        "write_ordinal": 0,
        "old_position": 40,
        "new_position": 10,
        "context_hash_written": "there",
        "context_hash_now": "here",
        "computed_over": [],
        **fields,
    }


def test_origins_say_who_wrote_what_the_damaged_answer_was_made_of():
    text = full_prefill(FULL) + arm_lines("p", {"chronological": FULL, "reversed": "a x c d"}, FULL, FULL)
    rows = [
        provenance("p.reversed", 2, "r3"),
        provenance("p.reversed", 1, "r2", writer_part="prelude", context_hash_written="here"),
        provenance("p.chronological", 2, "r0"),
        provenance("p.chronological", 2, "r9", request_id="r2"),
    ]
    built = run(text)
    built.tables["provenance"] = pa.Table.from_pylist(rows, TABLES["provenance"])
    (example,) = analyse(built, None, built.provenance).examples
    first, second = example.origins
    assert (first.segment, first.writer, first.writer_part) == (1, "r2", "prelude")
    assert (first.other_writer, first.same_context) == (None, True)
    assert (second.segment, second.writer, second.other_writer, second.same_context) == (2, "r3", "r0", False)
    assert (second.old_position, second.new_position, second.content_id) == (40, 10, "c2")


def test_provenance_is_asked_for_the_shown_arms_and_requests_only():
    asked = []

    def lookup(arm_ids, request_ids):
        asked.append((tuple(arm_ids), tuple(request_ids)))
        return TABLES["provenance"].empty_table()

    built = run(full_prefill(FULL) + arm_lines("p", {"chronological": FULL, "reversed": "a x c d"}, FULL, FULL))
    analyse(built, None, lookup)
    assert asked == [(("p.reversed", "p.chronological"), ("r1",))]


def test_without_damage_nothing_is_looked_up():
    def lookup(arm_ids, request_ids):
        raise AssertionError("nothing to look up")

    built = run(full_prefill(FULL) + arm_lines("p", {"chronological": FULL, "reversed": FULL}, FULL, FULL))
    assert analyse(built, None, lookup).examples == ()


def test_an_audit_without_a_lookup_has_no_origins():
    built: BuiltRun = run(
        full_prefill(FULL) + arm_lines("p", {"chronological": FULL, "reversed": "a x c d"}, FULL, FULL)
    )
    assert analyse(built).examples[0].origins == ()
