import pytest

from kvaudit.doctor import trying
from kvaudit.doctor.checks import CHECKS, Finding
from kvaudit.doctor.trying import Trial, try_engine
from kvaudit.engines import Capabilities, EngineSettings
from kvaudit.errors import EngineError, UsageError
from kvaudit.records import CacheState, Served


class Answering:
    """An engine that shows nothing of its cache."""

    capabilities = Capabilities(False, 64, 100)

    def __init__(self, answers=((1, 2), (1, 2)), left=0):
        self._answers, self._left = iter(answers), left
        self.closed = False

    def serve(self, request_id, part, prompt, sampling, policy, reference=None):
        assert policy is None
        assert max(prompt.token_ids) < 100
        return Served(next(self._answers), "", "length", len(prompt.token_ids))

    def reset(self):
        return CacheState(self._left, None)

    def close(self):
        self.closed = True


@pytest.fixture
def named(monkeypatch):
    def put(open_engine):
        monkeypatch.setattr(trying, "load", lambda family, name: open_engine)

    return put


def test_an_engine_that_shows_nothing_is_asked_for_an_answer(named):
    engine = Answering()
    named(lambda settings: engine)
    trial = try_engine("theirs", EngineSettings())
    assert [(finding.check, finding.outcome) for finding in trial.findings] == [("answers", "seen")]
    assert trial.exit_code == 0
    assert engine.closed


@pytest.mark.parametrize(
    ("engine", "reason"), [(Answering(left=3), "3 entries"), (Answering(answers=((1, 2), (1, 3))), "another answer")]
)
def test_an_engine_that_does_not_reset_or_repeat_has_failed(named, engine, reason):
    named(lambda settings: engine)
    trial = try_engine("theirs", EngineSettings())
    assert reason in trial.findings[0].reason
    assert trial.exit_code == 3
    assert engine.closed


@pytest.mark.parametrize(("error", "code"), [(UsageError("no such model", "name one"), 2), (EngineError("died"), 3)])
def test_an_engine_that_does_not_open_is_told_with_the_code_of_a_replay(named, error, code):
    def fails(settings):
        raise error

    named(fails)
    trial = try_engine("theirs", EngineSettings())
    assert (trial.error, trial.hint, trial.exit_code) == (error.message, error.hint, code)


def test_the_engine_that_was_opened_first_is_the_first_launch(named, monkeypatch):
    """A real engine takes minutes to start."""
    opened = []

    class Shown(Answering):
        chunk_rules = tokenizer = None

        def describe(self):
            raise AssertionError

        rows = describe

    def open_engine(settings):
        opened.append(Shown())
        return opened[-1]

    def run_checks(again, progress):
        assert again() is opened[0]
        assert again() is opened[1]
        return [Finding("noise", "seen", "equal")]

    named(open_engine)
    monkeypatch.setattr(trying, "run_checks", run_checks)
    assert try_engine("theirs", EngineSettings()).exit_code == 0
    assert len(opened) == 2


@pytest.mark.parametrize(
    ("outcomes", "code"), [(["seen"], 0), (["seen", "inconclusive"], 4), (["inconclusive", "failed"], 3), ([], 0)]
)
def test_the_worst_check_decides_the_exit_code(outcomes, code):
    findings = tuple(Finding(name, outcome) for name, outcome in zip(CHECKS, outcomes, strict=False))
    assert Trial("theirs", "a model", findings=findings).exit_code == code
