import io
import re
from dataclasses import replace

import pytest
from audit_runs import arm_lines, clean, full_prefill, run
from report_audits import audited, rendered, rich_run
from rich.cells import cell_len

from kvaudit.reports.terminal import render

SECTIONS = (
    "Verdict: ",
    "Findings",
    "What was audited",
    "Fidelity: ",
    "Answer variation: ",
    "Policy against policy: ",
    "Power: ",
    "Order against order: ",
    "Where the loss comes from: ",
    "Controls: ",
    "Time to first token",
    "What was recomputed",
    "Divergence from full prefill",
    "Worst requests",
)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture(scope="module")
def text() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return rendered(render, audited(rich_run(), min_fidelity=0.5))


def test_sections_come_in_order_verdict_first(text):
    places = [re.search(rf"^{re.escape(title)}", text, re.MULTILINE).start() for title in SECTIONS]
    assert places[0] == 0
    assert places == sorted(places)


def test_eighty_columns_are_enough(text):
    assert max(cell_len(line) for line in text.splitlines()) <= 80


def test_piped_text_has_no_escape_and_no_trailing_space(text):
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.endswith("\n")


def test_the_figures_are_those_of_the_audit(text):
    audit = audited(rich_run(), min_fidelity=0.5)
    fidelity = [figure for figure in audit.figures if figure.metric == "fidelity" and figure.control != "repeat"]
    table = text[text.index("Fidelity: ") : text.index("Answer variation: ")]
    assert re.findall(r"^  \S+ +([\d.]+ %) ", table, re.MULTILINE) == [f"{100 * f.value:.1f} %" for f in fidelity]
    variation = next(figure for figure in audit.figures if figure.metric == "answer_variation")
    assert f"{100 * variation.value:.1f} %" in text
    assert "Full prefill itself is right on 100.0 % of 16 requests" in text


def test_settings_tell_every_switch_and_the_trace(text):
    words = " ".join(text.split())
    assert "switches: mask bottom-right, gap zero, lookup stop-at-miss, capacity bytes unset" in words
    assert "model smollm2-135m" in text
    assert "source trace.jsonl" in text
    assert "arms: 16 of 16 finished" in text


def test_what_two_lines_would_say_is_said_once_and_digests_are_cut():
    built = run(clean("p"), settings={"model": "tiny", "dtype": "float32"})
    digest = "ab" * 32
    engine = {"model": "tiny", "dtype": "float32", "tokenizer_sha256": digest, "tokenizer_digest": digest, "torch": "2"}
    built = replace(built, manifest={**built.manifest, "engine": engine, "libraries": {"torch": "2", "numpy": "1"}})
    shown = rendered(render, audited(built))
    assert f"engine: tokenizer sha256 {digest[:12]}...\n" in shown
    assert "libraries: torch 2, numpy 1\n" in shown
    assert digest not in shown


def test_intervals_and_shares_say_how_they_were_made(text):
    words = " ".join(text.split())
    assert "Intervals: Wilson, requests counted in blocks of 4, since their windows overlap." in words
    assert re.search(r"50\.0 % \(50\.0-50\.0\)", text)
    assert "share of the token deviation" in words
    assert "own: own error of the policy and the engine's switches" in words
    assert "serves: requests times orders" in words


def test_kappa_stands_beside_answer_variation(text):
    kappas = [f.value for f in audited(rich_run()).figures if f.metric == "fleiss_kappa"]
    table = text[text.index("Answer variation: ") : text.index("Policy against policy: ")]
    rows = re.findall(r"^\S+ +[\d.]+ % +[\d.]+ to [\d.]+ +([\d.]+) +[\d.]+ % +[\d.]+ %$", table, re.MULTILINE)
    assert rows == [f"{kappa:.2f}" for kappa in kappas]


def power_rows(shown: str) -> list[list[str]]:
    table = shown[shown.index("Power: ") : shown.index("points: the smallest")]
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines() if re.search(r"\d$", line)][1:]


def test_power_says_what_was_visible_in_the_worst_order_and_how_many_requests_would_be_needed():
    full, half = "a " * 40, "a " * 20 + "x " * 20
    built = run(
        full_prefill(full)
        + arm_lines("p", {"chronological": full, "reversed": full}, full, full)
        + "\n"
        + arm_lines("q", {"chronological": full, "reversed": half}, "x " * 40, full)
    )
    audit = audited(built)
    worst = max(f.value for f in audit.figures if f.metric == "smallest_difference" and f.control == "none")
    needed = [f.value for f in audit.figures if f.metric.startswith("requests_for_")]
    (row,) = power_rows(rendered(render, audit))
    assert row == ["p - q", f"{100 * worst:.1f}", *(f"{value:,.0f}" for value in needed)]
    assert len(needed) == 4


def test_an_audit_too_small_to_see_anything_says_so(text):
    (row,) = power_rows(text)
    assert row[:2] == ["token-topk - document-aligned", "none"]
    assert "none: not even 100 points" in " ".join(text.split())


def test_one_policy_has_no_power_section():
    assert "Power: " not in rendered(render, audited(run(clean("p"))))


def test_some_empty_answers_are_told():
    shown = rendered(render, audited(run(clean("p", "_ b c d"))))
    assert "Full prefill itself gave an empty answer to 1 of 4 requests." in shown
    assert "empty answer" not in rendered(render, audited(run(clean("p"))))


def test_worst_requests_show_both_answers_side_by_side_and_their_origin(text):
    worst = text[text.index("Worst requests") :]
    assert re.search(r"^  131\.2\d+,7\d+ +13\d+\.99,7\d+$", worst, re.MULTILINE)
    assert "2 of 3 reused segments" in worst
    assert re.search(r"segment 1\s+by r\d+'s prelude", worst)


def test_a_terminal_gets_colour_and_the_same_words(text):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        out = Terminal()
        render(audited(rich_run(), min_fidelity=0.5), out)
    assert "\x1b[" in out.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) == text


HOSTILE = "\x1b[31mred\x1b[0m\x07\u2028next\u202ereversed\u0000 [bold]markup[/bold] :smile:"


def test_hostile_text_is_harmless_wherever_it_comes_from():
    built = run(
        full_prefill("a b") + arm_lines("p", {"chronological": "a b", "reversed": "t b"}, "a b", "a b"),
        texts={"t": HOSTILE},
    )
    planned = tuple(
        replace(found, policy=HOSTILE, order=HOSTILE if found.order == "reversed" else found.order)
        if found.policy == "p"
        else found
        for found in built.planned
    )
    built = replace(built, planned=planned, manifest={"trace": {"source": HOSTILE}, "settings": {HOSTILE: HOSTILE}})
    shown = rendered(render, audited(built))
    assert not set(shown) & set("\x1b\x07\x00\u2028\u202e")
    assert "[bold]markup[/bold]" in shown
    assert ":smile:" in shown
    assert r"\x1b[31mred" in shown


def test_a_huge_answer_is_cut_around_the_difference():
    built = run(
        full_prefill("t b") + arm_lines("p", {"chronological": "t b", "reversed": "u b"}, "t b", "t b"),
        texts={"t": "a" * 1_000_000, "u": "a" * 600_000 + "Z" + "a" * 399_999},
    )
    shown = rendered(render, audited(built))
    assert "Z" in shown
    assert "(1,000,000 characters)" in " ".join(shown.split())
    assert len(shown) < 20_000


def test_empty_answers_are_named():
    built = run(full_prefill("_ b") + arm_lines("p", {"chronological": "_ b", "reversed": "x b"}, "_ b", "_ b"))
    assert "(empty)" in rendered(render, audited(built))


@pytest.mark.parametrize(
    "built",
    [
        run(full_prefill("a b")),
        run(clean("p", "a")),
        run(clean("p", "! ! !")),
        run(clean("p")).unfinished(*(found.arm_id for found in run(clean("p")).arms())),
        replace(run(clean("p")), manifest={}),
    ],
)
def test_thin_audits_are_reported_as_far_as_they_go(built):
    shown = rendered(render, audited(built))
    assert shown.startswith("Verdict: ")
    assert "None" not in shown
    assert "nan" not in shown


def test_more_policies_than_two_have_cochran_s_q():
    full = "a b c d"
    lines = [arm_lines(name, {"chronological": full, "reversed": full}, full, full) for name in ("p", "q")]
    lines.append(arm_lines("r", {"chronological": "x x x x", "reversed": full}, full, "x x x x"))
    shown = rendered(render, audited(run(full_prefill(full) + "\n".join(lines))))
    assert "all policies, chronological: Cochran's Q 8.00" in shown
    assert "all policies, reversed: every request is answered alike" in " ".join(shown.split())


def test_an_ascii_stream_is_enough():
    built = run(
        full_prefill("t b") + arm_lines("p", {"chronological": "t b", "reversed": "u b"}, "t b", "t b"),
        texts={"t": "é漢", "u": "plain"},
    )
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    render(audited(built), out)
    out.flush()
    shown = raw.getvalue().decode("ascii")
    assert r"\xe9\u6f22" in shown
    assert r"\u2500" not in shown


@pytest.mark.parametrize("columns", ["0", "1", "100000000"])
def test_a_width_that_nobody_has_loses_no_verdict(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert rendered(render, audited(rich_run())).startswith("Verdict")
