import ast
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import kvaudit
from kvaudit import cli

PACKAGE = Path(kvaudit.__file__).parent
HEAVY = {"torch", "transformers", "pyarrow", "scipy", "statsmodels", "numpy", "rich", "pandas", "orjson"}


def tree():
    """Every command by its words, with its parser."""

    def walk(words, command):
        yield words, command
        for name, below in getattr(command, "commands", {}).items():
            yield from walk((*words, name), below)

    return dict(walk((), typer.main.get_command(cli.app)))


COMMANDS = tree()


def help_of(words, capsys):
    with pytest.raises(SystemExit):
        COMMANDS[words].main(["--help"], prog_name=" ".join(["kvaudit", *words]))
    return capsys.readouterr().out


def commands_in(text):
    """Command lines that a text shows, each on a line of its own, joined where they go on after a backslash."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = [line.partition(" | ")[0] for line in joined.splitlines()]
    return [shlex.split(line) for line in lines if re.match(r"\s*kvaudit( |$)", line)]


def parsed(command):
    """The words of the command that would run; raises SystemExit when the line cannot be parsed."""
    group = typer.main.get_command(cli.app)
    ran = []

    def watch(words, node):
        if hasattr(node, "commands"):
            for name, below in node.commands.items():
                watch((*words, name), below)
        if getattr(node, "invoke_without_command", True):
            node.callback = lambda **options: ran.append(words)

    watch((), group)
    group.main(command[1:], prog_name="kvaudit", standalone_mode=False)
    return ran[-1]


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_at_once():
    """In processor time, which is what an idle machine takes: others may keep this one busy."""
    took = []
    for _ in range(5):
        before = processor_seconds()
        subprocess.run([sys.executable, "-m", "kvaudit", "--help"], check=True, stdout=subprocess.DEVNULL)
        took.append(processor_seconds() - before)
    assert min(took) < 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["replay", "--help"], ["report", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = f"import sys; from kvaudit.cli import app; app({arguments!r}, standalone_mode=False); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = {name.partition(".")[0] for name in out.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kvaudit", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"kvaudit {kvaudit.__version__}\n"


def test_commands_stand_in_the_order_in_which_they_are_used(capsys):
    shown = help_of((), capsys).partition("Commands:")[2]
    names = re.findall(r"^  (\w+) ", shown, re.MULTILINE)[:9]
    assert names == ["record", "inspect", "replay", "report", "compare", "policies", "engines", "doctor", "schema"]


@pytest.mark.parametrize("words", [words for words, command in COMMANDS.items() if not hasattr(command, "commands")])
def test_every_command_shows_an_example_of_itself(words, capsys):
    examples = commands_in(help_of(words, capsys))
    assert any(tuple(example[1 : len(words) + 1]) == words for example in examples)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_example_in_help_can_be_parsed(words, capsys):
    for example in commands_in(help_of(words, capsys)):
        assert parsed(example) in COMMANDS


def test_an_example_with_a_wrong_option_would_be_seen():
    with pytest.raises(Exception, match="No such option"):
        parsed(["kvaudit", "replay", "trace.jsonl", "--order", "5"])


def test_what_record_prints_can_be_parsed(tmp_path, monkeypatch, capsys):
    (tmp_path / "my prices.csv").write_text("day,price\n" + "".join(f"{day},{day * 7}\n" for day in range(12)))
    trace = str(tmp_path / "my trace.jsonl")
    events = str(tmp_path / "my prices.csv")
    monkeypatch.setattr(sys, "argv", ["kvaudit", "record", "rolling", events, "--window", "3", "-o", trace])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    printed = re.findall(r"kvaudit .*", "".join(capsys.readouterr()))
    assert printed
    for line in printed:
        assert parsed(shlex.split(line)) in COMMANDS
        assert trace in shlex.split(line)


def test_every_command_that_a_message_names_exists():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= {tuple(found.split()) for found in re.findall(r"`kvaudit ((?:[a-z]+ ?)+)", node.value)}
    assert named
    assert named <= set(COMMANDS)


def test_a_closed_standard_output_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvaudit", "policies"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--check-layer", str(2**63)), ("--check-layer", "-1"), ("--cache-capacity", "99999999999GiB")]
)
def test_numbers_that_no_manifest_holds_are_wrong_usage(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvaudit", "replay", "trace.jsonl", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_an_error_that_cannot_be_told_keeps_its_exit_code(tmp_path):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([sys.executable, "-m", "kvaudit", "replay", str(tmp_path / "nope")], stderr=full)
    assert ran.returncode == 2


def test_a_plug_in_that_leaves_the_program_is_no_success(monkeypatch, capsys):
    def leaves(**settings):
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", leaves)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 3
    assert "left the program with exit code 0" in capsys.readouterr().err


def test_the_end_of_an_engines_log_stands_below_the_hint_a_line_each(capsys):
    cli._say("vLLM\nfailed", "its log is x.log; it ends\nINFO  one\n\nERROR two")
    assert capsys.readouterr().err.splitlines() == [
        "kvaudit: error: vLLM failed",
        "kvaudit: hint: its log is x.log; it ends",
        "  INFO one",
        "  ERROR two",
    ]
