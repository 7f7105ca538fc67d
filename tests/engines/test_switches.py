"""Presets and the combinations of switches that are refused, before anything is loaded."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
from fakes import rolling_trace, write_trace

from kvaudit import cli
from kvaudit.engines import (
    PREFIX_LOOKUPS,
    PRESET_NOTES,
    PRESETS,
    EngineSettings,
    Keys,
    Lookup,
    Switches,
    WriteBack,
    check_switches,
)
from kvaudit.engines.embedded import open_engine
from kvaudit.errors import UsageError
from kvaudit.models import files as models
from kvaudit.plan import make_plan
from kvaudit.store import open_run


def test_the_presets_of_before_are_what_they_were() -> None:
    assert {name: tuple(asdict(PRESETS[name]).values()) for name in ("lmcache", "cacheblend", "epic", "ideal")} == {
        "lmcache": ("bottom-right", "zero", "stop-at-miss", "first-writer", "after", "key", 1, None, "moved"),
        "cacheblend": ("bottom-right", "recompute", "any", "isolated", "with-rows", "value", 1, None, "moved"),
        "epic": ("exact", "recompute", "any", "isolated", "with-rows", "key", 1, None, "moved"),
        "ideal": ("exact", "recompute", "any", "first-writer", "with-rows", "key", 1, None, "moved"),
    }


def test_every_preset_is_allowed_and_has_a_note() -> None:
    assert PRESETS.keys() == PRESET_NOTES.keys()
    for preset in PRESETS.values():
        check_switches(preset)


def test_every_value_of_lookup_write_back_and_keys_is_in_a_preset_or_known_from_before() -> None:
    presets = PRESETS.values()
    assert {preset.lookup for preset in presets} == set(get_args(Lookup))
    assert {preset.keys for preset in presets} == set(get_args(Keys))
    assert {preset.write_back for preset in presets} == set(get_args(WriteBack)) - {"last-writer", "versioned", "none"}


@pytest.mark.parametrize("lookup", sorted(PREFIX_LOOKUPS))
@pytest.mark.parametrize(
    ("change", "told", "option"),
    [
        ({"mask": "bottom-right"}, "mask 'bottom-right'", "--mask exact"),
        ({"gap": "zero"}, "gap 'zero'", "--gap recompute"),
        ({"gap": "store"}, "gap 'store'", "--gap recompute"),
        ({"keys": "unmoved"}, "keys 'unmoved'", "--keys moved"),
        *[
            ({"write_back": value}, f"write-back {value!r}", "--write-back first-writer")
            for value in get_args(WriteBack)
            if value not in ("first-writer", "none")
        ],
        (
            {"mask": "bottom-right", "gap": "zero"},
            "mask 'bottom-right', gap 'zero'",
            "--mask exact --gap recompute",
        ),
    ],
)
def test_a_prefix_cache_has_no_other_switches(
    lookup: Lookup, change: dict[str, str], told: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = lookup.partition("-")[0]
    switches = replace(PRESETS[system], **change)  # type: ignore[arg-type]
    monkeypatch.setattr(models, "resolve_model", lambda name: pytest.fail(f"{name} was resolved"))
    for refused in (
        lambda: check_switches(switches),
        lambda: make_plan(8, "embedded", EngineSettings(switches=switches), ("none",), 3),
        lambda: open_engine(EngineSettings(switches=switches)),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert caught.value.message == (
            f"lookup {lookup!r} reuses exact prefixes and computes exactly: {told} says nothing there"
        )
        assert caught.value.hint == f"take --like {system}, or {option}"


@pytest.mark.parametrize("lookup", sorted(PREFIX_LOOKUPS))
@pytest.mark.parametrize("change", [{"write_back": "none"}, {"suffix": "after"}, {"deviation": "value"}])
def test_a_prefix_cache_may_be_without_write_back_and_leaves_the_rest_alone(
    lookup: Lookup, change: dict[str, str]
) -> None:
    check_switches(replace(PRESETS[lookup.partition("-")[0]], **change))  # type: ignore[arg-type]


def test_any_other_combination_is_allowed() -> None:
    for write_back in get_args(WriteBack):
        for keys in get_args(Keys):
            check_switches(Switches(write_back=write_back, keys=keys))


class Commands:
    """Runs a command line here, and gives what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: object) -> str:
        self.monkeypatch.setattr(sys, "argv", ["kvaudit", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 0
        return self.capsys.readouterr().out


@pytest.fixture
def kvaudit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capsys)


def test_the_switches_that_are_given_stand_in_the_manifest_and_in_the_report(kvaudit: Commands, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", rolling_trace(4, window=2))
    given = ("--like", "ideal", "--keys", "unmoved", "--write-back", "versions", "--lookup", "stop-at-miss")
    kvaudit("replay", trace, "--engine", "scripted", "--orders", "2", *given, "-o", tmp_path / "run")
    switches = open_run(tmp_path / "run").manifest["settings"]["switches"]
    assert switches == asdict(replace(PRESETS["ideal"], keys="unmoved", write_back="versions", lookup="stop-at-miss"))
    told = " ".join(kvaudit("report", tmp_path / "run").split())
    assert all(f"{name} {value}" in told for name, value in (("keys", "unmoved"), ("write back", "versions")))


def test_the_presets_are_listed_with_every_switch(kvaudit: Commands) -> None:
    lines = kvaudit("engines", "--presets").splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    for line, (name, preset) in zip(lines, PRESETS.items(), strict=True):
        assert PRESET_NOTES[name] in line
        for switch, value in asdict(preset).items():
            assert value is None or f"{switch.replace('_', ' ')} {value}" in line
