"""The audit through HTTP against the truth: the faults that can be planted in a server, and what each must come to."""

import sys
from dataclasses import dataclass, field, replace

import pytest
from fakes import rolling_trace, segment
from faulty_server import faulty_server

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.gates import Gates
from kvaudit.engines import EngineSettings
from kvaudit.engines.scripted import FAULTS
from kvaudit.errors import EngineError, RunError, UsageError
from kvaudit.plan import make_plan
from kvaudit.plugins import load
from kvaudit.records import Request, Trace
from kvaudit.replay import replay
from kvaudit.reports.words.verdict import headline
from kvaudit.store import new_manifest, open_folder, open_run

TIGHT = 100_000
"""Bytes: less than the chunks of one window and the probe."""


@dataclass(frozen=True)
class Case:
    fault: str
    seen: str
    reasons: frozenset = frozenset()
    options: dict = field(default_factory=dict)
    behaviour: dict = field(default_factory=dict)
    prelude: bool = False
    requests: int = 5

    def __str__(self):
        return "-".join(
            [
                self.fault,
                *map(str, [*self.options.values(), *self.behaviour]),
                *["prelude"] * self.prelude,
                str(self.requests),
            ]
        )


def none_seen(fault, **fields):
    return Case(fault, "none-seen", **fields)


def sensitive(fault, **fields):
    return Case(fault, "history-sensitive", **fields)


def inconclusive(fault, *reasons, **fields):
    return Case(fault, "inconclusive", frozenset(reasons), **fields)


MATRIX = [
    none_seen("none"),
    none_seen("none", prelude=True),
    none_seen("none", options={"reference": "reset"}),
    none_seen("none", options={"api": "chat"}),
    none_seen("none", behaviour={"counters": "timings"}),
    none_seen("none", behaviour={"counters": "metrics"}),
    none_seen("none", behaviour={"salts": False}),
    none_seen("none", behaviour={"shows_ids": True}),
    none_seen("none", behaviour={"busy_resets": 2}),
    none_seen("eviction"),
    sensitive("previous-request"),
    inconclusive("previous-request", "noise-possible", prelude=True),
    sensitive("earlier-requests"),
    sensitive("position"),
    sensitive("position", options={"reference": "reset"}, behaviour={"counters": "metrics"}),
    sensitive("eviction", behaviour={"capacity": TIGHT, "counters": "timings"}, requests=16),
    inconclusive("hidden-stale-cache", "cache-not-empty", "repeat-differs"),
    inconclusive("hidden-stale-cache", "cache-not-empty", "reference-reused", options={"reference": "reset"}),
    inconclusive("random", "noise-floor", "repeat-differs"),
    inconclusive("random-reuse", "repeat-differs"),
    inconclusive("no-reuse", "nothing-reused", behaviour={"counters": "timings"}),
    inconclusive("no-reuse", "reuse-unknown"),
    inconclusive(
        "none", "reuse-unknown", "cache-unverified", "reference-unverified", behaviour={"counters": "nowhere"}
    ),
    inconclusive("none", "reuse-unknown", behaviour={"counters": "nowhere", "slow_prefill": 0.03}),
]


def settings_for(server, **options):
    given = {"base-url": server.url, "reset": "vllm", "patience": "0.5", **options}
    return EngineSettings(model="m", options={name.replace("_", "-"): value for name, value in given.items()})


def replayed(path, trace, settings, orders=3, **folder):
    plan = make_plan(len(trace.requests), "server", settings, (), orders)
    with open_folder(path, new_manifest(trace, plan, 0.0), **folder) as claimed:
        replay(trace, lambda: load("engines", "server")(settings), plan, claimed)
    return open_run(path)


def audited(path, trace, settings, gates=None, **options):
    run = replayed(path, trace, settings, **options)
    return analyse(run, gates or Gates(), run.provenance)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_the_finding_is_right_for_every_fault_of_a_server(tmp_path, case):
    trace = rolling_trace(case.requests, window=3, prelude=case.prelude)
    with faulty_server(case.fault, **case.behaviour) as server:
        audit = audited(tmp_path / "run", trace, settings_for(server, **case.options))
    (finding,) = audit.findings
    assert finding.policy == "as-served"
    assert finding.seen == case.seen, finding.reasons
    assert {reason.code for reason in finding.reasons} >= case.reasons
    assert bool(finding.reasons) == (case.seen == "inconclusive")
    assert finding.own_losses == 0 or case.prelude or case.seen == "inconclusive"


def test_the_matrix_holds_every_fault_that_a_server_can_have():
    """Those that end an audit have tests of their own; a selection's rounding is nothing that a server shows."""
    assert {case.fault for case in MATRIX} == set(FAULTS) - {"crash", "stale-cache", "rounding"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "outcome"), [("none", "pass"), ("previous-request", "fail"), ("random", "inconclusive")]
)
def test_gates_decide_over_http_as_they_do_in_process(tmp_path, fault, outcome):
    with faulty_server(fault) as server:
        audit = audited(tmp_path / "run", rolling_trace(80, window=3), settings_for(server), Gates(max_variation=0.15))
    assert audit.verdict.outcome == outcome


def test_a_reset_that_the_server_says_it_did_not_do_ends_the_audit(tmp_path):
    with faulty_server("stale-cache") as server, pytest.raises(EngineError, match=r'not emptied.*"success":false'):
        replayed(tmp_path / "run", rolling_trace(3, window=3), settings_for(server))


def test_a_server_that_crashes_at_a_request_ends_the_audit(tmp_path):
    failures = dict.fromkeys(range(12, 100), broken)
    told = r"arm full-prefill.chronological.*did not answer, 2 times.*the crash"
    with faulty_server("none", failures=failures) as server, pytest.raises(EngineError, match=told):
        replayed(tmp_path / "run", rolling_trace(8, window=3), settings_for(server, retries="1"))


def broken():
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": "the crash"}}, 500)


def test_a_second_server_without_a_cache_is_the_reference(tmp_path):
    with faulty_server("position") as server, faulty_server("no-reuse", counters="timings") as reference:
        settings = settings_for(server, reference_url=reference.url)
        audit = audited(tmp_path / "run", rolling_trace(4, window=3), settings)
    assert audit.findings[0].seen == "history-sensitive"
    told = f"{reference.url}, which told no cached tokens of a repeated prompt"
    assert audit.manifest["engine"]["reference"] == told
    assert f"Full prefill: {told}" in "\n".join(headline(audit))
    assert not [body for body in server.bodies if "cache_salt" in body][1:]


def test_a_second_server_that_tells_nothing_leaves_the_audit_inconclusive(tmp_path):
    with faulty_server("none") as server, faulty_server("none", counters="nowhere") as reference:
        settings = settings_for(server, reference_url=reference.url)
        audit = audited(tmp_path / "run", rolling_trace(4, window=3), settings)
    assert "reference-unverified" in {reason.code for reason in audit.findings[0].reasons}


@pytest.mark.parametrize("counters", ["nowhere", "timings"])
def test_a_second_server_that_is_faster_the_second_time_has_a_cache(tmp_path, counters):
    """Also one that counts, and whose counts say nothing of that cache."""
    with (
        faulty_server("none") as server,
        faulty_server("none", counters=counters, slow_prefill=0.15, uncounted=True) as reference,
    ):
        settings = settings_for(server, reference_url=reference.url)
        with pytest.raises(EngineError, match=f"{reference.url} answers a known prompt sooner than a new one"):
            replayed(tmp_path / "run", rolling_trace(3, window=3), settings)


def test_the_second_server_is_described_and_watched(tmp_path):
    with faulty_server("none") as server, faulty_server("no-reuse", version="9", answers_as="x") as reference:
        engine = load("engines", "server")(settings_for(server, reference_url=reference.url))
        told = {name: value for name, value in engine.describe().items() if name.startswith("reference_")}
        engine.reset()
        reference.behaviour.version = "10"
        with pytest.raises(EngineError, match=f"at {reference.url} was changed: it was version 9.*, it is version 10"):
            engine.reset()
        engine.close()
    assert told == {
        "reference_answers_as": "x",
        "reference_system_fingerprint": None,
        "reference_version": "9",
        "reference_weights": "weights",
        "reference_differs": ["its version '9' and not '1.0'", "its name in answers 'x' and not 'm'"],
    }


def test_the_time_of_a_second_server_is_not_held_against_the_first(tmp_path):
    with faulty_server("none") as server, faulty_server("no-reuse") as reference:
        settings = settings_for(server, reference_url=reference.url)
        audit = audited(tmp_path / "run", rolling_trace(4, window=3), settings)
    figures = {(figure.metric, figure.policy) for figure in audit.figures}
    assert ("ttft_median", "as-served") in figures
    assert ("ttft_median", "full-prefill") not in figures
    assert "ttft_speedup" not in {metric for metric, _ in figures}


def test_salts_that_keep_nothing_apart_are_refused_as_a_reference(tmp_path):
    with faulty_server("none", salts=False) as server, pytest.raises(EngineError, match="different cache_salt apart"):
        replayed(tmp_path / "run", rolling_trace(3), settings_for(server, reference="salt"))
    with faulty_server("none", refuses=("cache_salt",)) as server, pytest.raises(EngineError, match="cache_salt apart"):
        replayed(tmp_path / "run", rolling_trace(3), settings_for(server, reference="salt"))


def test_what_was_used_stands_in_the_manifest(tmp_path):
    with faulty_server("none", refuses=("return_token_ids", "stream_options")) as server:
        audit = audited(tmp_path / "run", rolling_trace(3, window=3), settings_for(server))
    engine = audit.manifest["engine"]
    assert engine["fields_left_out"] == ["return_token_ids", "stream_options"]
    assert engine["cached_tokens_from"].startswith("nothing")
    assert engine["version"] == "1.0"
    assert engine["weights"] == "weights"
    assert engine["reset"] == f"vllm: POST {server.url.removesuffix('/v1')}/reset_prefix_cache"
    settings = audit.manifest["settings"]
    assert "switches" not in settings
    assert settings["options"]["base-url"] == server.url


def test_every_arm_begins_with_an_emptied_cache_and_the_probe_is_no_history(tmp_path):
    with faulty_server("none") as server:
        run = replayed(tmp_path / "run", rolling_trace(3, window=3), settings_for(server), orders=2)
    rows = run.table("observations").to_pylist()
    starts = [row for row in rows if row["position"] == 0 or row["control"] == "reset"]
    assert {row["cache_entries_before"] for row in starts} == {0}
    assert {row["first_reused_tokens"] for row in starts} == {0}
    assert server.resets == 2 * len(starts)
    assert all(row["attempts"] == 1 for row in rows)
    assert any(row["reused_tokens"] for row in rows)
    assert {row["reusable_tokens"] for row in rows} == {None}


def test_what_begins_every_prompt_is_no_history(tmp_path):
    """A trace that shares nothing, behind a template whose head is cached."""
    requests = [Request(f"r{n}", n, (segment("query", f"{n} is asked of by nobody else"),)) for n in range(4)]
    with faulty_server("none", head=20) as server:
        audit = audited(tmp_path / "run", Trace(tuple(requests), "d", "own.jsonl"), settings_for(server))
    assert {reason.code for reason in audit.findings[0].reasons} == {"nothing-reused"}


def test_a_server_that_is_started_anew_for_every_arm_is_known_as_one(tmp_path):
    with faulty_server("position") as server:
        url = server.url.replace("/v1", "/reset_prefix_cache")
        command = f"{sys.executable} -c \"import urllib.request as u; u.urlopen(u.Request('{url}', method='POST'))\""
        settings = settings_for(server, reset_command=command)
        del settings.options["reset"]
        audit = audited(tmp_path / "run", rolling_trace(4, window=3), settings)
    assert audit.manifest["engine"]["restarted"] is True
    assert "noise-possible" in {reason.code for reason in audit.findings[0].reasons}
    assert audit.findings[0].chance_of_reproducing == pytest.approx(1 / 15)


def two(request):
    return Trace((request, replace(request, request_id="b", ordinal=1)), "d", "two.jsonl")


def test_a_chat_stays_a_chat_and_its_extra_fields_go_with_it(tmp_path):
    segments = (segment("instruction", "Help.", role="system"), segment("query", "Hi?", role="user"))
    request = Request("a", 0, segments, chat=True, extra='{"drop_message":[1],"temperature":1}')
    with faulty_server("none") as server:
        replayed(tmp_path / "run", two(request), settings_for(server), orders=2)
    asked = [body for body in server.bodies if body.get("messages", [{}])[0].get("role") == "system"]
    assert asked[0] == {
        "drop_message": [1],
        "temperature": 0,
        "model": "m",
        "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hi?"}],
        "max_tokens": 16,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "seed": 0,
        "cache_salt": asked[0]["cache_salt"],
    }
    assert "cache_salt" not in asked[-1]
    salts = [body["cache_salt"] for body in server.bodies if "cache_salt" in body]
    assert len(salts) == len(set(salts)) > 4


def test_token_ids_of_a_trace_are_sent_as_they_are(tmp_path):
    request = Request("a", 0, (segment("query", "", token_ids=(72, 105)),), stop=("x",))
    with faulty_server("none") as server:
        run = replayed(tmp_path / "run", two(request), settings_for(server), orders=2)
    assert {tuple(body["prompt"]) for body in server.bodies if isinstance(body.get("prompt"), list)} == {(72, 105)}
    assert {tuple(body.get("stop", ())) for body in server.bodies} == {(), ("x",)}
    assert run.table("requests").to_pylist()[0]["prompt_tokens"] == 2


def test_a_finished_audit_is_not_replayed_and_a_changed_server_is_not_mixed_in(tmp_path):
    trace = rolling_trace(3, window=3)
    with faulty_server("none") as server:
        settings = settings_for(server)
        replayed(tmp_path / "run", trace, settings)
        asked = server.questions
        replayed(tmp_path / "run", trace, settings)
        assert server.questions == asked
        next((tmp_path / "run" / "observations").glob("*repeat*")).unlink()
        server.behaviour.version = "2.0"
        with pytest.raises(RunError, match=r"version was 1\.0, is 2\.0"):
            replayed(tmp_path / "run", trace, settings)


def test_a_server_takes_no_policies_and_other_engines_are_not_audited_as_served():
    with pytest.raises(UsageError, match="'server' takes no recomputation policy"):
        make_plan(3, "server", EngineSettings(), ("token-topk",), 3)
    assert make_plan(3, "server", EngineSettings(), ("as-served",), 3).policies == ("as-served",)


def test_concurrency_is_declared_and_leaves_full_prefill_and_resets_alone(tmp_path):
    """At most three at a time, in the order's order; what is served one at a time is that under any concurrency."""
    with faulty_server("none", slow_answers=0.02) as server:
        run = replayed(tmp_path / "run", rolling_trace(6, window=3), settings_for(server, concurrency="3"), orders=2)
        audit = analyse(run, Gates(), run.provenance)
    assert server.most_at_once == 3
    assert {server.at_once_when_salted} == {1}
    assert audit.manifest["engine"]["concurrency"] == 3
    assert "3 requests at a time, by which answers may differ too" in "\n".join(headline(audit))
    rows = [row for row in run.table("observations").to_pylist() if row["arm_id"] == "as-served.reversed"]
    assert [row["request_id"] for row in rows] == ["r5", "r4", "r3", "r2", "r1", "r0"]
    assert [row["position"] for row in rows] == list(range(6))


def test_an_error_under_concurrency_names_its_request_and_ends_the_arm(tmp_path):
    with faulty_server("none", failures=dict.fromkeys(range(35, 100), broken)) as server:
        settings = settings_for(server, concurrency="3", retries="0")
        with pytest.raises(
            EngineError, match=r"arm as-served\.chronological, request 'r[0-9]': the server at \S+ did not answer"
        ):
            replayed(tmp_path / "run", rolling_trace(8, window=3), settings, orders=2)


def test_concurrency_needs_counts_in_each_answer(tmp_path):
    with faulty_server("none", counters="metrics") as server, pytest.raises(UsageError, match="in /metrics alone"):
        replayed(tmp_path / "run", rolling_trace(3, window=3), settings_for(server, concurrency="2"))


def test_requests_that_had_to_be_sent_again_leave_the_arm_inconclusive(tmp_path):
    def too_many():
        from starlette.responses import JSONResponse

        return JSONResponse({"error": "too many requests"}, 429, headers={"retry-after": "0"})

    with faulty_server("none", failures={31: too_many}) as server:
        run = replayed(tmp_path / "run", rolling_trace(6, window=3), settings_for(server), orders=2)
        audit = analyse(run, Gates(), run.provenance)
    (arm,) = {row["arm_id"] for row in run.table("observations").to_pylist() if row["attempts"] == 2}
    assert arm == "as-served.chronological"
    (reason,) = audit.findings[0].reasons
    assert (reason.code, reason.count, reason.total, reason.names) == ("retried", 1, 6, (arm,))
    assert "1 of 6 requests had to be sent again" in headline(audit)[0]
