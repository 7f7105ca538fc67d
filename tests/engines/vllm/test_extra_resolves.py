"""What `kvaudit[lmcache]` asks for can be had from the package index: resolved there, nothing is installed."""

import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from packaging.version import Version

import kvaudit
from kvaudit.engines.vllm.versions import CPU_OVERRIDES, Installed, problems, row_for

PROJECT = Path(kvaudit.__file__).parents[1] / "pyproject.toml"
CORNERS = [*product(("0.23.0", "0.25.1"), ("0.5.1", "0.5.6"))]

pytestmark = pytest.mark.slow


def resolved(folder, python, *arguments, requirements=()):
    """Package name to version of what uv would install on Linux."""
    asked = folder / "asked.in"
    asked.write_text("".join(f"{line}\n" for line in requirements))
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += ["--python-version", python, "--python-platform", "linux", *arguments, str(asked)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", ran.stdout, re.MULTILINE))


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_extra_and_the_tests_resolve_together(tmp_path, python):
    found = resolved(tmp_path, python, str(PROJECT), "--extra", "lmcache", "--extra", "test")
    assert not problems("lmcache", Installed(found["vllm"], None, found["lmcache"]), "cuda")
    assert Version(found["torch"]) < Version("2.14")
    assert Version(found["transformers"]) >= Version("5.0")


@pytest.mark.parametrize(("vllm", "lmcache"), CORNERS)
def test_each_corner_of_the_table_resolves(tmp_path, vllm, lmcache):
    asked = [f"vllm=={vllm}", f"lmcache=={lmcache}"]
    found = resolved(tmp_path, "3.11", str(PROJECT), "--extra", "lmcache", requirements=asked)
    assert (found["vllm"], found["lmcache"]) == (vllm, lmcache)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_what_is_advised_for_the_cpu_resolves_without_what_only_gpus_need(tmp_path, python):
    """But for what torch's own build asks for: the package index has none for the CPU alone."""
    row = row_for("cpu")
    asked = [f"{package}=={version}" for package, version in zip((row.package, "lmcache"), row.advised, strict=True)]
    options = ["--extra", "test", "--overrides", str(CPU_OVERRIDES)]
    found = resolved(tmp_path, python, str(PROJECT), *options, requirements=asked)
    assert Version(found["torch"]).public == "2.13.0"
    assert (found[row.package], found["lmcache"]) == row.advised
    assert not {"cupy-cuda13x", "cuda-python", "cufile-python", "triton", "torchvision"} & set(found)
