from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from kvaudit.analysis import compare
from kvaudit.analysis.compare import DIFFERENT, EQUAL, NOT_COMPARABLE, build_grid, comparisons_table
from kvaudit.errors import RunError
from kvaudit.schema import TABLES

ORDERS = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")


def grid_of(built: BuiltRun):
    return build_grid(built.table("observations"), built.table("requests"), built.arms())


def compared(built: BuiltRun):
    grid = grid_of(built)
    return grid, compare.compare(grid)


def table_rows(built: BuiltRun, kind: str | None = None):
    grid, pairs = compared(built)
    rows = comparisons_table(grid, pairs).to_pylist()
    return [row for row in rows if kind in (None, row["kind"])]


def policy_run(orders: dict[str, str], reset: str = "a b", repeat: str | None = None, full: str = "a b") -> BuiltRun:
    return run(full_prefill(full) + arm_lines("token-topk", orders, reset, repeat or orders["chronological"]))


def test_every_kind_of_comparison_is_made_once():
    rows = table_rows(run(clean(words="a b", orders=ORDERS[1:])))
    pairs = {(row["kind"], row["left"], row["right"]) for row in rows}
    arms = [f"token-topk.{order}" for order in ORDERS]
    controls = ["token-topk.chronological.reset", "token-topk.chronological.repeat"]
    assert pairs == (
        {("reference", "full-prefill.chronological", arm) for arm in [*arms, *controls]}
        | {("orders", left, right) for left, right in combinations(arms, 2)}
        | {("repeat", "token-topk.chronological", "token-topk.chronological.repeat")}
        | {("noise", "full-prefill.chronological", "full-prefill.chronological.repeat")}
    )
    assert len(rows) == 2 * len(pairs)


def test_five_orders_give_ten_pairs():
    rows = table_rows(run(clean(words="a", orders=ORDERS[1:])), "orders")
    assert len(rows) == 10


def test_the_table_has_its_schema():
    grid, pairs = compared(run(clean()))
    assert comparisons_table(grid, pairs).schema == TABLES["comparisons"]
    assert comparisons_table(grid, ()).schema == TABLES["comparisons"]


def test_requests_are_matched_by_id_and_not_by_place():
    built = policy_run({"chronological": "a b", "reversed": "a b"})
    shuffled = built.table("observations").take(np.random.default_rng(0).permutation(len(built.table("observations"))))
    rows = table_rows(BuiltRun(built.planned, {**built.tables, "observations": shuffled}))
    assert all(row["equal"] for row in rows)


def test_differing_answers_are_told_with_their_edit_distance():
    rows = table_rows(policy_run({"chronological": "a b", "reversed": "a bxy"}), "orders")
    assert [(row["request_id"], row["equal"], row["edit_distance"]) for row in rows] == [
        ("r0", True, 0),
        ("r1", False, 2),
    ]


def test_same_text_of_other_tokens_is_another_answer():
    built = policy_run({"chronological": "a b", "reversed": "a other"}).with_rows(
        lambda row: row | {"answer_text": "same"}
    )
    rows = table_rows(built, "orders")
    assert [(row["equal"], row["edit_distance"]) for row in rows] == [(True, 0), (False, 0)]


def test_same_tokens_of_another_text_are_another_answer():
    """A stop string that begins inside a token: the tokens that stand whole are the same, the texts are not."""
    built = policy_run({"chronological": "a b", "reversed": "a b"}).with_rows(
        lambda row: row | ({"answer_text": "cut"} if (row["order"], row["request_id"]) == ("reversed", "r1") else {})
    )
    assert [(row["equal"], row["edit_distance"]) for row in table_rows(built, "orders")] == [(True, 0), (False, 3)]


def test_texts_are_compared_where_either_side_has_no_token_ids():
    built = policy_run({"chronological": "a b", "reversed": "a c"}).with_rows(
        lambda row: row | ({"answer_ids": None} if row["order"] == "reversed" else {})
    )
    assert [row["equal"] for row in table_rows(built, "orders")] == [True, False]


def test_ids_without_texts_are_compared_and_have_no_distance():
    built = policy_run({"chronological": "a b", "reversed": "a c"}).with_rows(lambda row: row | {"answer_text": None})
    rows = table_rows(built, "orders")
    assert [(row["equal"], row["edit_distance"]) for row in rows] == [(True, 0), (False, None)]


def test_ids_on_one_side_and_text_on_the_other_do_not_compare():
    built = policy_run({"chronological": "a b", "reversed": "a b"}).with_rows(
        lambda row: row | ({"answer_ids": None} if row["order"] == "reversed" else {"answer_text": None})
    )
    assert table_rows(built, "orders") == []


def test_an_error_or_a_missing_observation_gives_no_row():
    built = policy_run({"chronological": "a b c d", "reversed": "a ! - d"}, reset="a b c d", full="a b c d")
    assert [row["request_id"] for row in table_rows(built, "orders")] == ["r0", "r3"]
    grid = grid_of(built)
    assert grid.failed.sum() == 1


def test_an_observation_with_an_answer_and_an_error_is_an_error():
    built = policy_run({"chronological": "a b", "reversed": "a b"}).with_rows(
        lambda row: row | ({"error": "cut off"} if row["request_id"] == "r0" else {})
    )
    assert {row["request_id"] for row in table_rows(built)} == {"r1"}


def test_empty_answers_are_answers():
    rows = table_rows(policy_run({"chronological": "_ b", "reversed": "_ _"}), "orders")
    assert [(row["equal"], row["edit_distance"]) for row in rows] == [(True, 0), (False, 1)]


def test_a_repeated_observation_counts_once_and_is_counted():
    built = policy_run({"chronological": "a b", "reversed": "a b"})
    rows = built.table("observations").to_pylist()
    again = [row | {"answer_ids": [1], "answer_text": "z"} for row in rows if row["order"] == "reversed"]
    table = pa.Table.from_pylist(rows + again, TABLES["observations"])
    grid = build_grid(table, built.table("requests"), built.arms())
    assert list(grid.duplicates) == [0, 0, 0, 2, 0, 0]
    assert all(pair.agreement.tolist() == [EQUAL, EQUAL] for pair in compare.compare(grid))


def test_rows_of_unplanned_arms_and_requests_are_counted_and_left_out():
    built = policy_run({"chronological": "a b", "reversed": "a b"})
    grid = build_grid(built.table("observations"), built.table("requests").slice(0, 1), built.arms()[:-1])
    assert grid.strays == 5 + 2
    assert grid.rows.shape == (5, 1)


def test_requests_stand_in_the_order_of_the_stream():
    built = policy_run({"chronological": "a b", "reversed": "a b"})
    backwards = built.table("requests").take([1, 0])
    grid = build_grid(built.table("observations"), backwards, built.arms())
    assert grid.request_ids.to_pylist() == ["r0", "r1"]
    assert grid.text(0, 1) == "b"


def test_columns_are_aligned_with_requests_and_nan_where_nothing_is():
    built = policy_run({"chronological": "a b c", "reversed": "a - c"}, full="a b c", reset="a b c")
    built = built.with_rows(lambda row: row | ({"kl": None} if row["request_id"] == "r0" else {}))
    kl = grid_of(built).column("kl", 3)
    assert np.isnan(kl[:2]).all()
    assert kl[2] == 0.25


@pytest.mark.parametrize("text", ["a\u2028b", "\u202eabc", "", "\x00\x1b[31m", "x" * 1_000_000])
def test_hostile_texts_are_equal_to_themselves_only(text):
    built = run(
        full_prefill("t t") + arm_lines("p", {"chronological": "t u", "reversed": "t t"}, "t t", "t u"),
        texts={"t": text, "u": text[:-1] + "y"},
    )
    built = built.with_rows(lambda row: row | {"answer_ids": None})
    assert [row["equal"] for row in table_rows(built, "orders")] == [True, False]


def test_very_long_differing_answers_are_not_measured(monkeypatch):
    monkeypatch.setattr(compare, "LONGEST_EDIT", 8)
    built = run(
        full_prefill("t s") + arm_lines("p", {"chronological": "t s", "reversed": "u v"}, "t s", "t s"),
        texts={"t": "aaa", "u": "bbb", "s": "aa", "v": "ab"},
    )
    assert [row["edit_distance"] for row in table_rows(built, "orders")] == [None, 1]


def test_tables_in_many_chunks_are_read_alike():
    built = policy_run({"chronological": "a b", "reversed": "a bx"})
    table = built.table("observations")
    chunked = pa.concat_tables([table.slice(index, 1) for index in range(len(table))])
    assert table_rows(BuiltRun(built.planned, {**built.tables, "observations": chunked})) == table_rows(built)


@pytest.mark.parametrize("column", ["arm_id", "answer_ids", "error"])
def test_a_foreign_table_is_refused_by_name(column):
    built = run(clean())
    with pytest.raises(RunError, match=f"observations.*{column}"):
        build_grid(built.table("observations").drop_columns([column]), built.table("requests"), built.arms())


def test_a_table_of_other_types_is_refused():
    built = run(clean())
    table = built.table("observations")
    wrong = table.set_column(table.schema.get_field_index("kl"), "kl", pa.array(["much"] * len(table)))
    with pytest.raises(RunError, match="observations"):
        build_grid(wrong, built.table("requests"), built.arms())


def test_an_empty_run_compares_nothing():
    grid = build_grid(TABLES["observations"].empty_table(), TABLES["requests"].empty_table(), run(clean()).arms())
    assert all(len(pair.agreement) == 0 for pair in compare.compare(grid))
    nothing = build_grid(TABLES["observations"].empty_table(), TABLES["requests"].empty_table(), ())
    assert compare.compare(nothing) == ()


words = st.sampled_from(["a", "ab", "abc", "b", "_", "!", "-"])


@settings(deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=12))
def test_comparison_agrees_with_a_loop_over_answers(answers):
    left, right = " ".join(a for a, _ in answers), " ".join(b for _, b in answers)
    built = policy_run({"chronological": left, "reversed": right}, full=left)
    _, pairs = compared(built)
    (pair,) = [pair for pair in pairs if pair.kind == "orders"]
    for index, (a, b) in enumerate(answers):
        if {a, b} & {"!", "-"}:
            assert pair.agreement[index] == NOT_COMPARABLE
        else:
            assert pair.agreement[index] == (EQUAL if a == b else DIFFERENT)
            assert pair.distance[index] == Levenshtein.distance(a.strip("_"), b.strip("_"))
