"""How many tokens came from a cache: what a usage may say, and what begins every prompt and is none of the history."""

import sys
from types import SimpleNamespace

import pytest
from faulty_server import faulty_server
from starlette.responses import JSONResponse

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.engines.server.probing import Probe
from kvaudit.errors import EngineError
from kvaudit.policies.as_served import AsServed
from kvaudit.records import Prompt, PromptSegment, Sampling, Wording

HEAD = 9
"""Tokens: a text's beginning, and the head of a chat's template."""


@pytest.fixture
def opened():
    engines = []

    def open_one(server, **options):
        given = {"base-url": server.url, **(options or {"reset": "vllm"})}
        engines.append(open_engine(EngineSettings(model="m", options=given)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def by_command(server):
    url = server.url.replace("/v1", "/reset_prefix_cache")
    call = f"import urllib.request as u; u.urlopen(u.Request('{url}', method='POST'))"
    return {"reset-command": f'{sys.executable} -c "{call}"', "reference": "reset"}


def reused(engine, name, policy=None):
    text = f"document {name}, which is longer than the head"
    segments = (PromptSegment("document", "0" * 16, 0, len(text)),)
    prompt = Prompt((), segments, Wording(text=text))
    return engine.serve("r", "request", prompt, Sampling(2), policy).reused_tokens


@pytest.mark.parametrize("warms_up", [False, True])
def test_what_begins_every_prompt_is_no_leftover_behind_a_command(opened, warms_up):
    """The probe brings it into a cache of single tokens, and so does the server's own prompt when it starts."""
    with faulty_server(head=HEAD, warms_up=warms_up) as server:
        engine = opened(server, **by_command(server))
        assert engine.reset().entries == 0
        assert [reused(engine, text, AsServed()) for text in ("one", "two", "six", "two")] == [0, 0, 0, HEAD + 43]
        asked = server.questions
        assert reused(engine, "three") == 0
        assert server.questions - asked == 3


@pytest.mark.parametrize("options", [{"reset": "vllm"}, None])
@pytest.mark.parametrize("head", [0, HEAD, 1_000, 3_500])
def test_a_reset_that_clears_nothing_is_seen_whatever_begins_every_prompt(opened, head, options, capsys):
    with faulty_server("hidden-stale-cache", head=head) as server:
        engine = opened(server, **(options or by_command(server)))
        assert [engine.reset().entries for _ in range(2)] == [1, 1]
    assert capsys.readouterr().err.count("still cached after the cache was emptied") == 1


def test_what_a_first_prompt_shares_beyond_that_is_told(opened):
    with faulty_server(head=HEAD) as server:
        engine = opened(server, **by_command(server))
        engine.reset()
        server.behaviour.head = HEAD + 1
        assert reused(engine, "one", AsServed()) == HEAD + 1


def test_what_begins_every_prompt_is_no_leftover_behind_a_reset_that_is_done_twice(opened):
    """A server that warms up brings it into the cache again."""
    with faulty_server(head=HEAD, warms_up=True) as server:
        engine = opened(server)
        assert engine.reset().entries == 0
        assert [reused(engine, text, AsServed()) for text in ("one", "two")] == [0, 0]


@pytest.mark.parametrize(
    ("tells", "count"),
    [(int, 43), (str, 43), (float, 43), (lambda n: n + 0.5, None), (lambda n: "many", None), (lambda n: True, None)],
)
def test_a_count_that_cannot_be_read_is_none(opened, tells, count):
    with faulty_server() as server:
        engine = opened(server)
        engine.reset()
        server.behaviour.tells = tells
        told = [reused(engine, "ten", AsServed()) for _ in range(2)]
    assert told == [0, count]


@pytest.mark.parametrize(
    ("usage", "count"),
    [
        ({"prompt_tokens": 3}, 0),
        ({"prompt_tokens": 3, "prompt_tokens_details": None}, 0),
        ({"prompt_tokens": 3, "prompt_tokens_details": {}}, 0),
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": None}}, 0),
        ({"prompt_tokens": 3, "prompt_tokens_details": "none"}, None),
        ({"completion_tokens": 1}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_usage_without_a_count_is_zero_and_no_usage_is_unknown(opened, usage, count):
    choice = {"index": 0, "text": "ok", "finish_reason": "stop"}
    with faulty_server() as server:
        engine = opened(server)
        body = {"model": "m", "choices": [choice], "usage": usage}
        server.behaviour.failures[server.questions] = lambda: JSONResponse(body)
        assert reused(engine, "one", AsServed()) == count


def test_a_counter_of_cached_tokens_that_falls_is_a_restart(opened):
    with faulty_server(counters="metrics", bare_metrics=True) as server:
        engine = opened(server)
        engine.reset()
        reused(engine, "one", AsServed())
        server.cached_total = 0
        with pytest.raises(EngineError, match="restarted in the middle of an arm"):
            reused(engine, "two", AsServed())


def test_what_begins_every_prompt_is_learnt_before_any_reset(opened):
    """Later a reset's leftovers would pass for it."""
    with faulty_server(head=HEAD, warms_up=True) as server:
        engine = opened(server)
        assert engine.reset().entries == 0
        server.behaviour.head = HEAD + 1
        assert engine.reset().entries == 1


@pytest.mark.parametrize(("head", "entries"), [(1_000, 0), (3_500, 1)])
@pytest.mark.parametrize("options", [{"reset": "vllm"}, None])
def test_a_long_head_begins_long_prompts_and_what_is_more_than_half_of_those_begins_none(
    opened, head, entries, options
):
    with faulty_server(head=head, warms_up=True) as server:
        engine = opened(server, **(options or by_command(server)))
        assert engine.reset().entries == entries


def test_a_leftover_that_one_prompt_shows_is_one_whatever_the_others_tell():
    answers = iter([1.0, None, 1.0])
    reply = SimpleNamespace(ttft_ms=1.0)
    target = SimpleNamespace(ask=lambda *asked: SimpleNamespace(cached=next(answers), reply=reply))
    probe = Probe(target, chat=False, lines=20, kept=0)
    probe._witnesses += [probe.new(), probe.new()]
    assert probe.is_cached() is True
