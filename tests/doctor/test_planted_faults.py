"""The checks find what no switch shows, and say inconclusive where they cannot see."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_engines
from check_expectations import expected, finding_of, found, told
from tiny_engines import launches, tiny_engine

from kvaudit.doctor.checks import CHECKS, NOISE, run_checks
from kvaudit.doctor.checks.given import Given
from kvaudit.engines import PRESETS, Probed, Rows, Switches
from kvaudit.engines.embedded.mixed import MixedCache
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, PromptSegment, Sampling

IDEAL, LMCACHE = PRESETS["ideal"], PRESETS["lmcache"]


def checked(kind, switches=IDEAL):
    return run_checks(lambda: tiny_engine(switches, kind=kind))


def never_wrong(findings, switches):
    """Each check finds the truth or says that it cannot see."""
    truth = expected(switches)
    for check, switch in told(findings).items():
        finding = finding_of(findings, check)
        assert finding.outcome == "inconclusive" or switch == truth[check], finding


def test_the_embedded_engine_is_probed():
    assert isinstance(tiny_engine(IDEAL), Probed)


@pytest.mark.parametrize("switches", [IDEAL, LMCACHE, PRESETS["epic"]])
def test_every_second_write_that_is_dropped(switches):
    findings = checked(tiny_engines.LosesHalf, switches)
    finding = finding_of(findings, "save loss")
    assert "are lost" in finding.value
    assert finding.evidence["lost in new prompts"] > 0
    never_wrong(findings, switches)


@pytest.mark.parametrize("switches", [IDEAL, LMCACHE])
def test_short_chunks_that_are_lost_behind_a_hit(switches):
    finding = found("save loss", tiny_engine(switches, kind=tiny_engines.LosesShort))
    assert finding.value == "new chunks of up to 1 token, of 1 to 32 that were tried, are lost behind a hit"
    assert finding.evidence["lost in new prompts"] == 0


@pytest.mark.parametrize("switches", [IDEAL, LMCACHE])
def test_where_no_hit_comes_before_a_new_chunk_nothing_is_lost_behind_one(switches):
    finding = found("save loss", tiny_engine(switches, kind=tiny_engines.LosesLonely))
    assert finding.outcome == "inconclusive"
    assert "could stand behind" in finding.reason
    assert finding.evidence["tried in new prompts"] == finding.evidence["no hit to stand behind"] > 0
    assert finding.evidence["tried behind a hit"] == finding.evidence["lost behind a hit"] == 0


@pytest.mark.parametrize("switches", [IDEAL, LMCACHE, PRESETS["epic"], PRESETS["unmoved"], PRESETS["cache-craft"]])
def test_noise_is_measured_and_does_not_mislead(switches):
    findings = checked(tiny_engines.Noisy, switches)
    noise = finding_of(findings, NOISE)
    assert noise.value == "the same tokens, other last digits"
    assert 1e-5 < noise.evidence["relative"] < 1e-3
    never_wrong(findings, switches)
    assert finding_of(findings, "position").switch == f"--keys {switches.keys}"


@pytest.mark.parametrize("switches", [IDEAL, LMCACHE, PRESETS["epic"]])
def test_noise_that_drowns_everything_leaves_nothing_to_say(switches):
    findings = checked(tiny_engines.VeryNoisy, switches)
    for check in ("causality", "gap", "discipline", "position"):
        assert finding_of(findings, check).outcome == "inconclusive"
    assert told(findings)["lookup"] == expected(switches)["lookup"]


def test_launches_that_differ():
    findings = run_checks(launches(lambda: tiny_engine(IDEAL, seed=1), lambda: tiny_engine(IDEAL, seed=2)))
    noise = finding_of(findings, NOISE)
    assert noise.value == "tokens differ between repeats"
    assert noise.evidence["repeat: log-probabilities"] == 0
    assert noise.evidence["launch: log-probabilities"] > 0.1
    assert finding_of(findings, "causality").outcome == "inconclusive"


def test_a_row_that_sees_one_token_too_many(monkeypatch):
    def one_further(self, at):
        return (at + 1).clamp(max=self.span.end - 1)

    monkeypatch.setattr(MixedCache, "_limits", one_further)
    assert found("causality", tiny_engine(IDEAL)).value == "recomputed rows see later tokens"


def test_rows_that_are_not_recomputed_show_nothing_of_the_mask():
    finding = found("causality", tiny_engine(IDEAL, kind=tiny_engines.Stubborn))
    assert finding.outcome == "inconclusive"
    assert "what stands before it" in finding.reason


@pytest.mark.parametrize("off", [1, -7])
def test_keys_that_are_turned_to_the_wrong_place(monkeypatch, off):
    def turned_wrongly(self):
        for start, end, entry in self.span.loaded:
            moved = start != entry.position
            first = start + off * moved
            yield start, end, self.transformer.rotation(first, first + end - start)

    monkeypatch.setattr(MixedCache, "_turns", turned_wrongly)
    finding = found("position", tiny_engine(IDEAL))
    assert finding.value == "keys change, but not to those of the new place"
    assert finding.evidence["products changed"] < 1e-5


def test_one_layer_that_forgets_to_turn(monkeypatch):
    load = MixedCache.load

    def load_all_but_one(self):
        load(self)
        for start, end, entry in self.span.loaded:
            as_written = self.transformer.rotation(entry.position, entry.position + end - start)
            self.arena[2, 0, :, start:end] = as_written.of(entry.states[2, 0])

    monkeypatch.setattr(MixedCache, "load", load_all_but_one)
    finding = found("position", tiny_engine(IDEAL))
    assert finding.value == "keys change, but not to those of the new place"


def test_a_chunk_whose_values_change_was_not_only_moved(monkeypatch):
    load = MixedCache.load

    def load_worn(self):
        load(self)
        for start, end, entry in self.span.loaded:
            if start != entry.position:
                self.arena[:, 1, :, start:end] *= 1.01

    monkeypatch.setattr(MixedCache, "load", load_worn)
    finding = found("position", tiny_engine(IDEAL))
    assert finding.outcome == "inconclusive"
    assert "values changed" in finding.reason


def test_gaps_that_are_zero_by_half():
    finding = found("gap", tiny_engine(IDEAL, kind=tiny_engines.ZeroKeys))
    assert finding.value == "separators' keys are zero, their values are not"
    assert finding.switch is None


def test_a_reset_that_empties_nothing_is_caught():
    findings = checked(tiny_engines.KeepsItsCache)
    for check in (NOISE, "causality"):
        finding = finding_of(findings, check)
        assert finding.outcome == "inconclusive"
        assert "nobody had stored" in finding.reason


def test_a_cache_that_is_not_empty_after_a_reset():
    for finding in checked(tiny_engines.AdmitsEntries):
        assert finding.outcome == "inconclusive"
        assert "still holds 3 entries" in finding.reason


def test_rows_that_are_not_shown():
    findings = checked(tiny_engines.Blank)
    for check in (NOISE, "causality", "gap", "discipline", "position"):
        assert "did not show rows" in finding_of(findings, check).reason
    assert "relative" not in finding_of(findings, NOISE).evidence
    assert told(findings)["lookup"] == "--lookup any"


def test_an_engine_that_does_not_know_its_tokens():
    for finding in checked(tiny_engines.SaysNothing):
        assert "does not say which token ids it knows" in finding.reason


class Breaks(tiny_engines.EmbeddedEngine):
    def rows(self, *arguments):
        raise EngineError("the worker is gone\nTraceback", "look at its log")


def test_a_check_that_fails_is_told_and_the_others_run():
    told_to_progress = []
    findings = run_checks(lambda: tiny_engine(IDEAL, kind=Breaks), told_to_progress.append)
    failed = {finding.check for finding in findings if finding.outcome == "failed"}
    assert failed == {NOISE, "causality", "gap", "discipline", "position"}
    assert finding_of(findings, "causality").reason == "the worker is gone"
    assert finding_of(findings, "lookup").value == "chunks behind a miss are reused"
    assert told_to_progress == ["first launch", NOISE, "second launch", NOISE, *CHECKS]


def test_engines_are_closed_one_before_the_other_opens():
    events = []

    class Watched(tiny_engines.EmbeddedEngine):
        def close(self):
            events.append("closed")
            super().close()

    def opened():
        events.append("opened")
        return tiny_engine(IDEAL, kind=Watched)

    run_checks(opened)
    assert events == ["opened", "closed"] * 2


def test_an_engine_that_shows_no_rows_is_refused_and_closed():
    class Opaque:
        closed = False

        def close(self):
            self.closed = True

    engine = Opaque()
    with pytest.raises(EngineError, match="does not show what is in its cache"):
        run_checks(lambda: engine)
    assert engine.closed


def test_rows_are_those_of_the_mixed_cache():
    engine = tiny_engine(Switches(gap="zero"))
    segments = (
        PromptSegment("document", "a", 0, 4),
        PromptSegment("separator", "s", 4, 5),
        PromptSegment("document", "b", 5, 8),
        PromptSegment("query", "q", 8, 10),
    )
    prompt = Prompt((11, 12, 13, 14, 3, 21, 22, 23, 31, 32), segments)
    engine.serve("w", "request", prompt, Sampling(1), Given())
    shown = engine.rows("r", prompt, Given((6,)), np.array([7, 4, 0]))
    assert isinstance(shown, Rows)
    assert shown.keys.shape == shown.values.shape == (3, 3, 2, 16)
    assert shown.served.reused_tokens == 9
    assert not shown.keys[:, 1].any()
    arena = engine.blender.arena.numpy()
    assert np.array_equal(shown.keys[:, 0], arena[:, 0, :, 7])
    assert np.array_equal(shown.values[:, 2], arena[:, 1, :, 0])
