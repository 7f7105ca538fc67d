"""Every query of queries.sql, run by DuckDB inside a run folder, against numbers counted here from the tables."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import mean, median

import duckdb
import pytest
from audited_folders import damaged_run, finish
from fakes import rolling_trace

from kvaudit.schema.reference import queries

HEADED = re.compile(r"^-- name: (\S+)\n(.*?)(?=^-- name: |\Z)", re.MULTILINE | re.DOTALL)
QUERIES = dict(HEADED.findall(queries()))
FULL = "full-prefill.chronological"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trace = rolling_trace(90, window=3, prelude=True)
    run = damaged_run(tmp_path_factory.mktemp("queries") / "run", trace=trace, reproduces=False)
    finish(run)
    return run


class Tables:
    """The run's tables as rows, and what follows from the observations alone."""

    def __init__(self, run):
        names = ("requests", "observations", "selections", "provenance", "writes", "evictions", "summary")
        self.rows = {name: run.table(name).to_pylist() for name in names}
        self.seen = {(row["arm_id"], row["request_id"]): row for row in self.rows["observations"]}
        self.arms = {row["arm_id"]: row for row in self.rows["observations"]}
        self.requests = [row["request_id"] for row in self.rows["requests"]]

    def equal(self, left, right, request):
        """True, False, or None where an answer is missing."""
        a, b = self.seen[left, request], self.seen[right, request]
        if a["error"] or b["error"]:
            return None
        return (a["answer_ids"], a["answer_text"]) == (b["answer_ids"], b["answer_text"])

    def right(self, arm, request):
        return self.equal(FULL, arm, request)

    def audited(self, *controls):
        """Arms of policies, by id, under these controls; any without."""
        return [
            arm
            for arm, row in self.arms.items()
            if row["policy"] != "full-prefill" and (not controls or row["control"] in controls)
        ]

    def damaged(self, *controls):
        return [
            (arm, request)
            for arm in self.audited(*controls)
            for request in self.requests
            if self.right(arm, request) is False
        ]

    def summary(self, metric, *place):
        (value,) = [
            row["value"]
            for row in self.rows["summary"]
            if row["metric"] == metric and (row["policy"], row["order"], row["control"])[: len(place)] == place
        ]
        return value


@pytest.fixture(scope="module")
def tables(run):
    return Tables(run)


@pytest.fixture(scope="module")
def ask(run):
    """The rows of a query, run inside the folder."""

    def asked(name):
        with contextlib.chdir(run.path), duckdb.connect() as connection:
            found = connection.execute(QUERIES[name])
            columns = [column[0] for column in found.description]
            return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]

    return asked


def keyed(rows, *keys):
    made = {tuple(row[key] for key in keys): row for row in rows}
    assert len(made) == len(rows)
    return made


def test_every_query_has_a_name_and_says_what_it_answers():
    statements = duckdb.extract_statements(queries())
    assert len(QUERIES) == len(statements) == queries().count("-- name: ") == 15
    assert all(re.match(r"-- [A-Z].*\?", body.replace("\n-- ", " ")) for body in QUERIES.values())


def test_every_query_is_tested():
    """By a test that asks it, below."""
    asked = set(re.findall(r'ask\("([a-z-]+)"\)', Path(__file__).read_text()))
    assert asked == set(QUERIES)


def test_every_query_finds_something(ask):
    for name in QUERIES:
        assert ask(name), name


def test_all_of_them_run_as_one_script(run):
    with contextlib.chdir(run.path), duckdb.connect() as connection:
        connection.execute(queries())


def test_fidelity(ask, tables):
    found = keyed(ask("fidelity"), "policy", "order", "control")
    assert len(found) == len(tables.audited())
    for arm in tables.audited():
        place = tuple(tables.arms[arm][key] for key in ("policy", "order", "control"))
        judged = [right for request in tables.requests if (right := tables.right(arm, request)) is not None]
        assert (found[place]["requests"], found[place]["equal"]) == (len(judged), sum(judged))
        assert found[place]["fidelity"] == pytest.approx(sum(judged) / len(judged))
        assert found[place]["fidelity"] == pytest.approx(tables.summary("fidelity", *place))


def test_flipping_requests(ask, tables):
    found = keyed(ask("flipping-requests"), "policy", "request_id")
    policies = {tables.arms[arm]["policy"] for arm in tables.audited()}
    expected = {}
    for policy in policies:
        arms = [arm for arm in tables.audited("none") if tables.arms[arm]["policy"] == policy]
        for request in tables.requests:
            judged = [tables.equal(a, b, request) for a, b in combinations(arms, 2)]
            judged = [equal for equal in judged if equal is not None]
            if not all(judged):
                expected[policy, request] = (judged.count(False), len(judged), judged.count(False) / len(judged))
    assert {
        key: (row["differing_pairs"], row["compared_pairs"], row["variation"]) for key, row in found.items()
    } == expected
    for policy in policies:
        total = sum(row["variation"] for (name, _), row in found.items() if name == policy)
        assert total / len(tables.requests) == pytest.approx(tables.summary("answer_variation", policy))


def test_answers_of_one_request(ask, tables):
    found = ask("answers-of-one-request")
    pairs = defaultdict(int)
    for a, b in combinations(tables.audited("none"), 2):
        if tables.arms[a]["policy"] == tables.arms[b]["policy"]:
            for request in tables.requests:
                pairs[request] += tables.equal(a, b, request) is False
    worst = min(tables.requests, key=lambda request: (-pairs[request], request))
    arms = [arm for arm in tables.audited() if tables.right(arm, worst) is not None]
    expected = []
    for arm in arms:
        row = tables.seen[arm, worst]
        expected.append(
            {
                **{key: row[key] for key in ("request_id", "policy", "order", "control", "position")},
                "answer": row["answer_text"],
                "full_prefill": tables.seen[FULL, worst]["answer_text"],
                "equal": tables.right(arm, worst),
                "first_difference": row["first_difference"],
            }
        )
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_history_or_own_error(ask, tables):
    found = keyed(ask("history-or-own-error"), "policy")
    for policy in ("token-topk", "document-aligned"):
        judged = []
        for request in tables.requests:
            orders, resets = (
                [tables.right(arm, request) for arm in tables.audited(control) if tables.arms[arm]["policy"] == policy]
                for control in ("none", "reset")
            )
            if set(orders) != {None} and set(resets) != {None}:
                judged.append((False in orders, False in resets))
        row = found[(policy,)]
        assert row["requests"] == len(judged)
        assert row["damaged_by_history"] == judged.count((True, False)) > 0
        assert row["damaged_by_itself"] == judged.count((True, True)) + judged.count((False, True)) > 0


def test_controls(ask, tables):
    found = keyed(ask("controls"), "kind", "policy")
    assert set(found) == {("noise", "full-prefill")} | {
        (kind, policy) for kind in ("repeat", "rounding") for policy in ("token-topk", "document-aligned")
    }
    for (kind, policy), row in found.items():
        orders = ("chronological", "reversed") if kind == "rounding" else ("chronological",)
        control = "rounding" if kind == "rounding" else "repeat"
        pairs = [(f"{policy}.{order}", f"{policy}.{order}.{control}") for order in orders]
        found_equal = [tables.equal(*pair, request) for pair in pairs for request in tables.requests]
        judged = [equal for equal in found_equal if equal is not None]
        assert (row["requests"], row["differing"]) == (len(judged), judged.count(False))


def test_writers_behind_damage(ask, tables):
    found = keyed(ask("writers-behind-damage"), "arm_id", "request_id", "segment")
    damaged = set(tables.damaged())
    origins = [row for row in tables.rows["provenance"] if (row["arm_id"], row["request_id"]) in damaged]
    assert len(found) == len(origins)
    assert any(row["arm_id"].endswith(".reset") for row in origins)
    for origin in origins:
        row = found[origin["arm_id"], origin["request_id"], origin["segment"]]
        (write,) = [
            write
            for write in tables.rows["writes"]
            if (write["arm_id"], write["request_id"], write["part"], write["write_ordinal"])
            == (origin["arm_id"], origin["writer_request_id"], origin["writer_part"], origin["write_ordinal"])
        ]
        same = ("content_id", "writer_request_id", "writer_part", "old_position", "new_position")
        assert {key: row[key] for key in same} == {key: origin[key] for key in same}
        assert write["content_id"] == origin["content_id"]
        assert write["position"] == origin["old_position"]
        assert row["tokens"] == write["tokens"]
        assert row["entries_behind"] == len(write["computed_over"])
        assert row["same_context"] == (origin["context_hash_written"] == origin["context_hash_now"])
        assert row["policy"] == tables.arms[origin["arm_id"]]["policy"]


def test_most_damaging_writers(ask, tables):
    found = keyed(ask("most-damaging-writers"), "policy", "writer_request_id")
    reusers = defaultdict(set)
    for row in tables.rows["provenance"]:
        if row["arm_id"] in tables.audited("none") and row["writer_request_id"] != row["request_id"]:
            place = tables.arms[row["arm_id"]]["policy"], row["writer_request_id"]
            reusers[place].add((row["arm_id"], row["request_id"]))
    expected = {}
    for place, answers in reusers.items():
        judged = [right for answer in answers if (right := tables.right(*answer)) is not None]
        if False in judged:
            expected[place] = (judged.count(False), len(judged), pytest.approx(judged.count(False) / len(judged)))
    assert {
        place: (row["damaged_answers"], row["answers"], row["damage_rate"]) for place, row in found.items()
    } == expected


def test_chain_of_contamination(ask, tables):
    found = ask("chain-of-contamination")
    (place,) = {(row["arm_id"], row["request_id"]) for row in found}
    assert place in tables.damaged("none")
    over = {row["write_ordinal"]: row for row in tables.rows["writes"] if row["arm_id"] == place[0]}
    origins = [row for row in tables.rows["provenance"] if (row["arm_id"], row["request_id"]) == place]
    steps, front = {}, {row["write_ordinal"] for row in origins}
    for step in range(17):
        for ordinal in front:
            steps.setdefault(ordinal, step)
        front = {below for ordinal in front for below in over[ordinal]["computed_over"]}
    assert {row["write_ordinal"]: row["steps"] for row in found} == steps
    assert 16 > max(steps.values()) > 1
    behind = defaultdict(int)
    entries = {(row["arm_id"], row["write_ordinal"]): row for row in tables.rows["writes"]}
    for row in tables.rows["provenance"]:
        if (row["arm_id"], row["request_id"]) in tables.damaged("none"):
            written = entries[row["arm_id"], row["write_ordinal"]]
            behind[row["arm_id"], row["request_id"]] += len(written["computed_over"])
    assert place == min(behind, key=lambda place: (-behind[place], place))
    for row in found:
        write = over[row["write_ordinal"]]
        assert (row["writer_request_id"], row["writer_part"]) == (write["request_id"], write["part"])
        assert (row["content_id"], row["position"]) == (write["content_id"], write["position"])


def test_reuse_by_position(ask, tables):
    found = keyed(ask("reuse-by-position"), "policy", "tenth")
    bins = defaultdict(list)
    for arm in tables.audited("none"):
        for request in tables.requests:
            if tables.right(arm, request) is not None:
                row = tables.seen[arm, request]
                tenth = 1 + 10 * row["position"] // len(tables.requests)
                bins[row["policy"], tenth].append((row, tables.right(arm, request)))
    assert set(found) == set(bins)
    assert {tenth for _, tenth in found} == set(range(1, 11))
    for place, answers in bins.items():
        assert found[place]["answers"] == len(answers)
        assert found[place]["fidelity"] == pytest.approx(mean(right for _, right in answers))
        reused, prompt = (sum(row[name] for row, _ in answers) for name in ("reused_tokens", "prompt_tokens"))
        assert found[place]["reuse_share"] == pytest.approx(reused / prompt)


def test_ttft_speedup(ask, tables):
    found = keyed(ask("ttft-speedup"), "policy")
    for policy in ("full-prefill", "token-topk", "document-aligned"):
        ratios = defaultdict(list)
        for (_, request), row in tables.seen.items():
            full = tables.seen[FULL, request]
            warm = row["position"] > 0 and full["position"] > 0
            timed = row["ttft_ms"] is not None and full["ttft_ms"] is not None
            if (row["policy"], row["control"]) == (policy, "none") and warm and timed:
                ratios[request].append(full["ttft_ms"] / row["ttft_ms"])
        speedup = median(median(known) for known in ratios.values())
        assert found[(policy,)]["requests"] == len(ratios) < len(tables.requests)
        assert found[(policy,)]["speedup"] == pytest.approx(speedup)
        assert found[(policy,)]["speedup"] == pytest.approx(tables.summary("ttft_speedup", policy))


def test_evictions_before_damage(ask, tables):
    found = keyed(ask("evictions-before-damage"), "policy", "order", "request_id")
    segments = {row["request_id"]: {part["content_id"] for part in row["segments"]} for row in tables.rows["requests"]}
    assert len(found) == len(tables.damaged("none"))
    for arm, request in tables.damaged("none"):
        served = tables.seen[arm, request]
        earlier = [
            row
            for row in tables.rows["evictions"]
            if row["arm_id"] == arm and tables.seen[arm, row["request_id"]]["position"] < served["position"]
        ]
        row = found[served["policy"], served["order"], request]
        assert row["position"] == served["position"]
        assert row["evictions_before"] == len(earlier)
        assert row["own_evictions"] == sum(evicted["content_id"] in segments[request] for evicted in earlier)
    assert any(row["own_evictions"] for row in found.values())
    assert any(not row["own_evictions"] for row in found.values())


def test_margins_of_flips(ask, tables):
    found = keyed(ask("margins-of-flips"), "policy", "order", "request_id")
    flipping = set()
    for a, b in combinations(tables.audited("none"), 2):
        if tables.arms[a]["policy"] == tables.arms[b]["policy"]:
            flipping |= {(tables.arms[a]["policy"], r) for r in tables.requests if tables.equal(a, b, r) is False}
    wrong = [place for place in tables.damaged("none") if (tables.arms[place[0]]["policy"], place[1]) in flipping]
    assert len(found) == len(wrong)
    for place in wrong:
        served = tables.seen[place]
        row = found[served["policy"], served["order"], served["request_id"]]
        assert (row["first_difference"], row["margin"]) == (served["first_difference"], served["margin"])
        assert row["odds"] == pytest.approx(math.exp(served["margin"]))
        assert row["edit_distance"] > 0


def test_selections_against_fidelity(ask, tables):
    found = keyed(ask("selections-against-fidelity"), "policy", "order", "control")
    chosen = {(row["arm_id"], row["request_id"]): row for row in tables.rows["selections"]}
    for arm in tables.audited():
        place = tuple(tables.arms[arm][key] for key in ("policy", "order", "control"))
        judged = [request for request in tables.requests if tables.right(arm, request) is not None]
        rows = [chosen[arm, request] for request in judged if (arm, request) in chosen]
        captured = [sum(span["deviation"] for span in row["spans"]) / row["total_deviation"] for row in rows]
        assert found[place]["requests"] == len(judged)
        assert found[place]["fragmentation"] == median(len(row["spans"]) for row in rows)
        assert found[place]["captured_deviation"] == pytest.approx(median(captured))
        assert found[place]["fidelity"] == pytest.approx(mean(tables.right(arm, request) for request in judged))


def test_damage_short_of_a_flip(ask, tables):
    found = keyed(ask("damage-short-of-a-flip"), "policy", "order", "control")
    assert len(found) == len(tables.audited("none", "reset"))
    for arm in tables.audited("none", "reset"):
        place = tuple(tables.arms[arm][key] for key in ("policy", "order", "control"))
        rows = [tables.seen[arm, request] for request in tables.requests]
        known = [row["kl"] for row in rows if row["kl"] is not None]
        row = found[place]
        assert (row["requests"], row["kl_largest"]) == (len(known), max(known))
        assert row["kl_mean"] == pytest.approx(mean(known)) == tables.summary("kl_mean", *place)
        assert row["kl_median"] == pytest.approx(median(known)) == tables.summary("kl_median", *place)
        assert row["reference_logprob_mean"] == pytest.approx(mean(row["reference_logprob"] for row in rows))


def test_significant_differences(ask, tables):
    found = ask("significant-differences")
    expected = [row for row in tables.rows["summary"] if row["p_adjusted"] is not None and row["p_adjusted"] < 0.05]
    kept = list(found[0])
    assert sorted(found, key=str) == sorted(({key: row[key] for key in kept} for row in expected), key=str)
