import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from audit_runs import arm_lines, clean, full_prefill, run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_audits import audited, rendered, rich_run
from same_text_audits import audit_of

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.figures import Figure, select
from kvaudit.analysis.gates import Gates
from kvaudit.reports.escape import visible
from kvaudit.reports.markdown import COMMENT_LIMIT, SUMMARY_LIMIT, markdown, render
from kvaudit.reports.markdown.layout import Block, arranged, cell, code, prose

SECTIONS = (
    "Verdict: ",
    "Gates",
    "Findings",
    "Fidelity: ",
    "Answer variation: ",
    "Policy against policy: ",
    "Power: ",
    "Where the loss comes from: ",
    "Controls: ",
    "Time to first token",
    "What was recomputed",
)
PARSER = MarkdownIt("commonmark").enable("table")
OURS = re.compile(r"<details>\s*<summary>(?:<code>[^<>]*</code>)?[^<>]*</summary>\s*|</details>\s*")
CELL_ENDS = re.compile(r"(?<!\\)\|")
MANY = 2_000
NASTY = "x|y`z``<script>alert(1)</script> @someone #12 https://example.org [a](b) ![c](d) **e** \\| </details>"


def tokens(text: str) -> list:
    """Every token with its children in place."""
    return [inner for token in PARSER.parse(text) for inner in (token, *(token.children or ()))]


def shown(token) -> str:
    return "".join(child.content for child in token.children or ())


def headings(text: str) -> list[str]:
    parsed = PARSER.parse(text)
    return [shown(after) for token, after in pairwise(parsed) if token.type == "heading_open"]


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, the header first."""
    found: list[list[list[str]]] = []
    parsed = PARSER.parse(text)
    for token, after in pairwise(parsed):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("td_open", "th_open"):
            found[-1][-1].append(shown(after))
    return found


def table_of(text: str, title: str) -> list[list[str]]:
    (table,) = tables(text[text.index(f"### {title}") :].partition("\n### ")[0].partition("<details>")[0])
    return table


def items(text: str, summary: str) -> list[str]:
    """The items of a folded list."""
    (part,) = [part for part in text.split("<details>\n")[1:] if summary in part.partition("</summary>")[0]]
    parsed = PARSER.parse(part.partition("</summary>")[2].partition("\n</details>\n")[0])
    return [shown(token) for token in parsed if token.type == "inline" and token.level == 3]


def check_whole(text: str) -> None:
    """Nothing is cut in the middle, and no tag or link of anybody else's is there."""
    assert text.endswith("\n")
    for table in re.findall(r"^\|.*(?:\n\|.*)+", text, re.MULTILINE):
        # Parsers fill short rows and drop what is too long: only the lines themselves tell.
        assert len({len(CELL_ENDS.findall(line)) for line in table.splitlines()}) == 1
        assert all(line.endswith(" |") for line in table.splitlines())
    html = [token for token in tokens(text) if token.type.startswith("html")]
    assert all(token.type == "html_block" and OURS.fullmatch(token.content) for token in html)
    assert text.count("<details>\n") == text.count("</details>\n")
    assert not {token.type for token in tokens(text)} & {"link_open", "image", "fence", "code_block", "hr"}
    plain = [token.content for token in tokens(text) if token.type == "text"]
    assert not [words for words in plain if re.search(r"@|#|://|www\.|[a-z]\.[a-z]", words)]


@cache
def rich():
    return audited(rich_run(), min_fidelity=0.5)


@cache
def many():
    """Two policies under which every request changes with the order."""
    full = " ".join(f"a{index}" for index in range(MANY))
    other = " ".join(f"b{index}" for index in range(MANY))
    policies = [arm_lines(name, {"chronological": full, "reversed": other}, full, full) for name in ("p", "q")]
    return audited(run(full_prefill(full) + "\n".join(policies)), max_variation=0.1)


def test_sections_come_in_order_verdict_first():
    text = rendered(render, rich())
    check_whole(text)
    found = headings(text)
    assert found[0] == "Verdict: fail (a gate is broken; exit code 1)"
    assert len(found) == len(SECTIONS)
    assert all(heading.startswith(title) for heading, title in zip(found, SECTIONS, strict=True))


def test_gates_and_findings_are_told():
    text = rendered(render, rich())
    gates = table_of(text, "Gates")[1:]
    assert [row[0] for row in gates] == [gate.outcome for gate in rich().verdict.gates]
    assert gates[0][1].startswith("token-topk, fidelity at least 50 %; observed 43.8 %")
    assert "- document-aligned: history-sensitive. 8 of 16 requests changed with the order" in text
    assert "  - The repeat control reproduced every answer" in text


def test_one_reason_is_said_once():
    text = rendered(render, audited(run(clean("p").replace("repeat : a b c d", "repeat : a b c x", 1))))
    assert text.count("Full prefill disagreed with itself on 1 of 4 requests") == 1


def test_the_figures_are_those_of_the_audit():
    text = rendered(render, rich())
    wanted = [figure for figure in select(rich().figures, "fidelity") if figure.control != "repeat"]
    table = table_of(text, "Fidelity")[1:]
    assert [row[2] for row in table] == [f"{100 * figure.value:.1f} %" for figure in wanted]
    assert [row[0] for row in table] == [figure.policy for figure in wanted]
    assert table[5][1] == "(reset)"
    differences = table_of(text, "Policy against policy")[1:]
    assert differences[1] == [
        "token-topk - document-aligned",
        "reversed",
        "-50.0",
        *differences[1][3:4],
        "0:8",
        *differences[1][5:],
    ]
    assert [row[:2] for row in table_of(text, "Controls")[1:]] == [
        ["noise floor", "full-prefill"],
        ["repeat", "token-topk, chronological"],
        ["repeat", "document-aligned, chronological"],
    ]
    assert table_of(text, "Time to first token")[2] == ["token-topk", "10.0", "10.0", "5.00x", "75"]
    assert table_of(text, "What was recomputed")[1][4:6] == ["144", "144"]
    assert table_of(text, "Where the loss comes from")[2][2:4] == ["0.0", "+56.2"]


@pytest.mark.parametrize("kappa", [True, False])
def test_fleiss_kappa_stands_where_it_is_known(kappa):
    figures = [figure for figure in rich().figures if figure.metric != "fleiss_kappa"]
    known = [Figure("fleiss_kappa", "token-topk", control="none", value=0.125)] * kappa
    header, first, *_ = table_of(markdown(replace(rich(), figures=(*figures, *known))), "Answer variation")
    assert (header[-1] == "Fleiss' kappa") == kappa
    assert (first[-1] == "0.12") == kappa


def test_every_changing_request_is_listed_worst_first():
    text = rendered(render, rich())
    found = items(text, "token-topk")
    assert len(found) == rich().findings[0].flipped
    assert found[0] == "r0: 6 of 10 order pairs differ"
    shares = [int(item.split()[1]) for item in found]
    assert shares == sorted(shares, reverse=True)
    assert "<code>token-topk</code>: 14 of 16 requests changed with the order" in text


def test_worst_requests_show_answers_settings_their_values():
    text = rendered(render, rich())
    worst = items(text, "Worst requests")
    assert worst[0].startswith("token-topk, request r11: 6 of 10 order pairs differ")
    part = text[text.index("Worst requests") :]
    assert "  - full prefill, `chronological`, `shuffle-1`: `131.211,711`\n" in part
    assert (
        "  - `reversed`, `shuffle-2`, `shuffle-3`: `1311.99,711`. Edit distance 4, first difference at token 2" in part
    )
    listed = items(text, "Settings in force")
    assert "settings.switches.mask: bottom-right" in listed
    assert "settings.switches.capacity_bytes: unset" in listed
    assert "settings.policies: token-topk, document-aligned" in listed


@pytest.mark.parametrize("limit", [600, 1_500, 4_000, 10_000, COMMENT_LIMIT, SUMMARY_LIMIT])
def test_the_limit_is_kept_totals_stay_exact_and_nothing_is_cut_in_the_middle(limit):
    text = markdown(many(), limit)
    assert len(text.encode()) <= limit
    check_whole(text)
    assert text.startswith("## Verdict: fail")
    stated = re.findall(r"^([\d,]+) requests change; (?:the first ([\d,]+) are|none is) listed\.$", text, re.MULTILINE)
    assert all(total == "2,000" for total, _ in stated)
    lists = [items(text, name) for name in ("<code>p</code>", "<code>q</code>") if f"<summary>{name}" in text]
    if limit >= 10_000:
        assert len(lists) == 2
    if limit == SUMMARY_LIMIT:
        assert [len(found) for found in lists] == [MANY, MANY]
        assert not stated
    else:
        assert [len(found) for found in lists] == [int(count.replace(",", "") or 0) for _, count in stated]


def test_a_comment_uses_the_room_that_it_has():
    assert len(markdown(many(), COMMENT_LIMIT).encode()) > 0.98 * COMMENT_LIMIT


@pytest.mark.parametrize("limit", [-3, 0, 10, 33, 40, 200])
def test_without_room_there_is_little_or_nothing_and_never_more(limit):
    text = markdown(many(), limit)
    assert len(text.encode()) <= max(0, limit)
    assert not text or text.endswith("\n")
    if limit >= 40:
        assert "further parts did not fit." in text


def test_long_tables_are_cut_at_rows_and_say_so():
    figures = [Figure("fidelity", f"p{index}", "reversed", "none", 0.5, 0.4, 0.6, 9) for index in range(3_000)]
    text = markdown(replace(rich(), figures=(*rich().figures, *figures)))
    assert len(text.encode()) <= COMMENT_LIMIT
    check_whole(text)
    count = int(re.search(r"^3,012 rows; the first ([\d,]+) are listed\.$", text, re.MULTILINE)[1].replace(",", ""))
    assert len(table_of(text, "Fidelity")) == count + 1
    assert "Settings in force" in text


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.booleans()), max_size=12), st.integers(120, 3_000))
def test_blocks_never_exceed_their_limit(shapes, limit):
    blocks = [
        Block(f"head {n}", ("é" * width,) * rows, rows, "rows", "tail") for n, (rows, width, _) in enumerate(shapes)
    ]
    first = [block for block, (*_, essential) in zip(blocks, shapes, strict=True) if essential]
    text = arranged(first, [block for block in blocks if block not in first], limit)
    assert len(text.encode()) <= limit
    assert text.count("head") == text.count("tail")
    if text.count("head") < len(blocks):
        assert f"{len(blocks) - text.count('head')} further parts did not fit." in text


@settings(deadline=None)
@given(st.text(min_size=1))
@example(" both ends ")
@example("`tick")
@example("tick`")
@example("``")
@example("  ")
def test_foreign_text_arrives_as_a_code_span(text):
    (paragraph,) = [token for token in PARSER.parse(f"a {code(text, length=10**6)} b") if token.type == "inline"]
    assert [child.type for child in paragraph.children] == ["text", "code_inline", "text"]
    assert paragraph.children[1].content == visible(text)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from("|\\`\n ")))
def test_foreign_text_stays_in_its_cell(text):
    (table,) = tables(f"| a | b |\n| --- | --- |\n| {cell(text)} | 1 |\n")
    assert table[1][1] == "1"
    if len(visible(text)) <= 120:
        assert table[1][0].replace("\\x7c", "|").strip() == visible(text).replace("\\x7c", "|").strip()


HAZARDS = [
    "@a",
    "#1",
    "GH-1",
    "www.example.org",
    "http://a.b",
    "<b>",
    "**a**",
    "[a](b)",
    ":tada:",
    "- x",
    "1. x",
    "a@b.c",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*HAZARDS, "=", "-", "word", "12", "|", "`", "5", "&amp;", "a_b_c"]) | st.text()))
@example(["- x"])
@example(["= x"])
@example(["1. x"])
@example(["x", "="])
def test_prose_is_one_paragraph_of_text_and_code(words):
    sentence = " ".join(words)
    text = prose(sentence)
    inner = tokens(text)
    assert {token.type for token in inner} <= {"paragraph_open", "inline", "text", "code_inline", "paragraph_close"}
    plain = " ".join(token.content for token in inner if token.type == "text")
    assert not re.search(r"[@#*_\[\]<>`|&]\w|://|www\.|GH-\d|:\w+:", plain)


def test_plain_words_stay_plain():
    sentence = "token-topk: none seen. No answer differed on 1,000 requests (95 % interval 0.0 to 3.1 %), p <0.0001."
    assert prose(sentence) == sentence.replace("<", "&lt;")


def test_foreign_text_neither_breaks_tables_nor_runs_nor_calls_anybody():
    text = rendered(render, audit_of(NASTY))
    check_whole(text)
    assert {len(table[0]) for table in tables(text)} >= {2, 8}
    assert NASTY.replace("\\|", "\\\\x7c") + "p" in {row[0] for row in table_of(text, "Fidelity")[1:]}
    (gate,) = table_of(text, "Gates")[1:]
    assert gate[1].startswith(f"{NASTY}p, fidelity at least 90 %".replace("\\|", "\\\\x7c"))
    assert items(text, "1 of 2 requests changed") == [f"{NASTY}r0: 1 of 1 order pair differ"]
    assert f"model {NASTY}" in shown(next(token for token in PARSER.parse(text)[4:] if token.type == "inline"))
    assert f"settings.policies: {NASTY}, {NASTY}"[:100] in {item[:100] for item in items(text, "Settings in force")}


def test_the_summary_of_a_folded_list_is_text():
    class Reader(HTMLParser):
        tags: list[str] = []  # noqa: RUF012
        words = ""

        def handle_starttag(self, tag, attrs):
            self.tags = [*self.tags, tag]

        def handle_data(self, data):
            self.words += data

    text = rendered(render, audit_of(NASTY))
    reader = Reader()
    reader.feed(text[text.index("<summary>") : text.index("</summary>")])
    assert reader.tags == ["summary", "code"]
    assert reader.words.startswith(NASTY)


def with_baseline(now: str, before: str):
    then = run(before, settings={"model": "tiny", "switches": {"mask": "exact", "gap": NASTY}})
    built = run(now, settings={"model": "tiny", "switches": {"mask": "bottom-right"}})
    return analyse(built, Gates(), built.provenance, baseline=then)


def test_a_baseline_is_told_with_settings_figures_and_flips():
    full = " ".join(f"a{index}" for index in range(12))
    now = full_prefill(full) + arm_lines(
        "p", {"chronological": full, "reversed": full.replace("a1 ", "x ")}, full, full
    )
    old = full_prefill(full) + arm_lines(
        "p", {"chronological": full, "reversed": full.replace("a2 ", "x ")}, full, full
    )
    audit = with_baseline(now, old)
    text = rendered(render, audit)
    check_whole(text)
    table = tables(text)[-1]
    assert table[0][:5] == ["Figure", "Policy", "Order", "Before", "Now"]
    assert len(table) == 1 + len(audit.baseline.changes) > 1
    assert {row[0] for row in table[1:]} == {"fidelity", "answer variation"}
    assert items(text, "1 request newly changing") == ["r1"]
    assert items(text, "1 request no longer changing") == ["r2"]
    listed = items(text, "settings changed since the baseline")
    assert "settings.switches.mask: exact before, bottom-right now" in listed
    assert f"settings.switches.gap: {NASTY} before, unset now" in listed


def test_without_a_baseline_nothing_is_said_of_one():
    assert "baseline" not in rendered(render, rich())


def test_an_audit_of_nothing_still_reads():
    text = rendered(render, audited(run(full_prefill("a b"))))
    check_whole(text)
    assert "No policy was audited." in text
    assert headings(text)[:2] == ["Verdict: inconclusive (the audit cannot say; exit code 4)", "Findings"]
