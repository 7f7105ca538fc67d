"""The file outlives kill -9 and full disks, and belongs to one proxy at a time."""

from __future__ import annotations

import gzip
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from proxy_processes import eventually, exchanges_in, http, lines_of, recorded, running_proxy, running_service

from kvaudit.errors import TraceError
from kvaudit.proxy.capture import Capture, RecordingError, open_capture
from kvaudit.proxy.exchange import Exchange
from kvaudit.proxy.recording import Recording
from kvaudit.traces import read_trace
from kvaudit.traces.damaged import codec_of, readable_lines

NAMES = ["capture.jsonl", "capture.jsonl.gz", "capture.jsonl.zst"]
LINE = b'{"exchange":"r1-1"}\n'


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running_service() as address:
        yield f"http://{address}"


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def ask(url: str, text: str = "Hello", **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return http().post(f"{url}/v1/chat/completions", json=body)


def write(path: Path, *lines: bytes) -> list[str]:
    said: list[str] = []
    with open_capture(path, "http://x", said.append) as capture:
        for line in lines:
            capture.append(line)
    return said


def readable(path: Path) -> list[dict[str, Any]]:
    """The exchanges of a capture that may be damaged."""
    found = []
    with path.open("rb") as stream:
        for line in readable_lines(stream, codec_of(stream)):
            if isinstance(line, bytes):
                with suppress(orjson.JSONDecodeError):
                    found.append(orjson.loads(line))
    return [line for line in found if "exchange" in line]


def test_a_killed_proxy_leaves_all_that_was_answered(service: str, path: Path) -> None:
    with running_proxy(service, path) as proxy:
        stop = threading.Event()
        answered = [0] * 4

        def keep_asking(worker: int) -> None:
            while not stop.is_set():
                try:
                    answered[worker] += ask(proxy.url, f"from {worker}", stream=True, model="paced").status_code == 200
                except httpx.TransportError:
                    return

        workers = [threading.Thread(target=keep_asking, args=(worker,)) for worker in range(4)]
        for worker in workers:
            worker.start()
        eventually(lambda: sum(answered) >= 30)
        assert proxy.stop(signal.SIGKILL) == -signal.SIGKILL
        stop.set()
        for worker in workers:
            worker.join()

    kept = exchanges_in(path)
    assert sum(answered) - 4 <= len(kept)
    assert len(read_trace(path).requests) == len(kept)

    with running_proxy(service, path) as proxy:
        ask(proxy.url, "after")
        exchange = recorded(path, len(kept) + 1)[-1]
    assert exchange["exchange"] == "r2-1"
    assert len(read_trace(path).requests) == len(kept) + 1


@pytest.mark.parametrize("lost", [1, 5, 12])
def test_a_line_that_was_cut_off_is_taken_away_when_recording_goes_on(path: Path, lost: int) -> None:
    write(path, LINE, LINE.replace(b"r1-1", b"r1-2"))
    whole = len(path.read_bytes())
    os.truncate(path, whole - lost)

    said = write(path, LINE.replace(b"r1", b"r2"))

    assert len(said) == 1
    assert "cut off" in said[0]
    assert [line["exchange"] for line in exchanges_in(path)] == ["r1-1", "r2-1"]
    assert [line["kvaudit_capture"] for line in lines_of(path) if "kvaudit_capture" in line] == [1, 1]


def test_a_whole_capture_goes_on_as_it_is(path: Path) -> None:
    write(path, LINE)
    before = path.read_bytes()

    assert write(path, LINE) == []
    assert path.read_bytes().startswith(before)


def test_a_capture_is_for_its_owner_alone(path: Path) -> None:
    write(path)

    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content", [b"{}\n", b"something else\n", b"\0" * 100, b'{"messages": []}\n{"kvaudit_capture": 1}\n', b"{"]
)
def test_anything_but_a_capture_is_refused_and_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(TraceError, match=r"capture|record"):
        write(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("how", ["garbage between", "a frame that is damaged"])
def test_behind_damage_in_the_middle_recording_goes_on_and_nothing_is_taken_away(
    tmp_path: Path, name: str, how: str
) -> None:
    path = tmp_path / name
    write(path)
    begun = path.stat().st_size
    write(path, LINE, LINE.replace(b"r1-1", b"r1-2"))
    whole = path.read_bytes()
    between = b"garbage" if how == "garbage between" else whole[: begun - 9] + bytes(4) + whole[begun - 5 : begun]
    path.write_bytes(whole[:begun] + between + whole[begun:])
    before = path.read_bytes()

    (said,) = write(path, LINE.replace(b"r1", b"r3"))

    assert path.read_bytes().startswith(before)
    assert f"{len(between)} of its bytes cannot be read" in said
    assert [request["exchange"] for request in readable(path)] == ["r1-1", "r1-2", "r3-1"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_garbage_behind_everything_is_taken_away(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, LINE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:4] + b"garbage" * 30)

    (said,) = write(path, LINE.replace(b"r1", b"r2"))

    assert "its 214 bytes were taken away" in said
    assert path.read_bytes().startswith(whole)
    assert [line["exchange"] for line in exchanges_in(path)] == ["r1-1", "r2-1"]


def test_a_capture_that_was_cut_and_compressed_again_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    plain, path = tmp_path / "capture.jsonl", tmp_path / "capture.jsonl.gz"
    write(plain, LINE)
    path.write_bytes(gzip.compress(plain.read_bytes() + b'{"exch'))

    write(path, LINE.replace(b"r1", b"r2"))

    assert gzip.decompress(path.read_bytes()).count(b'\n{"kvaudit_capture"') == 1
    assert [line["exchange"] for line in readable(path)] == ["r1-1", "r2-1"]


@pytest.mark.parametrize("where", ["no/such/folder/c.jsonl", ".", "pipe"])
def test_a_place_that_cannot_hold_a_capture_is_refused(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")

    with pytest.raises(TraceError, match=r"cannot record to"):
        write(Path(where))


def test_two_proxies_do_not_share_a_file(service: str, path: Path) -> None:
    with running_proxy(service, path), pytest.raises(TraceError, match="another proxy is recording"):
        write(path)
    write(path, LINE)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_two_proxies_do_not_share_a_file_through_a_link(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    path, other = tmp_path / "capture.jsonl", tmp_path / "elsewhere.jsonl"
    with open_capture(path, "http://x", print):
        link(path, other)
        with pytest.raises(TraceError, match="another proxy is recording"):
            write(other)
    assert {file.name for file in tmp_path.iterdir()} == {"capture.jsonl", "elsewhere.jsonl"}


def delete(path: Path) -> None:
    path.unlink()


def rotate(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.touch()


def cut(path: Path) -> None:
    os.truncate(path, 0)


def cut_a_little(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


@pytest.mark.parametrize(
    ("harm", "told", "kept"),
    [
        (delete, "was deleted or moved", []),
        (rotate, "was replaced by another file", []),
        (cut, "was changed by somebody else", []),
        (cut_a_little, "was changed by somebody else", ["first"]),
    ],
)
def test_a_capture_that_is_taken_away_is_begun_anew_and_told(
    service: str, path: Path, harm: Callable[[Path], None], told: str, kept: list[str]
) -> None:
    with running_proxy(service, path) as proxy:
        ask(proxy.url, "first")
        ask(proxy.url, "second")
        recorded(path, 2)
        harm(path)
        ask(proxy.url, "third")
        ask(proxy.url, "fourth")
        recorded(path, len(kept) + 2)
        assert proxy.stop() == 0
        said = proxy.stderr

    lines = lines_of(path)
    assert "kvaudit_capture" in lines[0]
    asked = [line["request"]["messages"][0]["content"] for line in lines if "exchange" in line]
    assert asked == [*kept, "third", "fourth"]
    assert f"WARNING: {path} {told} while it was recorded to" in said
    assert said.count("WARNING") == 1
    assert "not be written" not in said
    assert len({line["exchange"] for line in lines if "exchange" in line}) == len(asked)


def test_what_else_stands_in_the_place_of_a_capture_is_left_as_it_is(service: str, path: Path) -> None:
    with running_proxy(service, path) as proxy:
        ask(proxy.url, "first")
        recorded(path, 1)
        path.unlink()
        path.write_bytes(b"something else\n")
        ask(proxy.url, "lost")
        assert proxy.stop() == 3
        assert f"NOT RECORDING to {path}: {path} is not a capture of this proxy" in proxy.stderr

    assert path.read_bytes() == b"something else\n"


def test_a_capture_whose_folder_is_gone_is_lost_loudly_until_there_is_one_again(service: str, tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    log_stays = tmp_path / "captures.moved"
    path = folder / "capture.jsonl"
    with running_proxy(service, path) as proxy:
        ask(proxy.url, "first")
        recorded(path, 1)
        folder.rename(log_stays)
        proxy.log = log_stays / proxy.log.name
        assert ask(proxy.url, "lost").status_code == 200
        eventually(lambda: "NOT RECORDING" in proxy.stderr)
        folder.mkdir()
        ask(proxy.url, "third")
        recorded(path, 1)
        assert proxy.stop() == 3
        assert "1 of 3 exchanges could not be written" in proxy.stderr


def test_a_capture_that_is_gone_in_the_end_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with open_capture(tmp_path / "capture.jsonl", "http://x", said.append):
        delete(tmp_path / "capture.jsonl")

    assert ["was deleted or moved" in told for told in said] == [True]


def test_a_disk_that_is_full_when_a_capture_begins_anew_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, real: Callable[[int, bytes], int] = os.write) -> int:
        if len(data) > 20:
            return real(descriptor, data[:-20])
        raise OSError(28, "No space left on device")

    path = tmp_path / "capture.jsonl"
    with open_capture(path, "http://x", print) as capture:
        delete(path)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space"):
                capture.current_run()
        assert capture.current_run() == 1
        capture.append(LINE)

    assert [line.get("exchange") for line in lines_of(path)] == [None, "r1-1"]


def test_a_full_disk_does_not_stop_the_traffic_and_is_told(service: str, path: Path) -> None:
    with running_proxy(service, path, largest_file=6000) as proxy:
        answers = [ask(proxy.url, os.urandom(600).hex()) for _ in range(12)]
        eventually(lambda: "NOT RECORDING" in proxy.stderr)
        assert proxy.stop() == 3
        told = proxy.stderr

    assert [answer.status_code for answer in answers] == [200] * 12
    kept = len(exchanges_in(path))
    assert 0 < kept < 12
    assert path.stat().st_size <= 6000
    assert told.count("NOT RECORDING") == 1
    assert f"{12 - kept} of 12 exchanges could not be written" in told
    write(path, LINE)
    assert len(exchanges_in(path)) == kept + 1


def test_strict_turns_clients_away_once_something_is_lost(service: str, path: Path) -> None:
    with running_proxy(service, path, "--strict", largest_file=2000) as proxy:
        answers = [ask(proxy.url, os.urandom(3000).hex())]
        eventually(lambda: "NOT RECORDING" in proxy.stderr)
        answers.append(ask(proxy.url))
        models = http().get(f"{proxy.url}/v1/models")
        assert proxy.stop() == 3

    assert [answer.status_code for answer in answers] == [200, 503]
    assert "cannot record" in answers[1].json()["error"]["message"]
    assert models.status_code == 503


class FullThenNot:
    """A capture whose disk takes nothing for a while."""

    path = Path("capture.jsonl")

    def __init__(self) -> None:
        self.full = True
        self.lines: list[bytes] = []

    def current_run(self) -> int:
        return 1

    def append(self, line: bytes) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        self.lines.append(line)


def test_recording_goes_on_when_the_disk_has_space_again() -> None:
    disk, said = FullThenNot(), []
    recording = Recording(disk, said.append)  # type: ignore[arg-type]

    def exchange() -> Exchange:
        made = recording.begin("POST", "/v1/completions", [], b"")
        assert made is not None
        made.end("complete")
        return made

    for _ in range(3):
        recording.add(exchange())
    eventually(lambda: recording.counts.lost == 3)
    disk.full = False
    recording.add(exchange())
    counts = recording.close()

    assert (counts.recorded, counts.lost, len(disk.lines)) == (1, 3, 1)
    assert ["NOT RECORDING" in told for told in said] == [True, False]
    assert "goes on" in said[1]


def test_a_write_of_which_the_disk_took_a_part_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "capture.jsonl", os.write

    def takes_a_part(descriptor: int, data: bytes) -> int:
        if len(data) > 100:
            return real(descriptor, data[:100])
        raise OSError(28, "No space left on device")

    with open_capture(path, "http://x", print) as capture:
        assert isinstance(capture, Capture)
        capture.append(LINE)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", takes_a_part)
            with pytest.raises(OSError, match="No space"):
                capture.append(b'{"exchange": "%b"}\n' % (b"x" * 150))
        capture.append(LINE)

    assert [line["exchange"] for line in exchanges_in(path)] == ["r1-1", "r1-1"]


def test_what_could_not_be_written_ends_in_exit_code_3() -> None:
    assert RecordingError("x").exit_code == 3
