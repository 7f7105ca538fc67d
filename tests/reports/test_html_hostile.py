"""Text from a trace can never run: the page of a hostile audit, read by a parser and by a real browser."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_audits import ATTRIBUTE, INVISIBLE, MATHS, POLICY, SCRIPT, SHOWN_INVISIBLE, STYLE, TEMPLATE, hostile_audit
from lxml import html
from report_audits import audited, rendered, rich_run

from kvaudit.reports.html import render
from kvaudit.reports.words.findings import finding_line

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390


@pytest.fixture(scope="module")
def audit():
    return hostile_audit()


@pytest.fixture(scope="module")
def source(audit):
    return rendered(render, audit)


def holds_only_what_we_wrote(page):
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "section",
        "nav",
        "footer",
        "article",
    }
    allowed |= {"p", "h1", "h2", "h3", "ul", "li", "a", "span", "div", "dl", "dt", "dd", "q", "mark", "small"}
    allowed |= {"figure", "figcaption", "svg", "g", "path", "defs", "use", "text", "clippath", "rect", "image"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    assert {element.tag.lower() for element in page.iter() if isinstance(element.tag, str)} <= allowed
    assert not page.xpath("//@*[starts-with(name(), 'on')]")
    assert len(page.xpath("//title")) == len(page.xpath("//style")) == 1


def test_markup_stays_text(audit, source):
    page = html.document_fromstring(source)
    holds_only_what_we_wrote(page)
    shown = page.text_content()
    for piece in (SCRIPT, ATTRIBUTE, STYLE, TEMPLATE, MATHS):
        assert piece in shown
    assert page.findtext(".//title") == f"kvaudit report: {audit.verdict.outcome}"


def test_what_cannot_be_seen_is_shown(source):
    assert SHOWN_INVISIBLE in html.document_fromstring(source).text_content()
    assert INVISIBLE not in source
    assert not set("\u2028\u2029\u202e\u202c\u200b\ufeff\x00\x1b\x07") & set(source)


def test_hostile_names_stand_in_figures_tables_and_accessible_names(audit, source):
    page = html.document_fromstring(source)
    assert any(label.text_content().startswith(SCRIPT) for label in page.xpath("//svg//text"))
    assert any(SCRIPT in label for label in page.xpath("//svg[@role='img']/@aria-label"))
    assert POLICY in {cell.text_content() for cell in page.iter("th")}
    assert [line.text_content().strip() for line in page.xpath("//*[contains(@class, 'finding')]/p")] == [
        finding_line(finding, audit.figures) for finding in audit.findings
    ]


@pytest.mark.parametrize("shared", ["", "y" * 1_000_000])
def test_an_answer_of_a_megabyte_is_cut(audit, shared):
    worst = audit.examples[0]
    answer = replace(worst.answers[0], text=f"{shared}{'x<' * 500_000}")
    long = replace(worst, reference_text=f"{shared}z", answers=(answer,))
    source = rendered(render, replace(audit, examples=(long,)))
    assert len(source) < 500_000
    assert "... (1,000,000 characters)" in source


def dump(path: Path, *flags: str) -> str:
    profile = path.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *flags]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_runs_nothing_of_it(audit, source, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(source, "utf-8")
    page = html.document_fromstring(dump(path))
    holds_only_what_we_wrote(page)
    assert page.findtext(".//title") == f"kvaudit report: {audit.verdict.outcome}"
    shown = page.text_content()
    for piece in (SCRIPT, ATTRIBUTE, STYLE, TEMPLATE, MATHS, SHOWN_INVISIBLE):
        assert piece in shown


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_the_page_would_not_run_a_script_that_got_into_it(source, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(source.replace("<main>", f"<main>{SCRIPT}<img src=x onerror=\"document.title='owned'\">"), "utf-8")
    assert "owned" not in html.document_fromstring(dump(path)).findtext(".//title")
    path.write_text(path.read_text("utf-8").replace("Content-Security-Policy", "x"), "utf-8")
    assert html.document_fromstring(dump(path)).findtext(".//title") == "owned"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize("made", ["plain", "hostile"])
def test_a_phone_scrolls_no_sideways(made, source, tmp_path):
    page = source if made == "hostile" else rendered(render, audited(rich_run(), min_fidelity=0.5))
    (tmp_path / "page.html").write_text(page, "utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<iframe id=page src=page.html style='width:{PHONE}px;height:800px;border:0'></iframe><script>"
        "onload = () => { document.title = frames[0].document.documentElement.scrollWidth }</script>",
        "utf-8",
    )
    width = html.document_fromstring(dump(frame, "--allow-file-access-from-files")).findtext(".//title")
    assert int(width) <= PHONE
