"""What the operator reads of faults in the proxy itself."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_processes import http, recorded, running_proxy, running_service

from kvaudit.proxy.capture import open_capture
from kvaudit.proxy.recording import Recording
from kvaudit.proxy.server import Proxy
from kvaudit.proxy.upstream import Upstream, certificates

KEY = "0123456789abcdef0123456789abcdef"


class Failing(Upstream):
    def answer(self, *asked: Any) -> AbstractAsyncContextManager[httpx.Response]:  # type: ignore[override]
        raise RuntimeError(f"planned\x07 {KEY}")


def test_control_characters_and_keys_of_a_path_do_not_reach_the_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"/\x1b[31m/{KEY}\r\n",
        "raw_path": b"/",
        "query_string": b"",
        "headers": [],
    }

    async def nothing(*_: Any) -> Any:
        await asyncio.sleep(3600)

    with open_capture(tmp_path / "c.jsonl", "http://x", said.append) as capture:
        recording = Recording(capture, said.append)
        upstream = Failing(httpx.URL("http://x"), certificates(insecure=True, authority=None))
        with pytest.raises(ExceptionGroup):
            asyncio.run(Proxy(upstream, recording, said.append)(scope, nothing, nothing))
        recording.close()

    (told,) = said
    assert told.isprintable()
    assert "\\x1b[31m" in told
    assert "planned\\x07 [secret-" in told
    assert KEY not in told


def test_a_key_in_the_path_of_the_upstream_is_neither_told_nor_recorded(tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl"
    with running_service() as service, running_proxy(f"http://{service}/v1/{KEY}", capture) as proxy:
        assert (
            http().post(f"{proxy.url}/completions", json={"prompt": "x"}).json()["target"] == f"/v1/{KEY}/completions?"
        )
        recorded(capture, 1)
        proxy.stop()
        assert f"-> http://{service}/v1/[secret-" in proxy.stderr
        assert KEY not in proxy.stderr

    assert KEY not in capture.read_text()


def test_what_could_not_be_read_is_counted_in_the_end(tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl"
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        for content in (b"{", b"[]", b'{"messages": []}'):
            http().post(f"{proxy.url}/elsewhere/chat/completions", content=content)
        http().post(f"{proxy.url}/v1/completions", json={"prompt": "x"})
        recorded(capture, 4)
        proxy.stop()
        assert "not read: 2 requests, 0 answers; the 'problems' of their lines say why" in proxy.stderr
