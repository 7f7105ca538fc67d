import os
from pathlib import Path

import pytest

from kvaudit.cli.outputs import (
    Destination,
    append_step_summary,
    destinations,
    exit_code,
    write_file,
    write_folder,
)
from kvaudit.errors import RunError, UsageError


def places(formats=(), outputs=()) -> list[tuple[str, str | None]]:
    found = destinations(list(formats), [Path(path) for path in outputs])
    return [(name, None if path is None else str(path)) for name, path in found]


def test_without_a_place_the_report_goes_to_stdout():
    assert places() == [("terminal", None)]
    assert places(["json"]) == [("json", None)]


def test_endings_say_the_format():
    endings = ["a.html", "a.xml", "a.json", "a.md", "a.csv", "a.txt", "A.HTML"]
    formats = ["html", "junit", "json", "markdown", "csv", "terminal", "html"]
    assert [place[0] for place in places(outputs=endings)] == formats
    assert places(outputs=["report"]) == [("terminal", "report")]


def test_formats_and_places_are_paired_in_order():
    found = places(["junit", "parquet", "terminal"], ["out", "folder", "-"])
    assert found == [("junit", "out"), ("parquet", "folder"), ("terminal", None)]
    assert places(outputs=["-", "a.json"]) == [("terminal", None), ("json", "a.json")]


@pytest.mark.parametrize(
    ("formats", "outputs"),
    [
        (["json", "html"], []),
        (["json", "html"], ["a.json"]),
        (["json"], ["a.json", "a.html"]),
        ([], ["a.pdf"]),
        (["pdf"], ["a.pdf"]),
        (["parquet"], []),
        (["parquet"], ["-"]),
        ([], ["a.json", "a.json"]),
        ([], ["a.json", "./a.json"]),
        (["json", "terminal"], ["-", "-"]),
    ],
)
def test_what_cannot_be_paired_is_refused(formats, outputs):
    with pytest.raises(UsageError):
        places(formats, outputs)


def test_the_html_of_a_folder_is_told():
    assert Destination("parquet", Path("x")).is_folder
    assert not Destination("json", Path("x")).is_folder


# Files and folders are whole or as they were


def test_a_report_that_breaks_leaves_the_old_file(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("before")

    def broken(out):
        out.write("half")
        raise RuntimeError

    with pytest.raises(RunError):
        write_file(broken, target)
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.json"]


def filled(folder: Path) -> None:
    (folder / "manifest.json").write_text("new")
    (folder / "README.md").write_text("new")
    (folder / "observations").mkdir()


def test_a_folder_is_written_with_its_parents_and_into_an_empty_one(tmp_path):
    target = tmp_path / "deep" / "audit"
    write_folder(filled, target)
    assert sorted(os.listdir(target)) == ["README.md", "manifest.json", "observations"]
    assert os.listdir(target.parent) == ["audit"]
    (tmp_path / "empty").mkdir()
    write_folder(filled, tmp_path / "empty")
    assert (tmp_path / "empty" / "README.md").exists()


def test_a_folder_that_breaks_is_not_there(tmp_path):
    def broken(folder):
        filled(folder)
        raise RuntimeError

    with pytest.raises(RunError):
        write_folder(broken, tmp_path / "audit")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_anything_is_refused(tmp_path):
    """Also an earlier report, and of course a run."""
    write_folder(filled, tmp_path / "audit")
    with pytest.raises(RunError, match="is not empty"):
        write_folder(filled, tmp_path / "audit")
    assert os.listdir(tmp_path) == ["audit"]


@pytest.mark.parametrize("place", ["run", "run/manifest.json", "run/observations/a.parquet", "run/new", ".", "link/x"])
def test_nothing_is_written_into_or_over_a_run_that_is_read(tmp_path, place):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UsageError, match="would write into the run"):
        destinations(["json"], [tmp_path / place], [tmp_path / "run"])
    destinations(["json"], [tmp_path / "run.json"], [tmp_path / "run"])


def test_a_report_in_another_report_is_refused(tmp_path):
    with pytest.raises(UsageError, match="lies in another"):
        destinations(["parquet", "html"], [tmp_path / "d", tmp_path / "d" / "index.html"])


@pytest.mark.parametrize("place", ["/", "loop", "a" * 300, "nul\0"])
def test_places_that_cannot_be_are_one_clear_error(tmp_path, place):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunError):
        write_folder(filled, tmp_path / place)
    if place != "/":
        with pytest.raises(RunError):
            write_file(lambda out: out.write("x"), tmp_path / place)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "audit").write_text("mine")
    with pytest.raises(RunError, match="is a file"):
        write_folder(filled, tmp_path / "audit")


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(lambda out: out.write("through"), tmp_path / "pipe")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


# The step summary


def test_a_step_summary_is_added_to_what_is_there(tmp_path, monkeypatch):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    append_step_summary(lambda room: f"room {room}\n", 1000)
    assert path.read_text() == "before\nroom 993\n"
    path.write_text("no end")
    append_step_summary(lambda room: f"## {room}\n", 1000)
    assert path.read_text() == "no end\n## 993\n"


def test_a_step_summary_that_is_not_set_is_said_and_no_error(monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    append_step_summary(lambda room: "text", 1000)
    assert "GITHUB_STEP_SUMMARY is not set" in capsys.readouterr().err


def test_a_step_summary_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary.md"))
    with pytest.raises(RunError, match="cannot write"):
        append_step_summary(lambda room: "text", 1000)


def test_a_full_step_summary_is_left_and_said(tmp_path, monkeypatch, capsys):
    path = tmp_path / "summary.md"
    path.write_text("x" * 100)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    for limit, text in ((50, "text"), (101, "text"), (200, "")):
        append_step_summary(lambda room, text=text: text, limit)
        assert path.read_text() == "x" * 100
        assert "is full" in capsys.readouterr().err


def test_a_device_is_no_step_summary(monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/dev/full")
    with pytest.raises(RunError, match="no file"):
        append_step_summary(lambda room: "text", 1000)


@pytest.mark.parametrize(("of_verdict", "exit_zero", "code"), [(0, True, 0), (4, False, 4), (0, False, 0)])
def test_an_exit_code_that_is_the_verdicts_needs_no_word(capsys, of_verdict, exit_zero, code):
    assert exit_code(of_verdict, exit_zero) == code
    assert capsys.readouterr().err == ""


def test_an_exit_code_that_is_not_the_verdicts_is_told(capsys):
    assert exit_code(1, exit_zero=True) == 0
    assert capsys.readouterr().err == "kvaudit: exit code 0 since --exit-zero is set; by the verdict it is 1\n"
