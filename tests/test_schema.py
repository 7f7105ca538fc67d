import re
from typing import get_args

import pyarrow as pa
import pytest

from kvaudit import records
from kvaudit.analysis.compare import Kind
from kvaudit.plugins import BUILT_IN
from kvaudit.schema import SCHEMA_VERSION, TABLES
from kvaudit.schema.footer import FOOTER, footer
from kvaudit.schema.metrics import METRICS
from kvaudit.schema.reference import as_markdown, files_of, type_name
from kvaudit.schema.tables import DOCUMENTED
from kvaudit.schema.values import VALUES
from kvaudit.store import layout

COLUMNS = [(name, column) for name, table in DOCUMENTED.items() for column in table.columns]


@pytest.fixture(scope="module")
def page():
    return as_markdown()


def section(page, title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]


def cells(text):
    """The rows of a Markdown table without its head."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


@pytest.mark.parametrize(("name", "column"), COLUMNS, ids=lambda part: getattr(part, "name", part))
def test_every_column_has_one_line_of_text(name, column):
    assert column.meaning.strip() == column.meaning != ""
    assert "\n" not in column.meaning
    assert column.meaning[0].islower() or column.meaning.startswith(("KL", "Levenshtein"))
    assert not column.meaning.endswith(".")


@pytest.mark.parametrize(("name", "column"), COLUMNS, ids=lambda part: getattr(part, "name", part))
def test_what_null_means_is_said_exactly_where_null_may_be(name, column):
    assert ("null: " in column.meaning) == column.nullable


def test_every_table_says_what_a_row_is():
    assert all(table.row and "\n" not in table.row for table in DOCUMENTED.values())


def test_the_schemas_are_made_of_the_documented_columns():
    assert list(TABLES) == list(DOCUMENTED)
    for name, table in DOCUMENTED.items():
        assert TABLES[name].names == [column.name for column in table.columns]
        assert TABLES[name].types == [column.type for column in table.columns]
        assert [field.nullable for field in TABLES[name]] == [column.nullable for column in table.columns]


def test_a_column_cannot_be_there_twice():
    for schema in TABLES.values():
        assert len(set(schema.names)) == len(schema.names)


def test_the_page_has_every_table_column_type_and_meaning(page):
    assert re.findall(r"^## `(\w+)`", page, re.MULTILINE) == list(TABLES)
    for name, table in DOCUMENTED.items():
        shown = section(page, f"`{name}`")
        assert f"`{files_of(name)}`. A row is {table.row}." in shown
        assert cells(shown) == [
            [f"`{column.name}`", f"`{type_name(column.type)}`", ["never", "may be"][column.nullable], column.meaning]
            for column in table.columns
        ]


def test_the_page_has_every_word_figure_and_footer_key(page):
    words = cells(section(page, "Words that columns hold"))
    assert words == [[f"`{column}`", word, says] for column, known in VALUES.items() for word, says in known.items()]
    figures = cells(section(page, "Figures of `summary`"))
    assert figures == [[f"`{name}`", metric.row, metric.value] for name, metric in METRICS.items()]
    assert cells(section(page, "Footer of every file")) == [[f"`{key}`", says] for key, says in FOOTER.items()]
    assert f"Schema version {SCHEMA_VERSION}." in page


def test_the_page_is_plain_and_can_stand_below_another_heading(page):
    assert page.isascii()
    assert page.endswith("|\n")
    assert as_markdown(level=3) == re.sub(r"^(#+ )", r"##\1", page, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("column", "known"),
    [
        ("control", get_args(records.Control)),
        ("part, writer_part", get_args(records.Part)),
        ("comparisons.kind", get_args(Kind)),
        ("segments.kind", records.KINDS),
    ],
)
def test_words_are_those_that_the_program_knows(column, known):
    assert set(VALUES[column]) == set(known)


def test_names_that_the_program_gives_are_explained():
    assert records.FULL_PREFILL in VALUES["policy"]
    assert records.FULL_PREFILL not in BUILT_IN["policies"]
    assert {records.CHRONOLOGICAL, records.REVERSED} <= set(VALUES["order"])


def test_files_are_where_the_run_folder_has_them(tmp_path):
    for name in TABLES:
        by_arm = name in layout.ARM_TABLES
        found = layout.part_path(tmp_path, name, "arm") if by_arm else layout.table_path(tmp_path, name)
        assert found.relative_to(tmp_path).match(files_of(name))
        assert files_of(name).endswith("/*.parquet") == by_arm


def test_the_footer_is_what_the_run_folder_writes():
    assert layout.Stamp("trace", "settings").footer("writes") == footer("writes", "trace", "settings")
    assert footer("writes", "trace", "settings") == {
        "kvaudit.table": "writes",
        "kvaudit.schema_version": str(SCHEMA_VERSION),
        "kvaudit.trace_digest": "trace",
        "kvaudit.settings_digest": "settings",
    }


def test_types_are_named_alike_by_every_arrow():
    assert type_name(pa.list_(pa.list_(pa.float32()))) == "list<list<float>>"
    assert type_name(pa.list_(pa.struct([("start", pa.int64()), ("deviation", pa.float64())]))) == (
        "list<struct<start: int64, deviation: double>>"
    )
