import pytest

from kvaudit.records import Arm, Eviction, Order, Provenance, Selection, Served, Write
from kvaudit.rows import (
    Exchange,
    captured_deviation,
    eviction_rows,
    first_difference,
    observation_row,
    provenance_rows,
    selection_row,
    write_rows,
)
from kvaudit.schema import TABLES

ARM = Arm("token-topk", Order("shuffle-1", 7, (1, 0)), "none")
SELECTION = Selection(1, ((3, 5), (9, 10)), (2.0, 1.0), 12.0)


def served(**fields):
    return Served(answer_ids=(5, 6), answer_text="a b", finish_reason="stop", prompt_tokens=10, **fields)


def row(exchange, reference=(5, 6)):
    return observation_row(ARM, "scripted", 4, exchange, reference)


@pytest.mark.parametrize(
    ("answer", "reference", "index"),
    [
        ((1, 2), (1, 2), None),
        ((), (), None),
        ((1, 2), (1, 3), 1),
        ((1,), (1, 2), 1),
        ((1, 2), (), 0),
        ((2, 2), (1, 2), 0),
    ],
)
def test_first_difference(answer, reference, index):
    assert first_difference(answer, reference) == index


def test_captured_deviation_is_the_share_that_was_recomputed():
    assert captured_deviation(SELECTION) == pytest.approx(0.25)
    assert captured_deviation(Selection(1, (), (), 0.0)) is None
    assert captured_deviation(None) is None


def test_an_observation_has_every_column_but_the_error():
    exchange = Exchange("r1", (), served(selection=SELECTION, kl=0.5), 0)
    observed = row(exchange, (5, 7))
    assert set(TABLES["observations"].names) - set(observed) == {"error"}
    assert observed["arm_id"] == "token-topk.shuffle-1"
    assert (observed["order"], observed["order_seed"], observed["control"]) == ("shuffle-1", 7, "none")
    assert (observed["fragmentation"], observed["captured_deviation"], observed["first_difference"]) == (2, 0.25, 1)
    assert (observed["kl"], observed["cache_entries_before"], observed["position"]) == (0.5, 0, 4)


def test_the_reference_itself_has_no_first_difference():
    assert row(Exchange("r1", (), served(), None), None)["first_difference"] is None


def test_what_the_prelude_reused_is_summed_and_unknown_without_one():
    before = (served(reused_tokens=0), served(reused_tokens=7), served(reused_tokens=4))
    with_prelude = row(Exchange("r1", before, served(reused_tokens=9), None))
    without = row(Exchange("r1", (), served(reused_tokens=9), None))
    assert (with_prelude["prelude_reused_tokens"], with_prelude["first_reused_tokens"]) == (11, 0)
    assert (without["prelude_reused_tokens"], without["first_reused_tokens"]) == (None, 9)


@pytest.mark.parametrize(("before", "own", "most"), [(3, 1, 3), (1, 2, 2), (None, 2, 2), (None, None, None)])
def test_what_was_sent_again_in_the_prelude_counts(before, own, most):
    assert row(Exchange("r1", (served(attempts=before),), served(attempts=own), None))["attempts"] == most


def test_an_answer_whose_ids_an_engine_does_not_show_has_none():
    textual = Served(answer_ids=(), answer_text="yes", finish_reason="stop", prompt_tokens=3)
    empty = Served(answer_ids=(), answer_text="", finish_reason="stop", prompt_tokens=3)
    assert row(Exchange("r1", (), textual, None))["answer_ids"] is None
    assert row(Exchange("r1", (), empty, None))["answer_ids"] == []


def test_the_ledger_tells_the_preludes_part_from_the_requests():
    before = served(writes=(Write("c", 1, 0, 4, "h1", (), 10),), evictions=(Eviction("a", 1, 10),))
    after = served(writes=(Write("d", 2, 4, 4, "h2", (1,), 10),), evictions=(Eviction("b", 2, 20),))
    exchange = Exchange("r1", (before,), after, None)
    written = [(row["part"], row["content_id"], row["computed_over"]) for row in write_rows("arm", exchange)]
    evicted = [(row["part"], row["content_id"]) for row in eviction_rows("arm", exchange)]
    assert written == [("prelude", "c", ()), ("request", "d", (1,))]
    assert evicted == [("prelude", "a"), ("request", "b")]


def test_selections_and_ledger_rows_have_their_tables_columns():
    facts = served(
        provenance=(Provenance(0, "c", "r0", "prelude", 3, 1, 2, "h1", "h2"),),
        writes=(Write("d", 2, 4, 4, "h2", (1,), 10),),
        evictions=(Eviction("c", 1, 10),),
    )
    exchange = Exchange("r1", (), facts, None)
    assert list(selection_row("arm", "r1", SELECTION)) == TABLES["selections"].names
    assert selection_row("arm", "r1", SELECTION)["spans"][1] == {"start": 9, "end": 10, "deviation": 1.0}
    assert list(provenance_rows("arm", exchange)[0]) == TABLES["provenance"].names
    assert list(write_rows("arm", exchange)[0]) == TABLES["writes"].names
    assert list(eviction_rows("arm", exchange)[0]) == TABLES["evictions"].names
