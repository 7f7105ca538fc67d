"""The page, the strips on it, the data and the table."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
from inspections import UNLIMITED, Characters, inspected, request, rows

from kvaudit.errors import TraceError
from kvaudit.preflight.facts import About, as_data
from kvaudit.preflight.inspection import Inspection
from kvaudit.preflight.page import write_page
from kvaudit.preflight.plot import axis, strip
from kvaudit.preflight.table import ROWS_A_GROUP, SCHEMA, as_row, reuse_table

TRACE = [
    request(
        f"r{n}", f"i:At 12:0{n} {'the rules are long enough. ' * 2}", f"d:row {n}.", f"d:row {n + 1}.", f"q:why {n}?"
    )
    for n in range(4)
]
ABOUT = About("trace.jsonl", "characters", "abc", 4096, ("a note",))


def page(inspection: Inspection, most: int = 12, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", write_through=True) as out:
        write_page(inspection, ABOUT, most, out)
        return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_page_fits_80_columns_and_carries_no_colour(encoding: str) -> None:
    shown = page(inspected(TRACE), encoding=encoding)

    assert max(map(len, shown.splitlines())) <= 80 or encoding == "ascii"
    assert "\x1b" not in shown
    for title in ("Segments", "What could be reused", "Hit rate over the trace", "Where the cached prefix ends"):
        assert title in shown


def test_the_page_says_with_what_it_counted() -> None:
    shown = " ".join(page(inspected(TRACE)).split())

    assert "tokens of the tokenizer of characters" in shown
    assert "the model takes 4,096" in shown
    assert "a note" in shown


def test_the_page_names_request_and_segment_cost_and_remedy() -> None:
    shown = " ".join(page(inspected(TRACE)).split())

    finding = next(finding for finding in inspected(TRACE).findings if finding.code == "volatile")
    assert f"warning [volatile] text that changes before text that stays: {finding.tokens:,} tokens" in shown
    assert "request 'r1', segment 1 (first of 3): a time stamp in the instruction at token 7" in shown
    assert "do: move it to the end of the prompt" in shown


def test_what_is_cut_off_is_counted() -> None:
    inspection = inspected(TRACE)
    assert len(inspection.findings) > 1
    left = inspection.findings[1:]

    shown = page(inspection, most=1)
    assert f"{len(left)} more findings, {sum(finding.tokens for finding in left):,} tokens" in shown


def test_foreign_text_cannot_write_to_the_terminal() -> None:
    shown = page(inspected([request("r1", "i:\x1b[31m 1 rules that stay the same", "d:x", "q:\x07")]))

    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_trace_of_which_nothing_could_be_counted_has_a_page() -> None:
    class NoBlanks(Characters):
        def encode(self, text: str) -> list[int]:
            return []

    shown = page(inspected([request("r0", "d: ", "q:x")], NoBlanks()))

    assert "left out for want of token ids: 1 request (see findings)" in shown


def test_strips() -> None:
    assert strip([0.0, 0.001, 0.124, 0.126, 0.5, 0.999, 1.0]) == ".▁▁▂▅██"
    assert strip([0.0, 0.001, 0.09, 0.1, 0.5, 0.999, 1.0], ascii_only=True) == ".001599"
    assert axis(1_200, 20) == "1" + " " * 14 + "1,200"
    assert axis(3, 1) == "1"


def test_the_page_without_unicode_shows_digits() -> None:
    shown = page(inspected(TRACE), encoding="ascii")

    assert "0 to 9: tens of per cent" in shown
    assert "any position .5" in shown.replace("   ", " ") or "any position ." in shown


def test_the_data_says_what_the_page_says() -> None:
    inspection = inspected(TRACE)
    data = orjson.loads(orjson.dumps(as_data(inspection, ABOUT, 1)))

    assert data["counts"]["requests"] == 4
    assert data["counts"]["prompt_tokens"] == inspection.totals.prompt_tokens
    assert data["reuse"]["vllm_reused"] == inspection.totals.vllm_reused
    assert [finding["code"] for finding in data["findings"]] == [inspection.findings[0].code]
    assert sum(total["tokens"] for total in data["finding_totals"]) == sum(f.tokens for f in inspection.findings)
    assert [row["ratio"] for row in data["recompute"]] == [0.05, 0.10, 0.15, 0.20]
    (differs,) = [one for one in data["breaks"] if one["how"] == "differs"]
    assert differs["worst"]["prefix_from"] is not None


def test_the_table_has_the_documented_columns_and_one_row_a_request(tmp_path: Path) -> None:
    import kvaudit.preflight.table as module

    for name in SCHEMA.names:
        assert name in (module.__doc__ or "")
    path, found = tmp_path / "reuse.parquet", rows(TRACE, UNLIMITED)
    with reuse_table(path, {"trace": "t"}) as table:
        for row in found:
            table.add(row)

    read = pq.read_table(path)
    assert read.schema.equals(SCHEMA)
    assert read.schema.metadata[b"trace"] == b"t"
    assert read.to_pylist() == [as_row(row) for row in found]
    assert read["break_segment"].to_pylist() == [1] * 4


def test_an_empty_table_keeps_its_types(tmp_path: Path) -> None:
    with reuse_table(tmp_path / "reuse.parquet", {}):
        pass

    assert pq.read_table(tmp_path / "reuse.parquet").schema.equals(SCHEMA)


def test_a_long_table_is_written_in_groups(tmp_path: Path) -> None:
    (row, *_) = rows(TRACE)
    with reuse_table(tmp_path / "reuse.parquet", {}) as table:
        for _ in range(ROWS_A_GROUP + 1):
            table.add(row)

    assert pq.ParquetFile(tmp_path / "reuse.parquet").num_row_groups == 2


def test_a_table_that_is_not_finished_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "reuse.parquet"
    with pytest.raises(TraceError), reuse_table(path, {}):
        raise TraceError("line 7: broken")

    assert not list(tmp_path.iterdir())
