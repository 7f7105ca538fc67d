import shlex
from pathlib import Path

import pytest

from kvaudit.cli.values import default_run_folder, name_and_value, preset_with, report_command, size_in_bytes
from kvaudit.engines import PRESETS
from kvaudit.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2_000_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("10kb", 10_000),
        ("64KiB", 65_536),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "big", "-5MiB", "5 bananas", "1e9", "MiB", "0x10", "1.2.3GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        size_in_bytes(text)


def test_switches_override_their_preset():
    assert preset_with("epic") == PRESETS["epic"]
    changed = preset_with("epic", gap="zero", check_layer=0, mask=None)
    assert (changed.gap, changed.check_layer, changed.mask) == ("zero", 0, PRESETS["epic"].mask)


def test_an_unknown_preset_is_refused():
    with pytest.raises(
        UsageError, match=r"unknown preset 'llama' \(known: lmcache, cacheblend, epic, ideal, .*, sglang\)"
    ):
        preset_with("llama")


def test_engine_options():
    assert name_and_value("fault=none") == ("fault", "none")
    assert name_and_value("where=a=b") == ("where", "a=b")
    for text in ("fault", "=none", ""):
        with pytest.raises(UsageError, match="is not an option of an engine"):
            name_and_value(text)


@pytest.mark.parametrize(
    ("trace", "folder"),
    [
        ("data/rolling.jsonl.gz", "runs/rolling-0123abcd"),
        ("a b/my trace.v2.json", "runs/my-trace.v2-0123abcd"),
        ("-", "runs/trace-0123abcd"),
        (".jsonl", "runs/jsonl-0123abcd"),
    ],
)
def test_the_default_folder_names_trace_and_settings(trace, folder):
    assert default_run_folder(Path(trace), "0123abcd" * 8) == Path(folder)


@pytest.mark.parametrize("path", ["runs/a", "my runs/it's", "-x", "$HOME/run"])
def test_the_report_command_is_one_that_a_shell_reads(path):
    command = shlex.split(report_command(Path(path)))
    assert command[:2] == ["kvaudit", "report"]
    assert Path(command[2]) == Path(path)
    assert not command[2].startswith("-")
