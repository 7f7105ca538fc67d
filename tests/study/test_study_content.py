"""A study.json that was damaged or changed: one error that names it, whatever stands in it."""

import shutil

import orjson
import pytest
from studies import refusing, run_study

from kvaudit.errors import RunError
from kvaudit.study.folder import STUDY, read_study
from kvaudit.study.results import read_results

WRONG = [None, 5, True, "x", [], {}, [1], {"a": 1}, {"mask": 5}, {"recompute_ratio": ["a"]}, [{"name": "a"}]]
ALLOWED = {
    "settings": [{}, {"a": 1}, {"mask": 5}, {"recompute_ratio": ["a"]}],
    "axes": [{}],
    "same": [[]],
    "skipped": [[]],
    "refused": [{}],
    "failed": [{}],
    "engine": [None, {}, {"a": 1}, {"mask": 5}, {"recompute_ratio": ["a"]}],
    "max_noise": [5],
    "created": WRONG,
}
CELL = "exact.recompute"


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    path = tmp_path_factory.mktemp("content") / "s"
    run_study(path, "switches", fixed=("lookup", "write_back"))
    return path


@pytest.fixture
def changed(finished_study, tmp_path):
    """Makes a copy of the study in which study.json has other content."""

    def copied(**content):
        study = shutil.copytree(finished_study, tmp_path / "s")
        described = orjson.loads((study / STUDY).read_bytes()) | content
        (study / STUDY).write_bytes(orjson.dumps(described))
        return study

    return copied


@pytest.mark.parametrize("name", ["kind", "trace", "cells", *ALLOWED])
def test_content_of_another_type_is_one_error_that_names_the_file(finished_study, tmp_path, name):
    described = orjson.loads((finished_study / STUDY).read_bytes())
    for wrong in WRONG:
        (tmp_path / STUDY).write_bytes(orjson.dumps(described | {name: wrong}))
        if any(wrong is one or (wrong == one and type(wrong) is type(one)) for one in ALLOWED.get(name, [])):
            assert read_study(tmp_path)[name] == wrong
        else:
            with pytest.raises(RunError, match=rf"study.json is damaged: {name} missing or of another type"):
                read_study(tmp_path)


@pytest.mark.parametrize("name", [name for name in ALLOWED if name != "created"])
def test_content_that_is_missing_is_named(finished_study, tmp_path, name):
    described = orjson.loads((finished_study / STUDY).read_bytes())
    del described[name]
    (tmp_path / STUDY).write_bytes(orjson.dumps(described))
    with pytest.raises(RunError, match=rf"study.json is damaged: {name} missing"):
        read_study(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"refused": {"zzz": "no"}}, "study.json was changed: it tells of zzz, which"),
        ({"failed": {"zzz": {"token-topk": "no"}}}, "study.json was changed: it tells of zzz, which"),
        ({"failed": {CELL: {"zzz": "no"}}}, f"study.json was changed: it tells of zzz in {CELL}, which"),
        ({"refused": {CELL: "no"}}, f"study.json was changed: it has {CELL} among refused, and that is finished"),
        (
            {"failed": {CELL: {"token-topk": "no"}}},
            f"study.json was changed: it has {CELL} among failed, and that is finished",
        ),
    ],
)
def test_what_contradicts_the_study_is_refused(changed, content, told):
    with pytest.raises(RunError, match=told):
        read_results(changed(**content))


def test_a_cell_that_was_refused_once_and_runs_later_is_refused_no_more(tmp_path):
    grid = {"fixed": ("lookup", "write_back")}
    refused = run_study(tmp_path / "s", "switches", open_engine=refusing(gap="store"), **grid)
    assert len(refused.described["refused"]) == 2
    run_study(tmp_path / "s", "switches", **grid)
    results = read_results(tmp_path / "s")
    assert (results.described["refused"], results.missing, len(results.rows)) == ({}, (), 6)
