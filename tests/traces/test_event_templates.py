"""Templates put a row's values into text, and evaluate nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import UsageError
from kvaudit.traces.source import TraceSource
from kvaudit.traces.tables import Table
from kvaudit.traces.templates import ChannelTemplates, parse_template, unescape

ROW = {"date": "2013-01-02", "adj close": "28.0", "a.b": "dotted", "a[0]": "indexed", "note": "{date}\\n"}
TABLE = Table(TraceSource("prices.csv", Path("prices.csv")), tuple(ROW), iter(()))


def rendered(template: str) -> str:
    return parse_template(template, "--document").render(ROW)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{date}", "2013-01-02"),
        ("{date},{adj close}\\n", "2013-01-02,28.0\n"),
        ("{{date}} {date}", "{date} 2013-01-02"),
        ("{a.b} {a[0]}", "dotted indexed"),
        ("{note}", "{date}\\n"),
        ("no column", "no column"),
        ("", ""),
    ],
)
def test_columns_are_replaced_by_their_values(template: str, text: str) -> None:
    assert rendered(template) == text


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{}", "has braces without a column in them"),
        ("{date:>10}", "has more than a column name in its braces"),
        ("{date!r}", "has more than a column name in its braces"),
        ("{date:{note}}", "has more than a column name in its braces"),
        ("{date", "is no template: "),
        ("date}", "is no template: "),
    ],
)
def test_anything_but_a_column_name_is_refused(template: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_template(template, "--question")

    assert caught.value.message.startswith(f"--question {template!r} {what}")


@pytest.mark.parametrize("template", ["{date.__class__}", "{date[0]}", "{0}", "{clos}"])
def test_a_column_that_the_table_does_not_have_is_refused_with_those_that_it_has(template: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChannelTemplates("--answer", [template], channels=False).of("prices", TABLE)

    assert caught.value.message == f"--answer names the column {template[1:-1]!r}, which prices.csv does not have"
    assert caught.value.hint == "columns: date, adj close, a.b, a[0], note"


@given(st.text())
def test_a_value_is_never_evaluated(value: str) -> None:
    assert parse_template("<{x}>", "--document").render({"x": value}) == f"<{value}>"


@pytest.mark.parametrize(
    ("written", "meant"),
    [(r"a\nb", "a\nb"), (r"a\\nb", r"a\nb"), (r"\t\r", "\t\r"), (r"\d\x", r"\d\x"), ("a\nb", "a\nb"), ("\\", "\\")],
)
def test_escapes(written: str, meant: str) -> None:
    assert unescape(written) == meant


def test_channels_have_their_own_templates() -> None:
    templates = ChannelTemplates("--document", ["{date}", "news={note}", "filings=f={date}"], channels=True)

    texts = {name: templates.of(name, TABLE) for name in ("prices", "news", "filings")}

    assert {name: template and template.render(ROW) for name, template in texts.items()} == {
        "prices": "2013-01-02",
        "news": "{date}\\n",
        "filings": "f=2013-01-02",
    }


def test_with_one_channel_an_equals_sign_is_text() -> None:
    template = ChannelTemplates("--document", ["date={date}"], channels=False).of("prices", TABLE)

    assert template is not None
    assert template.render(ROW) == "date=2013-01-02"


def test_two_templates_for_the_same_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="--document is given twice"):
        ChannelTemplates("--document", ["{date}", "{note}"], channels=True)
    with pytest.raises(UsageError, match="--document is given twice"):
        ChannelTemplates("--document", ["a={date}", "b={note}"], channels=False)


def test_a_template_for_a_channel_that_does_not_occur_is_refused() -> None:
    templates = ChannelTemplates("--document", ["nwes={date}"], channels=True)

    with pytest.raises(UsageError, match=r"channel 'nwes', which does not occur \(channels: news, prices\)"):
        templates.check_channels(["news", "prices"])
