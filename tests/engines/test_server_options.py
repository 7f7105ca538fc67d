"""What can be asked of the engine, what of it is kept, and what a server's counters say."""

import math
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.digests import digested
from kvaudit.engines import EngineSettings
from kvaudit.engines.server.asking import Manner
from kvaudit.engines.server.counters import Counts, way_of
from kvaudit.engines.server.metrics import read_metrics
from kvaudit.engines.server.options import OPTIONS, read_options
from kvaudit.engines.server.presets import PRESETS
from kvaudit.engines.server.resetting import Resetter
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import UsageError
from kvaudit.plan import make_plan
from kvaudit.records import Sampling, Wording
from kvaudit.traces import read_trace
from kvaudit.wordings import Wordings

URL = "http://gpu:8000/v1"


def options(**given):
    return read_options({"base-url": URL, "reset": "vllm"} | {name.replace("_", "-"): v for name, v in given.items()})


def test_what_is_not_given_has_its_documented_value():
    read = options()
    assert (read.timeout, read.retries, read.patience, read.key_variable) == (300.0, 3, 120.0, "KVAUDIT_API_KEY")
    assert (read.api, read.reference, read.authority) == ("auto", "auto", None)
    assert set(OPTIONS) >= {"base-url", "reset", "retries"}


def test_a_second_url_is_the_reference():
    assert options(reference_url="https://b/v1/").reference == "url"
    assert options(reference_url="https://b/v1/").reference_url == "https://b/v1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nonsense": "1"}, "no option 'nonsense'"),
        ({"base_url": ""}, "needs the address of a server"),
        ({"base_url": "gpu:8000"}, "--base-url 'gpu:8000' is not the address"),
        ({"base_url": "ftp://gpu/v1"}, "is not the address"),
        ({"base_url": "http://gpu:99999/v1"}, "is not the address"),
        ({"base_url": "http://u:p@gpu/v1"}, "--base-url holds a password"),
        ({"base_url": "http://gpu/v1?key=x"}, "has more than a path"),
        ({"api": "responses"}, "--api is 'responses'"),
        ({"reference": "trust"}, "--reference is 'trust'"),
        ({"reference": "url"}, "--reference url needs another server"),
        ({"reference": "salt", "reference_url": URL}, "two ways to the same answers"),
        ({"reset": ""}, "nothing says how this server's is emptied"),
        ({"reset": "tgi"}, "unknown --reset 'tgi'"),
        ({"reset_command": "true"}, "--reset and --reset-command are two ways"),
        ({"reset_url": URL}, "--reset and --reset-url are two ways"),
        ({"reset_body": "{}"}, "--reset-body says how --reset-url is called, and --reset calls by itself"),
        ({"reset_method": "GET"}, "--reset-method says how --reset-url is called, and --reset calls by itself"),
        ({"reset": "", "reset_command": "true", "reset_method": "GET"}, "and --reset-command calls by itself"),
        (
            {"reset": "", "reset_url": "http://b/${KVAUDIT_NOT_SET}"},
            "--reset-url names $KVAUDIT_NOT_SET, which is not set",
        ),
        ({"reset": "lmcache", "reset_url": "http://b", "reset_body": "{}"}, "--reset-body says how"),
        ({"reset": "lmcache", "reset_url": "http://b?x=1"}, "--reset-url has more than a path"),
        ({"other_key_env": "OTHER"}, "--other-key-env is the key of another server, and there is none"),
        ({"reset": "", "reset_url": URL, "reset_method": "FLUSH"}, "--reset-method is 'FLUSH'"),
        ({"timeout": "0"}, "--timeout is '0'"),
        ({"timeout": "soon"}, "--timeout is 'soon'"),
        ({"patience": "inf"}, "--patience is 'inf'"),
        ({"retries": "-1"}, "--retries is '-1'"),
        ({"retries": "1000"}, "--retries is '1000'"),
        ({"concurrency": "0"}, "--concurrency is '0', no whole number from 1 to 100"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, said):
    with pytest.raises(UsageError) as error:
        options(**given)
    assert said in error.value.message


def resetter(**given):
    import ssl

    connection = Connection(URL, None, ssl.create_default_context(), 1.0)
    connection.close()
    return Resetter(options(**given), connection).described()


def test_an_address_that_is_no_address_is_not_repeated_with_its_query():
    with pytest.raises(UsageError) as error:
        options(base_url="http://gpu/v1?key=sk-mine")
    assert "sk-mine" not in str(error.value)


DRAWN = "sk-proj-abcDEF0123456789xyzABC"


@pytest.mark.parametrize(
    "address",
    [
        DRAWN,
        "htp://user:hunter2@gpu/v1",
        "htp://hunter2@gpu/v1",
        f"htp://{DRAWN}/v1",
        "gpu:8000/v1?api_key=hunter2",
        f"http:/{DRAWN}/v1",
        "http://[bad/v1?x=hunter2",
        "https:hunter2",
        "hunter2",
    ],
)
@pytest.mark.parametrize("name", ["base_url", "reference_url", "reset_url"])
def test_what_is_no_address_is_not_repeated(name, address):
    with pytest.raises(UsageError, match="is not the address of a server") as error:
        options(reset="", **{"reset_url": URL, name: address})
    assert not [secret for secret in (DRAWN, "hunter2") if secret in str(error.value)]


@pytest.mark.parametrize("name", ["api_key_env", "other_key_env"])
@pytest.mark.parametrize("key", [DRAWN, "abcDEF0123456789xyzABC012", "two words", "$KEY", ""])
def test_a_key_in_place_of_its_variable_is_refused_unseen(name, key):
    with pytest.raises(UsageError, match="is not the name of an environment variable") as error:
        options(reference_url=URL, **{name: key})
    assert not key or key not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"reset_command": "bash -c 'vllm serve m --api-key hunter2'"},
        {"reset_command": "curl -uadmin:hunter2 http://gpu/flush"},
        {"reset_command": "export TOKEN=hunter2; ./reset"},
        {"reset_url": "http://admin:hunter2@gpu/flush"},
        {"reset_url": "http://gpu/flush?pw=hunter2"},
        {"reset_url": URL, "reset_body": '{"password": "$ecret-hunter2"}'},
    ],
)
def test_what_may_hold_a_key_is_kept_as_a_digest_which_tells_whether_it_is_the_same(given):
    def kept(given):
        settings = EngineSettings(options={name.replace("_", "-"): value for name, value in given.items()})
        return make_plan(3, "server", settings, (), 2).as_data()["options"]

    changed = {name: value.replace("hunter2", "hunter3") for name, value in given.items()}
    assert "hunter2" not in repr(kept(given)) + resetter(reset="", **given)
    assert "(sha256 " in resetter(reset="", **given) or "reset_body" in given
    assert kept(given) == kept(dict(given)) != kept(changed)


def test_what_no_reset_needs_secret_is_kept_in_clear():
    assert digested("http://gpu:8000/flush/") == "http://gpu:8000/flush/"
    assert re.fullmatch(r"http://gpu/flush \(sha256 [0-9a-f]{16}\)", digested("http://u:p@gpu/flush?all=1"))
    assert re.fullmatch(r"sha256 [0-9a-f]{16}", digested("docker restart vllm"))
    assert digested("") == ""


def test_the_address_of_a_reset_is_called_as_it_is_written():
    for url in ("http://b/flush/", "http://b/clear?path=a/"):
        assert options(reset="", reset_url=url).reset_url == url
    assert resetter(reset="lmcache", reset_url="http://b:7001/").startswith("lmcache: DELETE http://b:7001/cache/")


def test_every_preset_says_what_it_does():
    told = {name: resetter(reset=name) for name in PRESETS}
    assert told == {
        "vllm": "vllm: POST http://gpu:8000/reset_prefix_cache",
        "vllm+connector": "vllm+connector: POST http://gpu:8000/reset_prefix_cache?reset_external=true",
        "sglang": "sglang: POST http://gpu:8000/flush_cache",
        "llamacpp": "llamacpp: POST http://gpu:8000/slots/{slot}?action=erase",
        "lmcache": "lmcache: DELETE http://gpu:7000/cache/clear, POST http://gpu:8000/reset_prefix_cache",
        "akv": "akv: POST http://gpu:8000/flush_cache",
    }
    assert resetter(reset="lmcache", reset_url="http://b:7001").startswith("lmcache: DELETE http://b:7001/cache/clear,")
    assert resetter(reset="", reset_url="http://b/clear", reset_method="put") == "PUT http://b/clear"
    assert resetter(reset="", reset_command="true") == "command (sha256 b5bea41b6c623f7c)"


# Counters

PAGE = """\
# HELP vllm:prefix_cache_hits_total Cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="a} b"} 48.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 16
vllm:external_prefix_cache_hits_total 4 1700000000000
vllm:request_success_total{finished_reason="stop"} 2
vllm:request_success_total{finished_reason="length"} 3
process_start_time_seconds 1.7e+09
a line that is none
broken{x="y"} many
"""


def test_counters_are_summed_over_labels_and_kinds_of_cache():
    page = read_metrics(PAGE)
    assert (page.cached_tokens, page.requests, page.started) == (68.0, 5.0, 1.7e9)
    nothing = read_metrics("")
    assert (nothing.cached_tokens, nothing.requests, nothing.started) == (None, None, None)
    assert read_metrics("sglang:cached_tokens_total 7\n").cached_tokens == 7.0
    assert read_metrics("llamacpp:prompt_tokens_cached_total 7\n").cached_tokens == 7.0


@given(st.text())
def test_any_page_can_be_read(text):
    assert all(math.isfinite(value) for value in read_metrics(text).values.values())


@pytest.mark.parametrize(
    ("cold", "warm", "way"),
    [
        ((0, None, None), (48, None, None), "usage"),
        ((None, None, None), (48, None, None), "usage"),
        ((None, 0, None), (None, 48, None), "timings"),
        ((0, None, 0), (0, None, 48), "metrics"),
        ((0, None, None), (0, None, None), "usage"),
        ((None, None, 0), (None, None, 0), "metrics"),
        ((None, None, None), (None, None, None), None),
    ],
)
def test_the_way_that_saw_the_second_serve_counts(cold, warm, way):
    assert way_of(Counts(*cold), Counts(*warm)) == way


# The body


def body(wording, api="auto", **given):
    import orjson

    path, sent = Manner("m", api, 7).without("return_token_ids", "stream_options").question(wording, **given)
    return path, orjson.loads(sent)


def test_a_prompt_is_asked_for_greedily_and_with_a_seed():
    path, sent = body(Wording(text="Once"), sampling=Sampling(4, ("\n",)))
    assert path == "/completions"
    assert sent == {
        "model": "m",
        "prompt": "Once",
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stop": ["\n"],
        "seed": 7,
    }


def test_a_text_becomes_a_message_where_only_chats_are_offered():
    path, sent = body(Wording(text="Once"), api="chat", sampling=Sampling(4))
    assert (path, sent["messages"]) == ("/chat/completions", [{"role": "user", "content": "Once"}])
    assert "prompt" not in sent


def test_extra_fields_never_replace_what_an_audit_sets():
    extra = '{"cache_salt":"tenant","temperature":1,"model":"x","stream":false,"reposition":true}'
    _, sent = body(Wording(text="Once", extra=extra), sampling=Sampling(4))
    assert (sent["cache_salt"], sent["reposition"], sent["temperature"], sent["model"]) == ("tenant", True, 0, "m")
    assert sent["stream"] is True
    _, salted = body(Wording(text="Once", extra=extra), sampling=Sampling(4), salt="own")
    assert salted["cache_salt"] == "own"


def test_tools_that_a_trace_carries_are_sent_beside_its_messages(tmp_path):
    tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    line = {
        "request": "a",
        "chat": True,
        "segments": [{"kind": "query", "text": "Hi", "role": "user"}],
        "extra": {"tools": tools, "tool_choice": "auto"},
    }
    path = tmp_path / "t.jsonl"
    path.write_bytes(orjson.dumps(line) + b"\n")
    (request,) = read_trace(path).requests
    _, sent = body(Wordings().request(request).wording, sampling=Sampling(4))
    assert (sent["tools"], sent["tool_choice"]) == (tools, "auto")
    assert sent["messages"] == [{"role": "user", "content": "Hi"}]
