from dataclasses import replace

import pytest

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.scripted import FAULTS, open_engine
from kvaudit.errors import UsageError
from kvaudit.policies.bounds import RecomputeAll, ReuseAll
from kvaudit.policies.tokens import TokenTopK
from kvaudit.prompts import Prompts
from kvaudit.records import Request, Sampling, Segment

ANSWER = Sampling(16)


def prompt(engine, *documents):
    """A prompt of one-word documents with a separator between them."""
    segments = [
        part for name in documents for part in (Segment("separator", "#", "#"), Segment("document", name, name))
    ]
    return Prompts(engine.tokenizer).request(Request("r", 0, tuple(segments[1:])))


class Session:
    """An engine that has been reset, and full-prefill answers to hold against."""

    def __init__(self, *, fault="none", capacity=None, **options):
        switches = Switches(capacity_bytes=capacity)
        self.settings = EngineSettings(switches=switches, options={"fault": fault, **options})
        self.engine = open_engine(self.settings)
        self.engine.reset()
        self.asked = 0

    def full(self, *documents):
        engine = open_engine(replace(self.settings, options={}))
        engine.reset()
        return engine.serve("full", "request", prompt(engine, *documents), ANSWER, None).reference

    def ask(self, *documents, policy=None, sampling=ANSWER):
        self.asked += 1
        reference = self.full(*documents)
        return self.engine.serve(
            f"r{self.asked}", "request", prompt(self.engine, *documents), sampling, policy or TokenTopK(), reference
        )

    def right(self, *documents, **fields):
        return self.ask(*documents, **fields).answer_ids == self.full(*documents).generated_ids


def test_without_a_fault_every_answer_is_that_of_full_prefill():
    session = Session()
    assert all(session.right(*documents) for documents in ["ab", "bc", "cab", "abc"])


def test_chunks_are_reused_wherever_they_stand_and_separators_are_not():
    session = Session()
    assert session.ask("alpha", "beta").reused_tokens == 0
    served = session.ask("gamma", "beta", "delta")
    assert served.reused_tokens == served.reusable_tokens == len("beta")
    (origin,) = served.provenance
    assert (origin.segment, origin.writer_request_id, origin.old_position, origin.new_position) == (2, "r1", 7, 7)
    assert origin.context_hash_written != origin.context_hash_now


def test_the_first_chunk_with_the_begin_token_is_another_chunk():
    session = Session()
    session.ask("alpha", "beta")
    assert session.ask("beta", "alpha").reused_tokens == 0


def test_policies_choose_from_reusable_tokens():
    session = Session()
    session.ask("x", "a" * 40, "y")
    served = session.ask("z", "a" * 40, "y")
    assert (served.reusable_tokens, served.budget_k, served.recomputed_tokens) == (40, 6, 6)
    assert sum(end - start for start, end in served.selection.spans) == 6
    assert 0 < sum(served.selection.deviation) < served.selection.total_deviation


@pytest.mark.parametrize(("policy", "share"), [(ReuseAll, 0), (RecomputeAll, 1)])
def test_bounds_recompute_nothing_and_everything(policy, share):
    session = Session()
    session.ask("x", "aaaa", "y")
    served = session.ask("z", "aaaa", "y", policy=policy())
    assert served.recomputed_tokens == share * served.reusable_tokens == share * 4


def test_the_first_writer_keeps_an_entry():
    session = Session()
    session.ask("x", "beta")
    session.ask("y", "beta")
    (origin,) = session.ask("z", "beta").provenance
    assert (origin.writer_request_id, origin.write_ordinal) == ("r1", 2)


def test_least_recently_used_chunks_make_room():
    session = Session(capacity=13 * 1024)
    session.ask("x", "aaaa", "bbbb")
    session.ask("x", "aaaa")
    evicted = session.ask("x", "cccc").evictions
    assert [eviction.size_bytes for eviction in evicted] == [4096]
    assert session.ask("x", "aaaa").reused_tokens == len("_x") + 4
    assert session.ask("x", "bbbb").reused_tokens == len("_x")


def test_each_write_is_told_once_with_the_reused_entries_that_it_was_computed_over():
    """`gamma`, which the same prompt writes, was computed: what follows holds nothing of an entry of it."""
    session = Session()
    session.ask("x", "beta")
    first, write = session.ask("gamma", "beta", "x").writes
    assert first.computed_over == ()
    assert (write.write_ordinal, write.position, write.tokens, write.computed_over) == (4, 12, 1, (2,))
    session.engine.reset()
    assert [write.write_ordinal for write in session.ask("x", "beta").writes] == [1, 2]


def test_a_reset_empties_the_cache_and_says_so():
    session = Session()
    session.ask("x", "beta")
    assert session.engine.reset().entries == 0
    assert session.ask("y", "beta").reused_tokens == 0


@pytest.mark.parametrize(("fault", "admitted"), [("stale-cache", 2), ("hidden-stale-cache", 0)])
def test_a_stale_cache_survives_a_reset(fault, admitted):
    session = Session(fault=fault)
    assert session.right("x", "beta")
    assert session.engine.reset().entries == admitted
    served = session.ask("x", "beta")
    assert served.reused_tokens == len("_x") + 4
    assert served.answer_ids != session.full("x", "beta").generated_ids


@pytest.mark.parametrize("fault", ["previous-request", "earlier-requests", "position"])
def test_history_faults_let_earlier_requests_into_an_answer(fault):
    session = Session(fault=fault)
    assert session.right("a")
    first = session.ask("b").answer_ids
    assert first != session.full("b").generated_ids
    session.engine.reset()
    assert session.right("b")


def test_what_each_history_fault_depends_on():
    def answer_after(fault, *history):
        session = Session(fault=fault)
        for request_id in history:
            session.engine.serve(
                request_id, "request", prompt(session.engine, "x"), ANSWER, TokenTopK(), session.full("x")
            )
        return session.ask("z").answer_ids

    assert answer_after("previous-request", "a", "b") == answer_after("previous-request", "b")
    assert answer_after("previous-request", "a", "b") != answer_after("previous-request", "b", "a")
    assert answer_after("earlier-requests", "a", "b") == answer_after("earlier-requests", "b", "a")
    assert answer_after("earlier-requests", "a", "b") != answer_after("earlier-requests", "b")
    assert answer_after("position", "a", "b") == answer_after("position", "c", "d")
    assert answer_after("position", "a", "b") != answer_after("position", "b")


def test_an_eviction_fault_needs_an_eviction():
    tight, roomy = (Session(fault="eviction", capacity=capacity) for capacity in (6 * 1024, None))
    for session in (tight, roomy):
        assert session.right("x", "aaaa")
        assert session.right("x", "bbbb")
    assert roomy.right("x", "aaaa")
    assert not tight.right("x", "aaaa")


def test_random_answers_are_random():
    session = Session(fault="random")
    assert not session.right("a")
    assert session.ask("a").answer_ids != session.ask("a").answer_ids
    reuse = Session(fault="random-reuse")
    assert not reuse.right("a")
    served = [reuse.engine.serve(f"f{i}", "request", prompt(reuse.engine, "a"), ANSWER, None) for i in range(2)]
    assert served[0].answer_ids == served[1].answer_ids


def test_a_fault_can_be_kept_to_one_policy():
    session = Session(fault="position", **{"only-policy": "none"})
    assert session.right("a")
    assert session.right("b")
    assert not session.right("c", policy=ReuseAll())


def test_nothing_is_reused_when_nothing_is_written():
    session = Session(fault="no-reuse")
    session.ask("x", "beta")
    assert session.ask("x", "beta").reused_tokens == 0


def test_it_crashes_where_it_is_told_to():
    session = Session(fault="crash", at="r2")
    session.ask("a")
    with pytest.raises(RuntimeError, match="the planted crash"):
        session.ask("a")


def test_without_figures_it_reports_answers_and_counts_only():
    session = Session(figures="none")
    assert session.engine.reset().entries is None
    served = session.ask("a")
    assert served.answer_text
    assert (served.ttft_ms, served.total_ms, served.kl, served.margin) == (None, None, None, None)
    full = session.engine.serve("f", "request", prompt(session.engine, "a"), ANSWER, None)
    assert full.reference is None


def test_answers_keep_token_limit_and_stop_strings():
    session = Session()
    assert len(session.ask("a", sampling=Sampling(5)).answer_ids) == 5
    whole = session.ask("a").answer_text
    stop = whole[4:6]
    cut = session.ask("a", sampling=Sampling(16, (stop, whole[9:])))
    assert (cut.answer_text, cut.finish_reason) == (whole.partition(stop)[0], "stop")


def test_a_prelude_writes_to_the_cache_and_is_no_earlier_request():
    session = Session(fault="position")
    session.engine.serve("r1", "prelude", prompt(session.engine, "x", "beta"), Sampling(0), TokenTopK())
    served = session.ask("y", "beta")
    assert served.provenance[0].writer_part == "prelude"
    assert served.answer_ids == session.full("y", "beta").generated_ids


def unexpected(engine, call):
    full = prompt(engine, "a")
    calls = {
        "a second close": lambda: (engine.close(), engine.close()),
        "a serve after close": lambda: (engine.close(), engine.serve("r", "request", full, ANSWER, None)),
        "a reset after close": lambda: (engine.close(), engine.reset()),
        "a policy without a reference": lambda: engine.serve("r", "request", full, ANSWER, TokenTopK()),
        "a prelude of full prefill": lambda: engine.serve("r", "prelude", full, Sampling(0), None),
        "16 tokens for a prelude": lambda: engine.serve("r", "prelude", full, ANSWER, TokenTopK()),
        "0 tokens for a request": lambda: engine.serve("r", "request", full, Sampling(0), None),
        "do not tile": lambda: engine.serve("r", "request", replace(full, segments=()), ANSWER, None),
        "'r' twice": lambda: [engine.serve("r", "request", full, ANSWER, None) for _ in range(2)],
    }
    return calls[call]


@pytest.mark.parametrize(
    "call",
    [
        "a second close",
        "a serve after close",
        "a reset after close",
        "a policy without a reference",
        "a prelude of full prefill",
        "16 tokens for a prelude",
        "0 tokens for a request",
        "do not tile",
        "'r' twice",
    ],
)
def test_a_call_without_a_reason_raises(call):
    with pytest.raises(RuntimeError, match=f"unexpected call: .*{call}"):
        unexpected(Session().engine, call)()


def test_a_serve_before_the_first_reset_raises():
    engine = open_engine(EngineSettings())
    with pytest.raises(RuntimeError, match="a serve before the first reset"):
        engine.serve("r", "request", prompt(engine, "a"), ANSWER, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fault": "gremlins"}, "no fault 'gremlins'"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"delay-ms": "soon"}, "delay-ms is 'soon'"),
        ({"context": "-1"}, "context is '-1'"),
    ],
)
def test_unknown_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        open_engine(EngineSettings(options=options))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_description_names_the_fault(fault):
    assert open_engine(EngineSettings(options={"fault": fault})).describe()["fault"] == fault
