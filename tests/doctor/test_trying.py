import pytest
from faulty_server import faulty_server
from tiny_models import TinyTokenizer

from kvaudit.doctor import trying
from kvaudit.doctor.checks import CHECKS, Finding
from kvaudit.doctor.trying import Trial, try_engine
from kvaudit.engines import Capabilities, EngineSettings
from kvaudit.errors import EngineError, UsageError
from kvaudit.policies.as_served import AsServed
from kvaudit.records import CacheState, Served


class Answering:
    """An engine that takes no policies and shows nothing of its cache. `reads`: full prefill finds what is cached."""

    capabilities = Capabilities(False, 64, 100)
    tokenizer = TinyTokenizer()

    def __init__(self, *, full=((1, 2), (1, 2)), reusing=((1, 2), (1, 2), (1, 2)), left=0, resets=True, reads=False):
        self._full, self._reusing, self._left, self._resets = iter(full), iter(reusing), left, resets
        self._reads, self._cached = reads, set()
        self.closed = False

    def serve(self, request_id, part, prompt, sampling, policy, reference=None):
        assert max(prompt.token_ids) < 100
        assert len(prompt.token_ids) + sampling.max_tokens <= 64
        reused = len(prompt.token_ids) if prompt in self._cached else 0
        if policy is None:
            return Served(next(self._full), "", "length", len(prompt.token_ids), reused_tokens=reused * self._reads)
        assert type(policy) is AsServed
        assert reference is not None
        self._cached.add(prompt)
        return Served(next(self._reusing), "", "length", len(prompt.token_ids), reused_tokens=reused)

    def reset(self):
        if self._resets:
            self._cached.clear()
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
    ("engine", "reason"),
    [
        (Answering(left=3), "3 entries"),
        (Answering(full=((1, 2), (1, 3))), "another answer"),
        (Answering(reusing=((1, 2), (1, 2), (1, 3))), "another answer"),
        (Answering(resets=False), "60 tokens of a prompt are reused right after a reset"),
        (Answering(resets=False, reads=True), "a full prefill reused 60 tokens"),
    ],
)
def test_an_engine_that_does_not_reset_or_repeat_has_failed(named, engine, reason):
    named(lambda settings: engine)
    trial = try_engine("theirs", EngineSettings())
    assert reason in trial.findings[0].reason
    assert trial.exit_code == 3
    assert engine.closed


def test_an_answer_from_the_cache_may_be_another():
    """That is what a replay is for."""
    assert trying._answers(Answering(reusing=((1, 2), (1, 3), (1, 2)))).outcome == "seen"


def test_empty_answers_say_nothing():
    finding = trying._answers(Answering(full=((), ()), reusing=((), (), ())))
    assert (finding.outcome, finding.reason) == ("inconclusive", "every answer is empty")


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("none", 0, "after a reset answers the same"),
        ("stale-cache", 3, "2 entries are left"),
        ("hidden-stale-cache", 3, "right after a reset"),
        ("random", 3, "another answer"),
        ("random-reuse", 3, "another answer"),
        ("no-reuse", 4, "a reset had nothing to empty"),
    ],
)
def test_an_engine_that_takes_policies_is_asked_under_one(fault, code, told):
    trial = try_engine("scripted", EngineSettings(options={"fault": fault}))
    assert trial.exit_code == code
    assert told in (trial.findings[0].value or trial.findings[0].reason)


@pytest.mark.parametrize(
    ("server", "options", "code", "told"),
    [
        ({}, {}, 0, "after a reset answers the same"),
        ({"apis": ("completions",)}, {}, 0, "after a reset answers the same"),
        ({"apis": ("chat",)}, {}, 0, "after a reset answers the same"),
        ({}, {"api": "completions"}, 0, "after a reset answers the same"),
        ({"salts": False}, {}, 0, "after a reset answers the same"),
        ({"fault": "hidden-stale-cache"}, {}, 3, "1 entries are left"),
        ({"fault": "random"}, {}, 3, "another answer"),
        ({"counters": "nowhere"}, {}, 4, "does not say what it reuses"),
    ],
)
def test_a_server_is_asked_in_words(server, options, code, told):
    with faulty_server(**server) as asked:
        given = {"base-url": asked.url, "reset": "vllm", "patience": "0.5", **options}
        trial = try_engine("server", EngineSettings(model="m", options=given))
    assert trial.exit_code == code, trial
    assert told in (trial.findings[0].value or trial.findings[0].reason)


def test_whatever_an_engine_raises_is_told(named):
    class Breaks(Answering):
        def serve(self, *arguments):
            raise KeyError("cached_tokens")

    engine = Breaks()
    named(lambda settings: engine)
    trial = try_engine("theirs", EngineSettings())
    assert (trial.error, trial.exit_code) == ("KeyError: 'cached_tokens'", 3)
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
