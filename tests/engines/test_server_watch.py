"""What a server's own counters show: restarts and somebody else's requests, also where they lag behind the answers."""

from types import SimpleNamespace

import pytest
from faulty_server import faulty_server

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine, watching
from kvaudit.engines.server.metrics import read_metrics
from kvaudit.engines.server.watching import Watch
from kvaudit.errors import EngineError


class Counting:
    """Counts what it has answered when it is told to."""

    def __init__(self):
        self.counted, self.started = 0, 1_000.0

    def found(self, path):
        return f"vllm:request_success_total {self.counted}\nprocess_start_time_seconds {self.started}\n"

    def root(self, path):
        return path

    def call(self, method, url, seconds):
        """Each look later, one more is counted."""
        self.counted += 1
        return 200, self.found(url)


@pytest.fixture
def server():
    return Counting()


@pytest.fixture
def watch(server):
    watch = Watch(server)
    watch.begin()
    return watch


def test_requests_that_are_counted_late_are_nobody_elses(server, watch):
    watch.sending()
    watch.sending()
    server.counted = 1
    watch.begin()
    watch.sending()
    server.counted = 3
    watch.check()
    server.counted = 4
    with pytest.raises(EngineError, match=r"answered 3 requests, and 2 were ours: somebody else's"):
        watch.check()


@pytest.mark.parametrize(("counted", "restarts"), [(1, False), (0, True)], ids=["counted", "restarted"])
def test_what_was_counted_or_never_will_be_is_not_waited_for(server, watch, counted, restarts):
    watch.sending()
    server.counted = counted
    server.started += 60 * restarts
    watch.begin()
    server.counted += 1
    with pytest.raises(EngineError, match=r"answered 1 requests, and 0 were ours"):
        watch.check()


def test_whoever_watches_next_finds_all_counted(server, watch):
    watch.sending()
    watch.sending()
    watch.end()
    assert server.counted == 2


def test_an_engine_that_is_closed_leaves_nothing_uncounted(monkeypatch):
    """A replay opens the server once for each policy."""
    with faulty_server() as one, faulty_server("no-reuse") as other:
        options = {"base-url": one.url, "reset": "vllm", "reference-url": other.url}
        engine = open_engine(EngineSettings(model="m", options=options))
        ended = []
        monkeypatch.setattr(Watch, "end", lambda watch: ended.append(watch.connection.base_url))
        engine.close()
        assert ended == [one.url, other.url]


def test_what_is_never_counted_is_not_waited_for_long(server, watch, monkeypatch):
    monkeypatch.setattr(watching, "_SETTLING_SECONDS", 0.05)
    monkeypatch.setattr(server, "call", lambda method, url, seconds: (200, server.found(url)))
    watch.sending()
    watch.end()
    monkeypatch.setattr(server, "call", lambda method, url, seconds: (404, "Not Found"))
    watch.end()


def test_what_is_no_number_is_passed_over():
    page = read_metrics(
        'vllm:prefix_cache_hits_total{engine="0"} 7\nvllm:prefix_cache_hits_total{engine="1"} NaN\n'
        "vllm:request_success_total +Inf\nprocess_start_time_seconds NaN\nllamacpp:prompt_tokens_total 1e308\n"
    )
    assert page.values == {"vllm:prefix_cache_hits_total": 7.0}


def test_a_start_time_that_is_no_number_is_no_restart():
    watch = Watch(SimpleNamespace(found=lambda path: "process_start_time_seconds NaN\nvllm:request_success_total 1\n"))
    watch.begin()
    watch.check()
