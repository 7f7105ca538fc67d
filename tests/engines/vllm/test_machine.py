import subprocess

import pytest

from kvaudit.engines.vllm import machine
from kvaudit.engines.vllm.machine import Gpu, this_machine


@pytest.fixture
def driver(monkeypatch):
    """Puts words into the mouth of NVIDIA's tool."""

    def says(out="", code=0, raises=None):
        def run(command, **settings):
            assert command[0] == "/usr/bin/nvidia-smi"
            assert "--format=csv,noheader,nounits" in command
            if raises is not None:
                raise raises
            return subprocess.CompletedProcess(command, code, out, "")

        monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(machine.subprocess, "run", run)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return says


def test_without_the_driver_there_is_no_gpu_and_no_trouble(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    here = this_machine()
    assert here.gpus == ()
    assert here.gpu_trouble is None
    assert here.cores >= 1
    assert here.memory_bytes > 2**28
    assert here.processor


def test_gpus_are_read_with_their_memory_and_driver(driver):
    driver("NVIDIA L4, 23034, 580.65.06\nOdd, Name, 81559, 575.1\nNVIDIA GB10, [N/A], 580.95\n")
    assert this_machine().gpus == (
        Gpu("NVIDIA L4", 23034 * 2**20, "580.65.06"),
        Gpu("Odd, Name", 81559 * 2**20, "575.1"),
        Gpu("NVIDIA GB10", None, "580.95"),
    )


@pytest.mark.parametrize(
    ("said", "trouble"),
    [
        ({"out": "No devices were found\n", "code": 6}, "nvidia-smi failed: No devices were found"),
        ({"code": 9}, "nvidia-smi failed: 9"),
        ({"out": "Failed to initialize NVML\n"}, "nvidia-smi gave no table of GPUs: Failed to initialize NVML"),
        ({"raises": subprocess.TimeoutExpired("nvidia-smi", 20)}, "nvidia-smi did not answer in 20 s"),
        ({"raises": PermissionError(13, "Permission denied")}, "nvidia-smi cannot be run: Permission denied"),
    ],
)
def test_a_driver_in_trouble_is_told_and_does_not_end_the_program(driver, said, trouble):
    driver(**said)
    here = this_machine()
    assert here.gpus == ()
    assert here.gpu_trouble == trouble


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_are_none(driver, monkeypatch, hidden):
    driver("NVIDIA L4, 23034, 580.65.06\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    here = this_machine()
    assert here.gpus == ()
    assert here.gpu_trouble == "CUDA_VISIBLE_DEVICES hides the GPUs"
