import os
from pathlib import Path

import pytest

from kvaudit.cli.outputs import Destination, append_step_summary, destinations, write_file, write_folder
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

    with pytest.raises(RuntimeError):
        write_file(broken, target)
    assert target.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.json"]


def filled(folder: Path) -> None:
    (folder / "manifest.json").write_text("new")
    (folder / "README.md").write_text("new")
    (folder / "observations").mkdir()


def test_a_folder_is_written_and_replaced(tmp_path):
    target = tmp_path / "deep" / "audit"
    write_folder(filled, target)
    (target / "queries.sql").write_text("old")
    write_folder(filled, target)
    assert sorted(os.listdir(target)) == ["README.md", "manifest.json", "observations"]
    assert os.listdir(target.parent) == ["audit"]
    (tmp_path / "empty").mkdir()
    write_folder(filled, tmp_path / "empty")
    assert (tmp_path / "empty" / "README.md").exists()


def test_a_folder_that_breaks_is_as_it_was(tmp_path):
    target = tmp_path / "audit"
    write_folder(filled, target)
    (target / "README.md").write_text("old")

    def broken(folder):
        filled(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_folder(broken, target)
    assert (target / "README.md").read_text() == "old"
    assert os.listdir(tmp_path) == ["audit"]


def test_a_folder_whose_replacement_fails_is_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "audit"
    write_folder(filled, target)
    (target / "README.md").write_text("old")
    replace, calls = os.replace, []

    def second_fails(source, destination):
        calls.append(destination)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(RunError, match="No space left"):
        write_folder(filled, target)
    assert (target / "README.md").read_text() == "old"
    assert os.listdir(tmp_path) == ["audit"]


@pytest.mark.parametrize("held", [["mine.txt"], ["manifest.json", "README.md", "mine.txt"], ["manifest.json"]])
def test_a_folder_of_somebody_else_s_is_refused(tmp_path, held):
    """A run folder has a manifest and no README.md: it is not replaced either."""
    for name in held:
        (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match="not written by"):
        write_folder(filled, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(held)


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
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(RunError, match="cannot write"):
        append_step_summary(lambda room: "text", 1000)
