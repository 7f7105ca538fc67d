"""Another server as the reference: what it says of itself, and whether it was seen to reuse nothing."""

import pytest
from faulty_server import faulty_server

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.engines.server.identity import Identity, same_address
from kvaudit.engines.server.metrics import read_metrics
from kvaudit.errors import EngineError, UsageError
from kvaudit.records import Prompt, PromptSegment, Sampling, Wording


def opened(server, reference_url):
    given = {"base-url": server.url, "reset": "vllm", "reference-url": reference_url}
    return open_engine(EngineSettings(model="m", options=given))


def described(**behaviour):
    with faulty_server() as server, faulty_server("no-reuse", **{"counters": "timings", **behaviour}) as reference:
        engine = opened(server, reference.url)
        told = engine.describe()
        engine.close()
    return {**told, "reference": told["reference"].replace(reference.url, "URL")}


def full_prefill(engine):
    wording = Wording(text="one")
    return engine.serve("r", "request", Prompt((), (PromptSegment("document", "0", 0, 3),), wording), Sampling(2), None)


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"version": "9"}, ", its version '9' and not '1.0'"),
        ({"answers_as": "x"}, ", its name in answers 'x' and not 'm'"),
        ({"root": "/models/weights"}, ", its weights '/models/weights' and not 'weights'"),
        ({"root": "/mnt/models"}, ", its weights '/mnt/models' and not 'weights'"),
        ({"root": None}, ""),
        ({"root": None, "loaded": "other"}, ", its weights 'other' and not 'weights'"),
        ({"root": "m", "loaded": "/models/weights"}, ", its weights '/models/weights' and not 'weights'"),
        ({}, ""),
    ],
)
def test_what_differs_is_named(behaviour, told):
    facts = described(**behaviour)
    assert facts["reference"] == f"URL, which told no cached tokens of a repeated prompt{told}"
    assert facts["reference_differs"] == ([told.removeprefix(", ")] if told else None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://gpu:8000/v1", "http://GPU:8000/v1/", True),
        ("http://localhost:8000/v1", "http://127.0.0.1:8000/v1", True),
        ("http://[::1]:8000/v1", "http://localhost:8000/v1", True),
        ("http://gpu/v1", "http://gpu:80/v1", True),
        ("http://gpu:8000/v1", "http://gpu:8001/v1", False),
        ("http://gpu:8000/a/v1", "http://gpu:8000/b/v1", False),
        ("http://gpu:8000/v1", "http://cpu:8000/v1", False),
    ],
)
def test_an_address_is_host_port_and_path(one, other, same):
    assert same_address(one, other) == same


def test_the_server_under_audit_is_no_reference():
    with faulty_server() as server, pytest.raises(UsageError, match="--reference-url is the server under audit"):
        opened(server, server.url.replace("127.0.0.1", "localhost"))
    assert server.questions == 0


def test_a_reference_that_serves_a_known_prompt_from_a_cache_is_refused():
    with faulty_server() as server, faulty_server() as reference:
        told = rf"{reference.url} was to give full prefill, and took \d+ tokens of a known prompt from a cache"
        with pytest.raises(EngineError, match=told):
            opened(server, reference.url)


def test_a_reference_that_makes_other_tokens_of_a_prompt_is_refused():
    with faulty_server() as server, faulty_server("no-reuse", template=5) as reference:
        told = rf"--reference-url {reference.url} makes (\d+) tokens of a prompt, and the server under audit (\d+)"
        with pytest.raises(EngineError, match=told) as refused:
            opened(server, reference.url)
    assert "the same chat template" in refused.value.hint


def test_a_reference_that_tells_neither_by_counts_nor_by_times_is_unverified():
    """A gateway without usage before a server with a cache looks the same."""
    with faulty_server() as server, faulty_server("none", counters="nowhere") as reference:
        engine = opened(server, reference.url)
        assert full_prefill(engine).reused_tokens is None
        told = engine.describe()["reference"]
        assert told.startswith(f"{reference.url}, which does not tell what it reuses (/metrics would")
        engine.close()


def test_a_reference_that_counts_is_verified():
    with faulty_server() as server, faulty_server("no-reuse", counters="metrics") as reference:
        engine = opened(server, reference.url)
        assert full_prefill(engine).reused_tokens == 0
        engine.close()


def test_sglang_tells_no_cached_tokens_before_the_first_one():
    assert read_metrics("sglang:num_requests_total 3\n").cached_tokens == 0
    assert read_metrics("vllm:request_success_total 3\n").cached_tokens is None


def test_what_a_server_loaded_is_no_adapter_and_no_model_that_it_does_not_list():
    told = Identity(None, {"m": "m", "adapter": "/adapters/a", "untold": None}, "/models/b")
    names = ("m", "adapter", "untold", "other")
    assert [told.weights(name) for name in names] == ["/models/b", "/adapters/a", "/models/b", None]
    assert told.facts("other")["weights"] == "not served"


def test_weights_that_are_not_told_are_none_and_the_model_stays_listed():
    told = Identity(None, {"m": None})
    assert told.weights("m") is None
    assert told.facts("m")["weights"] == "m"
    assert Identity(None, {}).facts("m")["weights"] is None
