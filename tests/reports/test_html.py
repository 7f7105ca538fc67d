"""The HTML report, read back with a real parser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from audit_runs import arm_lines, clean, full_prefill, run
from lxml import html
from report_audits import audited, rendered, rich_run

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.figures import Figure, select
from kvaudit.analysis.gates import Gates
from kvaudit.reports.html import render
from kvaudit.reports.words.baseline import baseline_lines
from kvaudit.reports.words.examples import answer_facts, context_sentence
from kvaudit.reports.words.figures import condition, equality_sentences
from kvaudit.reports.words.findings import finding_details, finding_line, reason_sentence
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.numbers import interval, number, p_value, percent, points, small
from kvaudit.reports.words.verdict import gates_source, verdict_line

SECTIONS = [
    "findings",
    "baseline",
    "settings",
    "answers",
    "differences",
    "between-orders",
    "history",
    "where",
    "kind",
    "requests",
    "ttft",
    "selection",
    "divergence",
    "controls",
]
FIGURES = [
    "variation",
    "orders",
    "policies",
    "history-loss",
    "flips-0",
    "flips-1",
    "first-difference",
    "margins",
    "fragmentation",
    "reuse",
]
LIMITS = {"min_fidelity": 0.5, "max_variation": 0.05, "source": "kvaudit.toml"}


@pytest.fixture(scope="module")
def audit():
    def worse(row):
        early = row["policy"] == "token-topk" and row["position"] < 9
        return {**row, "answer_text": "worse", "answer_ids": [1]} if early else row

    built = rich_run()
    return analyse(built, Gates(**LIMITS), built.provenance, rich_run().with_rows(worse))


@pytest.fixture(scope="module")
def source(audit):
    return rendered(render, audit)


@pytest.fixture(scope="module")
def page(source):
    return html.document_fromstring(source)


def text(element):
    return " ".join(element.text_content().split())


def sections(page):
    return [element.get("id") for element in page.iter("section")]


def rows(page, title):
    """The cells of the table with this title."""
    (found,) = [group for group in page.find_class("scroll") if group.get("aria-label") == title]
    return [[text(cell) for cell in row] for row in found.xpath(".//tbody/tr")]


def test_a_rich_audit_fills_every_section(page):
    assert sections(page) == SECTIONS
    assert [figure.get("id") for figure in page.iter("figure")] == [f"figure-{name}" for name in FIGURES]
    assert all(len(text(section)) > 40 for section in page.iter("section"))


def test_the_list_of_sections_leads_to_each(page):
    assert [link.get("href") for link in page.xpath("//nav//a")] == [f"#{name}" for name in SECTIONS[1:]]


def test_sections_with_nothing_to_show_vanish():
    page = html.document_fromstring(rendered(render, audited(run("full-prefill chronological : a b c"))))
    assert sections(page) == ["findings", "settings", "ttft"]
    assert not page.xpath("//figure")
    assert "No policy was audited." in text(page)
    bare = html.document_fromstring(rendered(render, audited(run(clean()).with_rows(lambda row: None))))
    assert sections(bare) == ["findings", "settings"]


def test_a_clean_audit_shows_no_damage():
    page = html.document_fromstring(rendered(render, audited(run(clean()))))
    assert not {"baseline", "kind", "requests", "differences"} & set(sections(page))
    assert "none seen" in text(page)


def test_an_engine_that_measures_nothing_but_answers_has_no_figures_of_the_rest():
    lines = arm_lines("p", {"chronological": "a b c", "reversed": "a x c"}, "a b c", "a b c")
    measured = ("margin", "first_difference", "reused_tokens", "fragmentation", "kl", "reference_logprob", "ttft_ms")
    built = run(full_prefill("a b c") + lines, columns=lambda *_: dict.fromkeys(measured))
    page = html.document_fromstring(rendered(render, audited(built)))
    drawn = [figure.get("id") for figure in page.iter("figure")]
    assert drawn == ["figure-variation", "figure-orders", "figure-history-loss", "figure-flips-0"]
    assert not {"kind", "ttft", "divergence"} & set(sections(page))


@pytest.mark.parametrize("metrics", [("ttft_",), ("fidelity", "answer_variation"), ("fragmentation", "kl", "reuse")])
def test_any_metric_may_be_absent(audit, metrics):
    figures = tuple(figure for figure in audit.figures if not figure.metric.startswith(metrics))
    without = replace(audit, figures=figures, findings=())
    assert "Verdict" in text(html.document_fromstring(rendered(render, without)))


def test_the_verdict_is_everybodys(audit, page):
    assert text(page.find(".//h1")) == verdict_line(audit.verdict)
    assert page.findtext(".//title") == f"kvaudit report: {audit.verdict.outcome}"
    gates = page.find_class("gates")[0]
    assert [text(item) for item in gates] == [gate_sentence(gate) for gate in audit.verdict.gates]
    assert gates_source(audit)[0] in text(page.find(".//header"))
    assert [item.get("class") for item in gates] == [gate.outcome for gate in audit.verdict.gates]


def test_findings_come_with_their_details(audit, page):
    shown = page.find_class("finding")
    assert [text(item.find("p")) for item in shown] == [finding_line(f, audit.figures) for f in audit.findings]
    assert [[text(line) for line in item.iter("li")] for item in shown] == [
        finding_details(finding) for finding in audit.findings
    ]


def test_an_inconclusive_audit_gives_its_reasons():
    audit = audited(run("full-prefill chronological : a b c\ntoken-topk chronological : - - !"))
    shown = text(html.document_fromstring(rendered(render, audit)))
    assert "Verdict: inconclusive" in shown
    for reason in audit.findings[0].reasons:
        assert reason_sentence(reason) in shown


def test_a_single_reason_is_given_once():
    audit = audited(run(clean().replace("topk chronological repeat : a b c d", "topk chronological repeat : a b c z")))
    assert len(audit.findings[0].reasons) == 1
    shown = text(html.document_fromstring(rendered(render, audit)))
    assert shown.count(reason_sentence(audit.findings[0].reasons[0])) == 1


def test_fidelity_is_the_audits(audit, page):
    expected = [
        [
            figure.policy,
            condition(figure),
            percent(figure.value),
            interval(figure),
            f"{figure.n:,}",
            small(select(audit.figures, "kl_mean", figure.policy, figure.order, figure.control)[0].value),
        ]
        for figure in select(audit.figures, "fidelity")
        if figure.control != "repeat"
    ]
    assert len(expected) == 12
    assert [row[:6] for row in rows(page, "Fidelity to full prefill")] == expected


def test_variation_is_the_audits_with_kappa_beside_it(audit, page):
    shown = rows(page, "Answer variation")
    assert [row[:4] for row in shown] == [
        [
            figure.policy,
            percent(figure.value),
            interval(figure),
            percent(select(audit.figures, "flipped_requests", figure.policy)[0].value),
        ]
        for figure in select(audit.figures, "answer_variation")
    ]
    kappa = select(audit.figures, "fleiss_kappa")
    assert [row[-1] for row in shown] == [number(figure.value) for figure in kappa]
    without = replace(audit, figures=tuple(f for f in audit.figures if f.metric != "fleiss_kappa"))
    assert len(rows(html.document_fromstring(rendered(render, without)), "Answer variation")[0]) == len(shown[0]) - 1


@pytest.mark.parametrize(
    ("title", "metric"),
    [("Differences of fidelity", "fidelity_difference"), ("Fidelity lost to history", "history_loss")],
)
def test_differences_are_the_audits(audit, page, title, metric):
    figures = [figure for figure in select(audit.figures, metric) if figure.value is not None]
    assert len(figures) > 4
    assert [row[-5:] for row in rows(page, title)] == [
        [
            points(figure.value),
            interval(figure),
            " : ".join(map(str, figure.discordant)),
            p_value(figure.p_value),
            p_value(figure.p_adjusted),
        ]
        for figure in figures
    ]


def test_own_error_stands_beside_history(audit, page):
    resets = {figure.policy: figure.value for figure in select(audit.figures, "fidelity", control="reset")}
    shown = rows(page, "Fidelity lost to history")
    assert [row[2] for row in shown] == [f"{100 * (1 - resets[row[0]]):.1f}" for row in shown]


def test_times_are_the_audits(audit, page):
    expected = [
        [
            median.policy,
            f"{median.value:.1f} ms",
            f"{select(audit.figures, 'ttft_p95', median.policy)[0].value:.1f} ms",
            f"{select(audit.figures, 'ttft_speedup', median.policy)[0].value:.2f}x",
            f"{median.n:,}",
        ]
        for median in select(audit.figures, "ttft_median")
    ]
    assert rows(page, "Time to first token (TTFT)") == expected


def test_selections_are_the_audits(audit, page):
    shown = rows(page, "Fragmentation and captured deviation")
    runs, captured = select(audit.figures, "fragmentation"), select(audit.figures, "captured_deviation")
    assert len(shown) == len(runs) == 12
    for row, figure, share in zip(shown, runs, captured, strict=True):
        assert row[:3] == [figure.policy, condition(figure), f"{figure.value:.1f}"]
        assert row[3] == f"{figure.low:.0f} to {figure.high:.0f}"
        assert row[4] == percent(share.value)
    assert equality_sentences(audit.figures)[0] in text(page)


def test_controls_are_the_audits(audit, page):
    repeats = [(f"{figure.policy}, chronological", figure) for figure in select(audit.figures, "repeat_disagreement")]
    figures = [("full-prefill", *select(audit.figures, "noise_floor")), *repeats]
    assert [row[1:] for row in rows(page, "Answers that a second run did not reproduce")] == [
        [what, percent(figure.value), interval(figure), f"{figure.n:,}"] for what, figure in figures
    ]


def test_power_is_shown_where_it_is_weakest(audit):
    def seen(pair, order, value):
        return Figure("smallest_difference", pair, order, "none", value=value)

    smallest = [
        *(seen("a - b", *found) for found in (("chronological", 0.02), ("reversed", 0.125), ("shuffle-1", 0.1))),
        *(seen("c - d", *found) for found in (("chronological", 0.02), ("reversed", None))),
    ]
    needed = [
        Figure("requests_for_1_point", "a - b", "reversed", "none", 1000.0),
        Figure("requests_for_5_points", "a - b", "reversed", "none", 5.0),
        Figure("requests_for_2_points", "c - d", "chronological", "none", None),
    ]
    others = [f for f in audit.figures if not f.metric.startswith(("smallest_difference", "requests_for"))]
    page = html.document_fromstring(rendered(render, replace(audit, figures=(*others, *smallest, *needed))))
    assert rows(page, "Power: what this audit could have seen") == [
        ["a - b", "reversed", "12.5", "1,000", "-", "-", "5"],
        ["c - d", "reversed", "none", "-", "-", "-", "-"],
    ]


def test_the_baseline_section_says_what_changed(audit, page):
    (section,) = [element for element in page.iter("section") if element.get("id") == "baseline"]
    changes = rows(page, "Figures that can be paired")
    assert any(change.before < change.now for change in audit.baseline.changes)
    assert [row[3:6] for row in changes] == [
        [percent(change.before), percent(change.now), points(change.figure.value)] for change in audit.baseline.changes
    ]
    for line in baseline_lines(audit, audit.baseline):
        assert line in text(section)
    flips = replace(audit.baseline, flips=(replace(audit.baseline.flips[0], newly=("r4", "r7"), no_longer=("r9",)),))
    shown = html.document_fromstring(rendered(render, replace(audit, baseline=flips)))
    assert rows(shown, "Requests that change with the order")[0][1:] == ["r4, r7", "r9", "2", "1"]


def test_settings_that_changed_stand_in_the_baseline_section():
    changed = rich_run()
    switches = {**changed.manifest["settings"]["switches"], "mask": "exact"}
    before = replace(
        changed, manifest={**changed.manifest, "settings": {**changed.manifest["settings"], "switches": switches}}
    )
    page = html.document_fromstring(rendered(render, analyse(changed, None, changed.provenance, before)))
    assert rows(page, "Settings that changed") == [["settings.switches.mask", "exact", "bottom-right"]]


def test_every_setting_is_shown(audit, page):
    assert ["recompute ratio", "0.15"] in rows(page, "Settings")
    assert ["policies", "token-topk, document-aligned"] in rows(page, "Settings")
    assert ["capacity bytes", "unset"] in rows(page, "Engine switches")
    assert ["digest", f"{audit.manifest['trace']['digest'][:12]}..."] in rows(page, "Trace")


def test_the_worst_requests_come_with_answers_and_origins(audit, page):
    exhibits = page.find_class("exhibit")
    assert len(exhibits) == len(audit.examples)
    worst, shown = audit.examples[0], text(exhibits[0])
    assert worst.request_id in shown
    assert worst.reference_text in shown
    assert worst.answers[0].text in shown.replace(" ", "")
    assert answer_facts(worst.answers[0]) in shown
    assert context_sentence(worst) in shown
    origins = exhibits[0].xpath(".//tbody/tr")
    assert len(origins) == len(worst.origins)
    assert worst.origins[0].writer in text(origins[0])


def test_what_an_answer_shares_with_full_prefill_is_not_marked(page):
    marked = page.find_class("exhibit")[0].xpath(".//q")
    assert not marked[0].xpath(".//mark")
    assert text(marked[1]).endswith(text(marked[1].find("mark")))


def test_figures_have_accessible_names_with_numbers(audit, page):
    for figure in page.iter("figure"):
        (drawing,) = figure.xpath("./svg")
        assert drawing.get("role") == "img"
        assert re.search(r"\d", drawing.get("aria-label"))
        assert len(text(figure.find("figcaption"))) > 40
        assert text(figure.find("h3"))
    variation = page.xpath("//figure[@id='figure-variation']/svg/@aria-label")[0]
    for found in select(audit.figures, "answer_variation"):
        assert f"{found.policy} {percent(found.value)} ({interval(found)})" in variation


def test_names_are_unique_and_every_reference_finds_its_own(page):
    ids = page.xpath("//@id")
    assert len(ids) == len(set(ids))
    references = [name[1:] for name in page.xpath("//@href | //@*[local-name()='xlink:href']") if name[0] == "#"]
    clips = re.findall(r"url\(#([^)]*)\)", " ".join(page.xpath("//@clip-path")))
    assert references
    assert clips
    assert set(references) | set(clips) <= set(ids)


def test_nothing_is_loaded_and_nothing_can_run(page):
    policy = page.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")[0]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert not page.xpath("//script | //link | //iframe | //object | //embed | //base | //form | //a[not(@href)]")
    for element in page.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert "http:" not in value
            assert "https:" not in value
            assert "javascript:" not in value
            if name.endswith(("href", "src")):
                assert value.startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"@import|url\(", page.findtext(".//style"))


def test_the_page_is_whole_text(source):
    assert source.startswith("<!DOCTYPE html>\n")
    assert source.endswith("</html>\n")


def test_the_same_audit_gives_the_same_bytes(audit, source):
    assert rendered(render, audit) == source


def test_a_long_table_is_folded_and_cut_with_the_number_of_rows_left_out(audit):
    many = [Figure("noise_floor", f"policy-{index}", "chronological", "repeat", 0.5, n=2) for index in range(1102)]
    page = html.document_fromstring(rendered(render, replace(audit, figures=(*audit.figures, *many))))
    assert len(rows(page, "Answers that a second run did not reproduce")) == 100
    section = page.get_element_by_id("controls")
    assert "1,005 more in the Parquet tables." in text(section)
    assert [text(line) for line in section.iter("summary")] == [
        "Answers that a second run did not reproduce (1,105 rows)"
    ]


def test_tables_scroll_in_a_box_of_their_own(page):
    assert all("scroll" in table.getparent().get("class", "") for table in page.iter("table"))
