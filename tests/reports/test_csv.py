import csv
import io
import math
from dataclasses import replace
from functools import cache

import duckdb
import pandas
import pytest
from audit_runs import clean, run
from hypothesis import given, settings
from hypothesis import strategies as st
from report_audits import audited, rendered, rich_run

from kvaudit.analysis.figures import Figure
from kvaudit.reports.csv import render
from kvaudit.reports.escape import visible
from kvaudit.schema import TABLES

COLUMNS = TABLES["summary"].names
NUMBERS = [field.name for field in TABLES["summary"] if str(field.type) in ("double", "int64")]


@pytest.fixture(scope="module")
def audit():
    return audited(rich_run())


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


@cache
def _base():
    return audited(run(clean("p")))


def with_figures(*figures: Figure):
    return replace(_base(), figures=figures)


def test_rows_and_columns_are_those_of_the_summary(audit):
    header, *rows = read(rendered(render, audit))
    assert header == COLUMNS
    assert [row[0] for row in rows] == audit.summary["metric"].to_pylist()


def test_values_read_back_as_exact_as_they_were(audit):
    _, *rows = read(rendered(render, audit))
    for row, wanted in zip(rows, audit.summary.to_pylist(), strict=True):
        for name, cell in zip(COLUMNS, row, strict=True):
            value = wanted[name]
            assert cell == "" if value is None else type(value)(cell) == value, (name, cell, value)


def test_lines_end_as_the_standard_says(audit):
    text = rendered(render, audit)
    assert text.endswith("\r\n")
    assert text.count("\n") == text.count("\r\n") == len(audit.figures) + 1


def test_pandas_and_duckdb_read_the_same(audit, tmp_path):
    path = tmp_path / "figures.csv"
    path.write_text(rendered(render, audit), encoding="utf-8", newline="")
    frame = pandas.read_csv(path, keep_default_na=False, na_values=[""])
    relation = duckdb.read_csv(str(path)).fetchall()
    wanted = audit.summary.to_pylist()
    assert list(frame.columns) == COLUMNS
    assert len(frame) == len(relation) == len(wanted)
    for name in NUMBERS:
        exact = [math.nan if row[name] is None else row[name] for row in wanted]
        assert list(frame[name]) == pytest.approx(exact, rel=1e-14, nan_ok=True)
        assert [row[COLUMNS.index(name)] for row in relation] == [row[name] for row in wanted]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("  =1+1", "'  =1+1"),
        ("\n=1+1", r"'\n=1+1"),
        ("\xa0=1+1", r"'\xa0=1+1"),
        ("＝1+1", "'＝1+1"),
        ("\tplain", r"'\tplain"),
        ("\rplain", r"'\rplain"),
        ("token-topk", "token-topk"),
        ('a, "b"', 'a, "b"'),
        ("esc\x1b[0m\x00\u202e", r"esc\x1b[0m\x00\u202e"),
    ],
)
def test_text_that_a_spreadsheet_would_run_is_only_text(text, cell):
    _, row = read(rendered(render, with_figures(Figure("fidelity", text, text, text, test=text))))
    assert row[1:4] == [cell] * 3
    assert row[COLUMNS.index("test")] == cell


def test_negative_numbers_stay_numbers():
    _, row = read(rendered(render, with_figures(Figure("fidelity_difference", "a - b", value=-0.25, low=-1e-17))))
    assert row[COLUMNS.index("value")] == "-0.25"
    assert row[COLUMNS.index("low")] == "-1e-17"
    assert row[1] == "a - b"


@settings(deadline=None)
@given(st.text(max_size=20), st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_any_number_come_back(text, value):
    header, row = read(rendered(render, with_figures(Figure("m", text, value=value))))
    assert len(row) == len(header)
    assert row[1].removeprefix("'") == visible(text).removeprefix("'")
    assert float(row[4]) == value
    assert row[1].lstrip()[:1] not in {"=", "+", "-", "@", "\t", "\r"} or not row[1].strip()
