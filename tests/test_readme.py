"""README tells the same story as the program: its commands parse, its policy runs, its names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from policy_contexts import context_of
from test_cli_start import COMMANDS, parsed

from kvaudit.engines import PRESETS
from kvaudit.policies import checked_selection
from kvaudit.schema import TABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    parts = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [["kvaudit", *words[1:]] for words in parts if words and words[0].endswith("kvaudit")]


def test_every_command_can_be_parsed() -> None:
    assert len(commands()) > 6
    for command in commands():
        assert parsed(command) in COMMANDS


@pytest.mark.parametrize("name", ["main", "tests", "lmcache"])
def test_the_marked_commands_are_one_line_each(name: str) -> None:
    found = re.findall(rf"^<!-- ci: {name} -->\n```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    assert found[0].count("\n") == 1


def test_the_policy_runs_and_keeps_the_contract() -> None:
    program: dict[str, object] = {}
    (source,) = blocks("python")
    exec(source, program)
    policy = program["EvenlySpread"]()  # type: ignore[operator]
    for reusable in (1, 2, 7, 100):
        for k in range(reusable + 1):
            context = context_of(f"d{reusable}", [1.0] * reusable, k)
            assert len(checked_selection(policy, context)) == k


def test_every_table_and_preset_is_named() -> None:
    assert all(f"`{name}`" in README for name in (*TABLES, *PRESETS))


def test_nothing_is_left_to_fill_in() -> None:
    assert "@@" not in README
