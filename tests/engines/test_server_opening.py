"""How a server is asked is found out by asking; what is said where it takes nothing is what really stopped it."""

import pytest
from faulty_server import faulty_server
from starlette.responses import JSONResponse

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.errors import EngineError

LEFT_OUT = ("return_token_ids", "stream_options", "seed")


def opened(server, **options):
    given = {"base-url": server.url, "reset": "vllm", **options}
    return open_engine(EngineSettings(model="m", options=given))


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        ({"refuses": (*LEFT_OUT, "temperature")}, "unknown field temperature"),
        ({"refuses": ("max_completion_tokens", *LEFT_OUT, "temperature")}, "unknown field temperature"),
        ({"refuses": ("temperature",), "apis": ("completions",)}, "unknown field temperature"),
        ({"refuses": ("messages", "prompt")}, "unknown field messages"),
        ({"apis": ()}, "404"),
    ],
)
def test_what_really_stopped_it_is_told(behaviour, told):
    with faulty_server(**behaviour) as server, pytest.raises(EngineError, match=told):
        opened(server)


def refused(message):
    return lambda: JSONResponse({"error": {"message": message}}, 400)


def test_where_the_other_name_of_the_limit_is_asked_for_what_is_said_then_counts():
    failures = {**dict.fromkeys(range(4), refused("use max_completion_tokens")), 4: refused("no temperature of 0")}
    with faulty_server(failures=failures) as server, pytest.raises(EngineError, match="no temperature of 0"):
        opened(server, api="chat")
