"""What the machine has to compute on, asked without torch: NVIDIA GPUs by their driver's own tool, the processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_SMI = "nvidia-smi"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASKED = "name,memory.total,driver_version"
_PATIENCE_SECONDS = 20.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_bytes` is None where the GPU shares the machine's."""

    name: str
    memory_bytes: int | None
    driver: str


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` are those that this process may use. `gpu_trouble` says why GPUs could not be asked for, None when they
    could, or when there is no NVIDIA driver at all."""

    gpus: tuple[Gpu, ...]
    gpu_trouble: str | None
    processor: str
    cores: int
    memory_bytes: int


def this_machine() -> Machine:
    gpus, trouble = _gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(gpus, trouble, _processor(), _usable_cores(), memory)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    tool = shutil.which(_NVIDIA_SMI)
    if tool is None:
        return (), None
    if os.environ.get(_VISIBLE) in ("", "-1"):
        return (), f"{_VISIBLE} hides the GPUs"
    command = [tool, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return (), f"{_NVIDIA_SMI} did not answer in {_PATIENCE_SECONDS:.0f} s"
    except OSError as error:
        return (), f"{_NVIDIA_SMI} cannot be run: {error.strerror or error}"
    if ran.returncode:
        return (), f"{_NVIDIA_SMI} failed: {' '.join((ran.stdout + ran.stderr).split()) or ran.returncode}"
    try:
        return tuple(_gpu(line) for line in ran.stdout.splitlines() if line.strip()), None
    except ValueError:
        return (), f"{_NVIDIA_SMI} gave no table of GPUs: {' '.join(ran.stdout.split())[:200]}"


def _gpu(line: str) -> Gpu:
    name, memory, driver = (part.strip() for part in line.rsplit(",", 2))
    return Gpu(name, int(memory) * _MIB if memory.isdecimal() else None, driver)


def _processor() -> str:
    """Its name as Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, os.uname().machine)
