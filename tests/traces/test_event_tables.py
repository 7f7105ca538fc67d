"""Event tables as rows of text."""

from __future__ import annotations

import datetime
import decimal
import gzip
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvaudit.errors import TraceError
from kvaudit.traces.source import open_source
from kvaudit.traces.tables import read_table

Rows = list[tuple[int, dict[str, str]]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events"


def read(file: Path, content: bytes | None = None) -> tuple[tuple[str, ...], Rows]:
    if content is not None:
        file.write_bytes(content)
    with open_source(file) as source:
        table = read_table(source)
        return table.columns, list(table.rows)


def refusal(file: Path, content: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        read(file, content)
    return caught.value.message


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_csv_values_stay_as_they_are_written(file: Path, compress: type[bytes]) -> None:
    content = '\ufeffdate,close,"the note"\n2013-01-02,555.00,"a ""b"",\nc"\r\n\n2013-01-03,007,\u2028x\n'.encode()

    columns, rows = read(file, compress(content))

    assert columns == ("date", "close", "the note")
    assert rows == [
        (3, {"date": "2013-01-02", "close": "555.00", "the note": 'a "b",\nc'}),
        (5, {"date": "2013-01-03", "close": "007", "the note": "\u2028x"}),
    ]


def test_a_long_csv_field_is_read(file: Path) -> None:
    _, rows = read(file, b"text\n" + b"x" * 1_000_000 + b"\n")

    assert len(rows[0][1]["text"]) == 1_000_000


def test_json_lines_values_are_the_json_without_quotes(file: Path) -> None:
    content = b'{"date": "2013-01-02", "close": 555.10, "up": true, "n": null, "tags": ["a", 1]}\n\n{"close": 7}\n'

    columns, rows = read(file, content)

    assert columns == ("date", "close", "up", "n", "tags")
    assert rows[0] == (1, {"date": "2013-01-02", "close": "555.1", "up": "true", "n": "", "tags": '["a",1]'})
    assert rows[1] == (3, {"date": "", "close": "7", "up": "", "n": "", "tags": ""})


def test_parquet_values_are_in_their_shortest_form(file: Path) -> None:
    day, moment = datetime.date(2013, 1, 2), datetime.datetime(2013, 1, 2, 9, 30)
    table = pa.table(
        {
            "day": pa.array([day, None]),
            "moment": pa.array([moment, None], pa.timestamp("ns")),
            "close": pa.array([0.1, None], pa.float32()),
            "open": pa.array([549.03, 1.0]),
            "volume": pa.array([20018500, 0]),
            "exact": pa.array([decimal.Decimal("1.50"), None]),
            "symbol": pa.array(["AAPL", "FB"]).dictionary_encode(),
            "year": pa.array([2012, 2013]).dictionary_encode(),
            "tags": pa.array([["a"], []]),
        }
    )
    parquet.write_table(table, file)

    columns, rows = read(file)

    assert columns == tuple(table.column_names)
    assert [tuple(row.values()) for _, row in rows] == [
        ("2013-01-02", "2013-01-02 09:30:00", "0.1", "549.03", "20018500", "1.50", "AAPL", "2012", '["a"]'),
        ("", "", "", "1", "0", "", "FB", "2013", "[]"),
    ]
    assert [number for number, _ in rows] == [1, 2]


@pytest.mark.parametrize(
    ("content", "where", "what"),
    [
        (b"", " is empty", ""),
        (b"\n\n", " is empty", ""),
        (b"a,b\n1,2\n1\n", ", line 3: ", "1 fields, and the header has 2"),
        (b"a,b\n1,2,3\n", ", line 2: ", "3 fields, and the header has 2"),
        (b"a,a\n1,2\n", " has the column 'a' twice", ""),
        (b'a,b\n1,"2\n', ", line 2: ", "broken CSV: "),
        (b'a,b\n1,"2"3\n', ", line 2: ", "broken CSV: "),
        (b"a,b\n1,\xff\n", ", line 2: ", "not UTF-8 at byte 3"),
        (b'{"a": 1}\n{"a": \n', ", line 2: ", "broken JSON"),
        (b'{"a": 1}\n[1]\n', ", line 2: ", "not a JSON object but a list"),
        (b"PAR1 and nothing of the kind", " cannot be read as Parquet: ", ""),
    ],
)
def test_broken_tables_are_named_with_their_line(file: Path, content: bytes, where: str, what: str) -> None:
    message = refusal(file, content)

    assert message.startswith(f"{file}{where}")
    assert what in message


def test_damaged_parquet_pages_are_an_error(file: Path) -> None:
    parquet.write_table(pa.table({"text": [f"{n} some text" for n in range(5000)]}), file, compression="zstd")
    content = bytearray(file.read_bytes())
    content[40:400] = bytes(360)

    assert refusal(file, bytes(content)).startswith(f"{file} cannot be read as Parquet: ")
