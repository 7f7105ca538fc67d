"""What a study makes of its cells: rows, frontier, deviance, doubts; and how reports say it."""

import csv
import io
import json
import shutil
from dataclasses import replace

import numpy as np
import orjson
import pytest
import studies
from fakes import rolling_trace
from studies import TRACE, faulty_under, run_study

from kvaudit.analysis import deviance
from kvaudit.analysis.audit import analyse
from kvaudit.analysis.checks import Reason
from kvaudit.analysis.deviance import Responses
from kvaudit.analysis.figures import select
from kvaudit.analysis.stats import Estimate
from kvaudit.reports.study import FORMATS
from kvaudit.reports.study.words import budget_sentences, deviance_rows, explained_sentence, headline, verdict_line
from kvaudit.store import open_run
from kvaudit.study.results import CellResults, Explained, read_results, study_results

SWITCHES = ("lookup", "write_back")


@pytest.fixture(autouse=True, scope="module")
def a_few_resamples():
    patch = pytest.MonkeyPatch()
    patch.setattr(deviance, "RESAMPLES", 30)
    patch.setattr(deviance, "PERMUTATIONS", 999)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def gap_study(tmp_path_factory):
    """Mask x gap with a fault that acts where separators are zeroed."""
    path = tmp_path_factory.mktemp("gap") / "s"
    trace = rolling_trace(24, window=2)
    run_study(
        path,
        "switches",
        trace=trace,
        open_engine=faulty_under("position", gap="zero"),
        policies=("token-topk", "none"),
        fixed=SWITCHES,
    )
    return path


@pytest.fixture(scope="module")
def budget_study(tmp_path_factory):
    path = tmp_path_factory.mktemp("budget") / "s"
    run_study(path, policies=("token-topk", "none"))
    return path


def text(results, name="terminal"):
    out = io.StringIO()
    FORMATS[name](results, out)
    return out.getvalue()


def words(results):
    return " ".join(text(results).split())


def test_rows_have_the_figures_of_their_cells_audit(gap_study):
    results = read_results(gap_study)
    assert len(results.rows) == 6 * 2
    for row in results.rows:
        run = open_run(gap_study / "cells" / row.cell.name)
        figures = analyse(run).figures
        (fidelity,) = select(figures, "fidelity", row.policy, "chronological", "none")
        assert (row.fidelity.value, row.fidelity.low) == (fidelity.value, fidelity.low)
        (variation,) = select(figures, "answer_variation", row.policy)
        assert (row.variation.value, row.variation.high) == (variation.value, variation.high)
        (speedup,) = select(figures, "ttft_speedup", row.policy)
        assert row.speedup.value == pytest.approx(speedup.value)
        orders = [figure.value for figure in select(figures, "fidelity", row.policy, control="none")]
        assert row.mean_fidelity.value == pytest.approx(sum(orders) / len(orders))
        assert row.mean_fidelity.low <= row.mean_fidelity.value <= row.mean_fidelity.high
        kl = [figure.value for figure in select(figures, "kl_mean", row.policy, control="none")]
        assert row.kl == pytest.approx(sum(kl) / len(kl))


def test_counts_are_those_of_the_comparisons(gap_study):
    for row in read_results(gap_study).rows:
        table = open_run(gap_study / "cells" / row.cell.name).table("comparisons").to_pylist()
        mine = [one for one in table if one["policy"] == row.policy]
        held = [one for one in mine if one["kind"] == "reference" and one["right"].count(".") == 1]
        assert (row.counts.equal.sum(), row.counts.answers.sum()) == (sum(one["equal"] for one in held), len(held))
        pairs = [one for one in mine if one["kind"] == "orders"]
        assert (row.counts.differing.sum(), row.counts.pairs.sum()) == (
            sum(not one["equal"] for one in pairs),
            len(pairs),
        )


def test_a_fault_that_acts_under_one_switch_is_explained_by_it(gap_study):
    found = {(one.policy, one.event): one for one in read_results(gap_study).explained}
    assert set(found) == {(p, e) for p in ("token-topk", "none") for e in ("fidelity", "answer variation")}
    for explained in found.values():
        assert explained.deviance.explaining == "gap"
        assert explained.deviance.switches[0].share > 0.95
        assert explained.deviance.switches[1].p_adjusted == 1
    sentence = explained_sentence(found["token-topk", "fidelity"])
    assert sentence.startswith("token-topk: gap explains most of the loss of fidelity: ")
    assert "% of the deviance between 6 cells (95 % interval " in sentence
    assert "fidelity recompute 100.0 %, zero 4.2 %, store 100.0 %;" in sentence
    assert "permutation p" in sentence


def test_no_loss_blames_no_switch(tmp_path):
    results = run_study(tmp_path / "s", "switches", fixed=(*SWITCHES, "mask"))
    assert [explained_sentence(one) for one in results.explained] == [
        "token-topk: no switch can be said to explain the loss of fidelity: fidelity is 100 % in every cell.",
        "token-topk: no switch can be said to explain the answer variation: answer variation is 0 % in every cell.",
    ]
    assert "no switch can be said to explain" in words(results)


def test_what_so_few_requests_cannot_tell_is_said(tmp_path):
    results = run_study(tmp_path / "s", "switches", open_engine=faulty_under("position", gap="zero"), fixed=SWITCHES)
    sentence = explained_sentence(results.explained[0])
    assert sentence.startswith(
        "token-topk: which switch explains most of the loss of fidelity cannot be told: most is gap"
    )
    assert "of the deviance between 6 cells (no interval from fewer than 6 blocks of requests), fidelity" in sentence
    assert "; permutation p 0." in sentence
    assert "on 2 independent blocks of requests it cannot be below" in sentence
    table = text(results).split("Analysis of deviance")[1]
    assert " - " in table
    assert "None" not in words(results)


@pytest.fixture(scope="module")
def three_gaps():
    """One switch of three values; of 4 blocks of requests, exchanges of three values give a small p."""

    def explained(blocks, lost=0):
        events = np.full((3, blocks), 5)
        events[1] = lost
        return Explained(
            "p", "fidelity", deviance.deviance(Responses({"gap": list("abc")}, events, events * 0 + 5), 1, 0)
        )

    return explained


def test_why_a_clear_effect_on_few_blocks_names_no_switch(three_gaps):
    sentence = explained_sentence(three_gaps(4))
    assert sentence.startswith(
        "p: which switch explains most of the loss of fidelity cannot be told: most is gap's, 100.0 % of the deviance "
        "between 3 cells (no interval from fewer than 6 blocks of requests), fidelity a 100.0 %, b 0.0 %, c 100.0 %; "
        "permutation p 0.0"
    )
    assert sentence.endswith("; 4 independent blocks of requests are too few to resample, 6 are needed.")
    assert explained_sentence(three_gaps(6)).startswith("p: gap explains most of the loss of fidelity: 100.0 %")
    assert [row[4:6] for row in deviance_rows(three_gaps(4).deviance)] == [["100.0 %", "-"]]


def test_that_all_interactions_together_take_more_is_said(three_gaps):
    found = replace(three_gaps(8).deviance, explaining=None)
    crossed = replace(found, main=0.6 * found.null, terms=(replace(found.terms[0], marginal=0.4 * found.null),))
    sentence = explained_sentence(Explained("p", "fidelity", crossed))
    assert sentence.endswith("after Holm, and all interactions together take 60.0 %.")


@pytest.fixture(scope="module")
def copied_study(tmp_path_factory):
    """Lookup x write-back with a fault in chunks that are computed alone, which need no cell for stop-at-miss."""
    patch = pytest.MonkeyPatch()
    patch.setattr(studies, "ENGINE", "embedded")
    path = tmp_path_factory.mktemp("copied") / "s"
    fault = faulty_under("position", write_back="isolated")
    yield run_study(path, "switches", trace=rolling_trace(24, window=2), open_engine=fault, fixed=("mask", "gap"))
    patch.undo()


def test_a_cell_that_is_known_to_equal_another_stands_in_the_analysis(copied_study):
    assert [row.cell.name for row in copied_study.rows] == [
        "any.first-writer",
        "any.isolated",
        "stop-at-miss.first-writer",
    ]
    for explained in copied_study.explained:
        found = explained.deviance
        assert found.cells == 4
        assert (found.explaining, found.switches[0].share) == ("write_back", pytest.approx(1, abs=0.05))
        assert {term.name for term in found.terms} == {"lookup", "write_back", "lookup:write_back"}


def test_every_value_of_a_switch_is_held_against_the_others_under_the_same_settings(copied_study):
    """Without the copy, a lookup would be tested at first-writer alone: both shares would be those of two cells."""
    counts = {row.cell.name: row.counts for row in copied_study.rows}
    alone = counts["any.isolated"]
    (lookup,) = [term for term in copied_study.explained[0].deviance.switches if term.name == "lookup"]
    for level, name in zip(lookup.levels, ("any.first-writer", "stop-at-miss.first-writer"), strict=True):
        equal = counts[name].equal.sum() + alone.equal.sum()
        assert level.share == pytest.approx(equal / (counts[name].answers.sum() + alone.answers.sum()))


def test_a_copy_of_a_cell_that_cannot_be_told_is_left_out_with_it(copied_study):
    rows = [row for row in copied_study.rows if row.cell.name != "any.isolated"]
    described = copied_study.described
    results = study_results(described, [CellResults(row.cell, (row,), 0) for row in rows])
    assert results.explained[0].deviance.cannot == "every answer showed it in every cell"


def test_what_rounding_alone_makes_doubtful_is_lost_under_its_switches_all_the_same(copied_study):
    def explained(code):
        rows = [
            replace(row, finding=replace(row.finding, reasons=(Reason(code, 1, 4),)))
            if row.cell.name == "any.isolated"
            else row
            for row in copied_study.rows
        ]
        results = study_results(copied_study.described, [CellResults(row.cell, (row,), 0) for row in rows])
        return results.explained[0].deviance

    assert explained("within-rounding") == copied_study.explained[0].deviance
    assert explained("repeat-differs") != copied_study.explained[0].deviance


def test_the_frontier_is_starred_and_the_beaten_are_not(gap_study):
    results = read_results(gap_study)
    for row, standing in zip(results.rows, results.standing, strict=True):
        if row.cell.switches.gap == "zero" or row.policy == "token-topk":
            assert standing != "frontier"
        else:
            assert standing == "frontier", "`none` saves most time, and outside of the fault nothing is lost"
    table = text(results).split("Every cell")[0]
    assert sum(line.rstrip().endswith("*") for line in table.splitlines()) == 4


def test_an_inconclusive_cell_is_a_doubt_and_on_no_frontier(tmp_path):
    results = run_study(
        tmp_path / "s", "switches", open_engine=faulty_under("random-reuse", gap="zero"), fixed=SWITCHES
    )
    doubtful = {row.cell.name for row in results.doubtful}
    assert doubtful == {"exact.zero", "bottom-right.zero"}
    assert results.exit_code == 4
    assert {
        standing for row, standing in zip(results.rows, results.standing, strict=True) if row in results.doubtful
    } == {"unknown"}
    said = words(results)
    assert said.startswith("Study: inconclusive (2 rows of 6 inconclusive of 6 cells; exit code 4)")
    assert "token-topk at exact + zero: The repeat control answered" in said
    (explained, _) = results.explained
    assert explained.deviance.cells == 4 or explained.deviance.cannot


def test_a_control_cell_that_reuses_nothing_is_no_doubt(tmp_path):
    results = run_study(
        tmp_path / "s",
        "disciplines",
        open_engine=faulty_under("no-reuse", write_back="none"),
        fixed=("lookup",),
    )
    (blank,) = [row for row in results.rows if row.cell.is_control]
    assert [reason.code for reason in blank.finding.reasons] == ["nothing-reused"]
    assert blank.reasons == ()
    assert results.exit_code == 0
    assert results.standing[results.rows.index(blank)] == "unknown"


def test_nothing_reused_elsewhere_is_a_doubt(tmp_path):
    results = run_study(tmp_path / "s", "policies", open_engine=faulty_under("no-reuse"))
    assert results.exit_code == 4


def test_from_which_ratio_on_no_answer_differs(budget_study):
    results = read_results(budget_study)
    low = results.rows[0].mean_fidelity.low
    assert budget_sentences(results)[0] == (
        "token-topk: from 1 % on every answer equals full prefill's, which leaves fidelities from "
        f"{100 * low:.1f} % on possible."
    )
    lost = Estimate(0.9, 0.7, 0.95, 8, "")
    every = "at no ratio of this study do all answers equal full prefill's; at 50 % fidelity is 90.0 % (70.0-95.0)"
    for broken, expected in (((0, 1), "from 5 % on"), (range(7), every), ((0, 5), "from 50 % on")):
        rows = tuple(replace(row, mean_fidelity=lost) if i in broken else row for i, row in enumerate(topk(results)))
        assert expected in budget_sentences(replace(results, rows=rows))[0]


def topk(results):
    return [row for row in results.rows if row.policy == "token-topk"]


def inconclusive(row):
    return replace(row, finding=replace(row.finding, reasons=(Reason("within-rounding"),)))


@pytest.mark.parametrize("how", ["inconclusive", "worse", "inconclusive and worse", "failed or missing"])
def test_from_a_ratio_on_is_said_only_where_every_higher_ratio_shows_it(budget_study, how):
    results = read_results(budget_study)
    rows = []
    for row in topk(results):
        is_high = row.cell.recompute_ratio in (0.1, 0.2)
        if is_high and how == "failed or missing":
            continue
        if is_high and "worse" in how:
            row = replace(row, mean_fidelity=Estimate(0.4, 0.2, 0.6, 8, ""))
        rows.append(inconclusive(row) if is_high and "inconclusive" in how else row)

    def said(rows):
        return budget_sentences(replace(results, rows=tuple(rows)))

    why = "at 20 % fidelity is 40.0 % (20.0-60.0)" if how == "worse" else "nothing can be said of 10 %, 20 %"
    assert said(rows)[0].startswith("token-topk: from 50 % on every answer equals full prefill's")
    assert said(row for row in rows if row.cell.recompute_ratio < 0.5)[0] == (
        "token-topk: every answer equals full prefill's at 1 %, 2 %, 5 %, 15 %, which cannot be said of every higher "
        f"ratio: {why}{', 50 %' if how != 'worse' else '; nothing can be said of 50 %'}."
    )
    assert said(map(inconclusive, rows)) == []


def test_what_no_ratio_reaches_is_said_with_what_is_not_known(budget_study):
    results = read_results(budget_study)
    lost = [replace(row, mean_fidelity=Estimate(0.9, 0.7, 0.95, 8, "")) for row in topk(results)]
    assert budget_sentences(replace(results, rows=(*lost[:5], inconclusive(lost[5]), lost[6]))) == [
        "token-topk: at no conclusive ratio of this study do all answers equal full prefill's; at 50 % fidelity is "
        "90.0 % (70.0-95.0); nothing can be said of 20 %."
    ]


def test_a_policy_that_runs_once_stands_once(budget_study):
    results = read_results(budget_study)
    assert [row.cell.recompute_ratio for row in results.rows if row.policy == "none"] == [0.01]
    assert not any(sentence.startswith("none") for sentence in budget_sentences(results))
    assert "none any ratio" in words(results)
    assert (
        "not run, since their budget does not depend on the recompute ratio: none in 2-percent (see 1-percent)"
        in words(results)
    )


@pytest.mark.parametrize("study", ["gap_study", "budget_study"])
def test_the_terminal_report_fits_80_columns_and_says_everything(study, request):
    results = read_results(request.getfixturevalue(study))
    report = text(results)
    assert max(map(len, report.splitlines())) <= 80
    assert report.splitlines()[0] == verdict_line(results)
    said = words(results)
    for part in ("What was studied", "rolling.jsonl", "Frontier of fidelity", "Every cell", "95 % interval lies apart"):
        assert part in said
    for row in results.rows:
        assert f"{row.mean_fidelity.value * 100:.1f} ({row.mean_fidelity.low * 100:.1f}-" in said
    if study == "gap_study":
        assert "Analysis of deviance: token-topk, answer variation" in said
        assert "tested by no chi-square" in said
        assert "Holm over the switches of one policy and one event, not over policies and events" in said


def test_json_has_all_of_it(gap_study):
    results = read_results(gap_study)
    data = json.loads(text(results, "json"))
    assert data["exit_code"] == 0
    assert data["headline"] == headline(results)
    assert len(data["rows"]) == len(results.rows)
    first = data["rows"][0]
    assert first["mean_fidelity"]["value"] == results.rows[0].mean_fidelity.value
    assert first["switches"]["mask"] == "exact"
    assert data["explained"][0]["explaining"] == "gap"
    assert {term["name"] for term in data["explained"][0]["terms"]} == {"mask", "gap", "mask:gap"}
    assert data["axes"] == {"mask": ["exact", "bottom-right"], "gap": ["recompute", "zero", "store"]}


def test_csv_has_a_line_a_row(gap_study):
    results = read_results(gap_study)
    lines = list(csv.DictReader(io.StringIO(text(results, "csv"))))
    assert [(line["cell"], line["policy"]) for line in lines] == [(row.cell.name, row.policy) for row in results.rows]
    assert float(lines[0]["answer_variation_high"]) == results.rows[0].variation.high
    assert {line["standing"] for line in lines} == set(results.standing)


def test_an_empty_study_is_inconclusive(budget_study):
    results = replace(read_results(budget_study), rows=(), standing=(), missing=("1-percent",), explained=())
    assert results.exit_code == 4
    assert "1-percent: not replayed yet" in words(results)
    assert TRACE.source in words(results)


def killed_before_its_summary(cell):
    for name in ("comparisons", "summary"):
        (cell / f"{name}.parquet").unlink()


def cut_off(cell):
    manifest = cell / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:300])


def emptied(cell):
    (cell / "manifest.json").write_bytes(b"")


def of_other_types(cell):
    manifest = cell / "manifest.json"
    manifest.write_bytes(orjson.dumps(orjson.loads(manifest.read_bytes()) | {"arms": 5, "trace": None}))


def without_observations_of_an_arm(cell):
    next((cell / "observations").iterdir()).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (killed_before_its_summary, "comparisons.parquet is missing"),
        (cut_off, "manifest.json is damaged"),
        (emptied, "manifest.json is damaged"),
        (of_other_types, "manifest.json was changed"),
        (without_observations_of_an_arm, "is empty"),
    ],
)
def test_a_cell_that_cannot_be_read_is_missing_and_named_and_the_others_are_reported(
    budget_study, tmp_path, damage, why
):
    study = shutil.copytree(budget_study, tmp_path / "s")
    whole = read_results(study)
    damage(study / "cells" / "5-percent")

    results = read_results(study)

    assert (results.missing, results.exit_code) == (("5-percent",), 4)
    assert [row.cell.name for row in results.rows] == [
        row.cell.name for row in whole.rows if row.cell.name != "5-percent"
    ]
    assert why in results.unreadable["5-percent"]
    said = words(results)
    assert "Study: inconclusive (1 cell missing of 7 cells; exit code 4)" in said
    assert "5-percent: left out, since it cannot be read: " in said
    assert "not replayed yet" not in said
    assert json.loads(text(results, "json"))["unreadable"] == results.unreadable
