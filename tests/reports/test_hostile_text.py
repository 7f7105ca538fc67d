"""Whatever text a run holds, every format can be written, and a real parser reads it back whole."""

import csv
import io
import re
from collections import Counter
from functools import cache

import duckdb
import orjson
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from lxml import html as lxml_html
from markdown_it import MarkdownIt
from report_audits import rendered
from same_text_audits import LONGEST_SETTING, REQUESTS, audit_of

from kvaudit.plugins import load
from kvaudit.reports import csv as csv_report
from kvaudit.reports import json as json_report
from kvaudit.reports import junit, markdown, terminal
from kvaudit.reports.escape import visible

NASTY = {
    "nul": "a\x00b",
    "terminal escapes": "\x1b[31mred\x1b]0;title\x07\x9b2J",
    "bell and backspace": "\x07\x08\x7f",
    "line separators": "a\u2028b\u2029c\x85d\r\ne\x0bf\x0c",
    "right to left": "\u202eevil\u2066\u200f",
    "formula": "=cmd|' /C calc'!A0",
    "formula after space": " \t=1+1",
    "end of CDATA": "]]>",
    "character references": "&#0; &amp; &lt;b&gt;",
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "details": "</details></summary></code></table></svg>",
    "quotes": "\"';--<a href='x' \"b\">",
    "pipe": "a|b\\|c\\\\|d\n| --- |",
    "backticks": "`a``b```\n```\n",
    "markdown": "# h\n- [x](http://a.b) ![i](http://a.b) @someone #12 **b** <!-- -->",
    "template": "{{ 7 * 7 }}{% raw %}$x$ %s %(x)s {0}",
    "not characters": "\ufffe\uffff\U0010ffff\ue000",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈é̂漢",
    "spaces": "   \u00a0\u3000\u200b ",
    "long": "<&|`é\x00" * 170_000,
}


@cache
def hostile(name: str):
    return audit_of(NASTY[name])


@cache
def plain():
    return audit_of("plain")


def check_terminal(audit, text):
    shown = rendered(terminal.render, audit)
    assert shown.startswith("Verdict: ")
    assert all(line.isprintable() for line in shown.split("\n"))
    assert shown.count("\nWhat was audited\n") == shown.count("\nWorst requests\n") == 1


def check_json(audit, text):
    data = orjson.loads(rendered(json_report.render, audit).encode())
    assert data["requests"] == REQUESTS
    assert [arm["arm_id"] for arm in data["arms"]] == [arm.arm_id for arm in audit.arms]
    assert len(data["figures"]) == len(audit.figures)
    assert data["settings"]["model"] == text[:LONGEST_SETTING]
    assert text[: json_report.LONGEST_TEXT] in {example["reference"]["text"] for example in data["examples"]}


def check_csv(audit, text):
    written = rendered(csv_report.render, audit)
    header, *rows = csv.reader(io.StringIO(written, newline=""), strict=True)
    assert len(rows) == len(audit.figures)
    assert {len(row) for row in rows} == {len(header)}
    shown = {visible(figure.policy) for figure in audit.figures if figure.policy}
    assert {row[1].removeprefix("'") for row in rows if row[1]} == {name.removeprefix("'") for name in shown}


def check_junit(audit, text):
    root = etree.fromstring(rendered(junit.render, audit).encode(), etree.XMLParser(huge_tree=True))
    cases = root.findall("testsuite/testcase")
    assert len(cases) == int(root.get("tests")) == 2 + len(audit.arms) * REQUESTS
    ids = [visible(name) for name in audit.grid.request_ids.to_pylist()]
    assert [case.get("name") for case in root[-1]] == ids
    assert [place.get("name") for place in root[1:]] == [visible(arm.arm_id) for arm in audit.arms]
    found = Counter(element.tag for element in cases for element in element)
    assert (found["failure"], found["error"]) == (4, 1)
    assert len(root.findall("testsuite/testcase/error")) == int(root.get("errors"))


def check_markdown(audit, text):
    parser = MarkdownIt("commonmark").enable("table")
    written, expected = rendered(markdown.render, audit), rendered(markdown.render, plain())
    tokens = parser.parse(written)
    assert [token.type for token in tokens] == [token.type for token in parser.parse(expected)]
    assert cells(written) == cells(expected)
    inner = {child.type for token in tokens for child in token.children or ()}
    assert inner <= {"text", "code_inline", "softbreak"}
    shown = {child.content for token in tokens for child in token.children or () if child.type == "code_inline"}
    if len(text) < 100:
        assert visible(f"{text[:200]}r0") in shown


def cells(text: str) -> list[int]:
    """How many cells each line of a table has; parsers fill short rows and drop what is too long."""
    return [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]


def check_html(audit, text):
    render = load("reports", "html")
    page, expected = (lxml_html.document_fromstring(rendered(render, one)) for one in (audit, plain()))
    for tag in ("table", "tr", "td", "th", "script", "img", "a", "iframe", "details", "svg", "h2"):
        assert len(page.findall(f".//{tag}")) == len(expected.findall(f".//{tag}")), tag
    assert not page.xpath("//@*[starts-with(name(), 'on')]")


CHECKS = {
    "terminal": check_terminal,
    "json": check_json,
    "csv": check_csv,
    "junit": check_junit,
    "markdown": check_markdown,
    "html": check_html,
}


def every_pair():
    """Each format with each text. A page takes a second: in every run only the texts that attack browsers."""
    for report in CHECKS:
        for name in NASTY:
            slow = report == "html" and name not in ("script", "details", "nul", "long")
            yield pytest.param(report, name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("report", "name"), [*every_pair()])
def test_every_format_survives(report, name):
    CHECKS[report](hostile(name), NASTY[name])


@pytest.mark.parametrize("name", NASTY)
def test_other_readers_of_csv_find_the_same_rows(name, tmp_path):
    path = tmp_path / "figures.csv"
    path.write_text(rendered(csv_report.render, hostile(name)), encoding="utf-8", newline="")
    figures = hostile(name).figures
    values = [figure.value for figure in figures]
    frame = pandas.read_csv(path)
    assert list(frame["value"]) == pytest.approx([float("nan") if v is None else v for v in values], nan_ok=True)
    rows = duckdb.read_csv(str(path), header=True, delimiter=",", quotechar='"', escapechar='"')
    assert [row[0] for row in rows.project("value").fetchall()] == values


@settings(max_examples=10, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="`|\\<>&#@*_[]()!-=\"'\n\r\t \x00\x1b\u2028", max_size=40))
def test_any_text_can_be_written_and_read_back(text):
    audit = audit_of(text)
    for name in ("terminal", "json", "csv", "junit", "markdown"):
        CHECKS[name](audit, text)


def test_only_visible_characters_reach_a_reader():
    hidden = "".join(map(chr, (0, 7, 27, 0x85, 0x2028, 0x202E, 0xFFFE, 0x10FFFF)))
    audit = audit_of(f"a{hidden}b")
    for report in (terminal, csv_report, junit, markdown):
        assert not set(hidden) & set(rendered(report.render, audit))
