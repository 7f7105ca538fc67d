"""The Parquet folder: a run folder, a dataset of the Hub, and a card that no foreign text can break."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby

import duckdb
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from audited_folders import damaged_run, finish, scripted_run
from fakes import rolling_trace, run_scripted, scripted_settings
from markdown_it import MarkdownIt

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.verdict import Gates
from kvaudit.errors import EngineError, RunError
from kvaudit.plugins import load
from kvaudit.reports.parquet import MOST_BYTES, MOST_ROWS, write
from kvaudit.reports.parquet.card import dataset_card, escaped, size_category, yaml_scalar
from kvaudit.reports.words.findings import finding_details, finding_line
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.verdict import verdict_line
from kvaudit.schema import TABLES
from kvaudit.schema.reference import as_markdown, files_of, queries
from kvaudit.store import open_run

GATES = Gates(max_variation=0.05)
HOSTILE = 'x"\n---\nevil: [1, {\x00\x1b[31m\u2028\u202e\r\n# head | cell\n```\n<script>alert(1)</script> www.evil.com '
HOSTILE += "http://evil.com @you ![i](http://evil.com/i.png) {{ 7 * 7 }} $x$ ~~s~~ 'q' \\ \ufeff: - # \U0001f600"


def written(run, folder, gates=None):
    audit = analyse(run, gates, run.provenance)
    folder.mkdir()
    write(audit, run, folder)
    return audit


def front_matter(folder):
    head = re.match(r"---\n(.*?)\n---\n\n# ", (folder / "README.md").read_text(), re.DOTALL)
    return yaml.safe_load(head[1])


def body(folder):
    return (folder / "README.md").read_text().split("\n---\n", 1)[1]


def rendered(text):
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def flat(tokens):
    for token in tokens:
        yield token
        yield from flat(token.children or ())


def kinds(text):
    """What a Markdown text is made of, a run of plain text once."""
    found = ["text" if token.type == "text_special" else token.type for token in flat(rendered(text))]
    return [kind for kind, _ in groupby(found)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Without `comparisons` and `summary`: the report makes its own."""
    return damaged_run(tmp_path_factory.mktemp("parquet") / "run")


@pytest.fixture(scope="module")
def audit(run):
    return analyse(run, GATES, run.provenance)


@pytest.fixture(scope="module")
def folder(run, audit, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parquet") / "published"
    folder.mkdir()
    write(audit, run, folder)
    return folder


def test_the_format_is_found_by_its_name():
    assert load("reports", "parquet") is write


# A run folder


def test_the_folder_is_a_run_with_the_same_audit(folder, audit):
    run = open_run(folder)
    again = analyse(run, GATES, run.provenance)
    assert (again.verdict, again.findings) == (audit.verdict, audit.findings)
    assert again.figures == audit.figures
    assert again.examples == audit.examples


def test_every_table_is_there_with_fresh_comparisons_and_figures(folder, run, audit):
    fresh = {"comparisons": audit.comparisons, "summary": audit.summary}
    for name in TABLES:
        assert open_run(folder).table(name).equals(fresh[name] if name in fresh else run.table(name))


def test_stale_figures_are_not_copied(tmp_path):
    run = damaged_run(tmp_path / "run", trace=rolling_trace(6, window=3, prelude=True))
    finish(run)
    pq.write_table(pq.read_table(run.path / "summary.parquet").slice(1), run.path / "summary.parquet")
    audit = written(run, tmp_path / "published")
    assert open_run(tmp_path / "published").table("summary").equals(audit.summary)


def test_files_have_the_same_places_and_footers(folder, run):
    run_files = {file.relative_to(run.path) for file in run.path.rglob("*.parquet")}
    for place in run_files:
        assert pq.read_metadata(folder / place).metadata == pq.read_metadata(run.path / place).metadata
    mine = {file.relative_to(folder) for file in folder.rglob("*.parquet")}
    assert {str(place) for place in mine - run_files} == {"comparisons.parquet", "summary.parquet"}


def test_nothing_but_tables_and_texts_is_there(folder):
    names = {entry.name for entry in folder.iterdir()}
    assert names == {
        *(files_of(name).removesuffix("/*.parquet") for name in TABLES),
        *("README.md", "schema.md", "queries.sql", "manifest.json"),
    }
    assert (folder / "schema.md").read_text() == as_markdown()
    assert (folder / "queries.sql").read_text() == queries()


def test_the_manifest_is_the_runs(folder, run):
    assert orjson.loads((folder / "manifest.json").read_bytes()) == run.manifest


def test_all_queries_run_inside(folder):
    with contextlib.chdir(folder), duckdb.connect() as connection:
        connection.execute((folder / "queries.sql").read_text())
        assert connection.execute("select count(*) from 'summary.parquet' where metric = 'fidelity'").fetchone()[0]


def test_an_unfinished_run_has_what_is_finished(tmp_path):
    path, trace = tmp_path / "run", rolling_trace(6, window=3)
    with pytest.raises(EngineError):
        run_scripted(path, trace, scripted_settings("crash", at="r3"))
    written(open_run(path), tmp_path / "published")
    assert not (tmp_path / "published" / "references.parquet").exists()
    assert not (tmp_path / "published" / "observations").exists()
    configs = front_matter(tmp_path / "published")["configs"]
    assert {config["config_name"] for config in configs} <= {"requests", "summary"}
    assert not any("default" in config for config in configs)
    assert not any(arm.finished for arm in open_run(tmp_path / "published").arms())


def test_damage_in_the_run_is_an_error(tmp_path):
    run = damaged_run(tmp_path / "run", trace=rolling_trace(6, window=3, prelude=True))
    audit = analyse(run, None, run.provenance)
    (run.path / "references.parquet").unlink()
    (tmp_path / "published").mkdir()
    with pytest.raises(RunError, match=r"references\.parquet is missing"):
        write(audit, run, tmp_path / "published")


# Row groups


class Replaced:
    """A run's parts with some tables swapped for others."""

    def __init__(self, run, **tables):
        self.run, self.tables = run, tables

    def parts(self, name):
        if name in self.tables:
            yield files_of(name).replace("*", "arm"), self.tables[name]
        else:
            yield from self.run.parts(name)


def grown(run, name, rows, **columns):
    """The first row of a table so many times, with other values in some columns."""
    row = run.table(name).slice(0, 1).to_pylist()[0]
    made = [{**row, **{key: value(index) for key, value in columns.items()}} for index in range(rows)]
    return pa.Table.from_pylist(made, TABLES[name])


def groups(path):
    footer = pq.read_metadata(path)
    return [footer.row_group(index) for index in range(footer.num_row_groups)]


def test_row_groups_are_small_enough_for_the_viewer(tmp_path, run, audit):
    texts = {index: f"{index:03d}" * 333_334 for index in range(40)}
    observations = grown(run, "observations", 40, answer_text=texts.get)
    writes = grown(run, "writes", 2 * MOST_ROWS + 5, write_ordinal=lambda index: index)
    write(audit, Replaced(run, observations=observations, writes=writes), tmp_path)
    big, many = groups(tmp_path / "observations/arm.parquet"), groups(tmp_path / "writes/arm.parquet")
    assert max(group.total_byte_size for group in big) <= MOST_BYTES * 1.01
    assert len(big) < 8
    assert [group.num_rows for group in many] == [MOST_ROWS, MOST_ROWS, 5]
    assert pq.read_table(tmp_path / "observations/arm.parquet").equals(observations)
    assert pq.read_table(tmp_path / "writes/arm.parquet").equals(writes)


def test_a_row_larger_than_a_group_stands_alone(tmp_path, run, audit):
    lengths = [MOST_BYTES + 1, 3, MOST_BYTES + 1]
    observations = grown(run, "observations", 3, answer_text=lambda index: str(index) * lengths[index])
    write(audit, Replaced(run, observations=observations), tmp_path)
    assert [group.num_rows for group in groups(tmp_path / "observations/arm.parquet")] == [1, 1, 1]


def test_columns_are_compressed_and_have_a_page_index(folder):
    for file in folder.rglob("*.parquet"):
        for group in groups(file):
            columns = [group.column(index) for index in range(group.num_columns)]
            assert {column.compression for column in columns} == {"ZSTD"}
            assert all(column.has_offset_index and column.has_column_index for column in columns)


def test_a_flipped_bit_is_seen_by_its_checksum(tmp_path, run):
    written(run, tmp_path / "published")
    path = tmp_path / "published" / "observations" / "token-topk.reversed.parquet"
    column = groups(path)[0].column(TABLES["observations"].get_field_index("answer_text"))
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"token-topk\.reversed\.parquet"):
        open_run(tmp_path / "published").table("observations")


def test_one_part_at_a_time_is_in_memory(tmp_path, run, audit):
    held = []

    class Watched(Replaced):
        def parts(self, name):
            if name == "provenance":
                for arm in range(4):
                    held.append(pa.total_allocated_bytes())
                    yield f"provenance/{arm}.parquet", self.part(arm)
            else:
                yield from super().parts(name)

        def part(self, arm):
            return grown(run, "provenance", 20, context_hash_now=lambda index: f"{arm}{index}" * 100_000)

    write(audit, Watched(run), tmp_path)
    assert max(held) - held[0] < 2_000_000


# The dataset card


def test_there_is_one_config_a_table_and_observations_come_first(folder):
    head = front_matter(folder)
    assert [config["config_name"] for config in head["configs"]] == [
        "observations",
        *(name for name in TABLES if name != "observations"),
    ]
    assert [config["config_name"] for config in head["configs"] if config.get("default")] == ["observations"]
    for config in head["configs"]:
        assert list(folder.glob(config["data_files"]))
    assert head["pretty_name"] == "kvaudit run of rolling.jsonl"
    assert head["size_categories"] == ["n<1K"]
    assert "kvaudit" in head["tags"]
    assert "license" not in head


def test_a_table_without_rows_has_no_config(tmp_path):
    run = scripted_run(tmp_path / "run", rolling_trace(6, window=3), capacity=None)
    assert run.table("evictions").num_rows == 0
    written(run, tmp_path / "published")
    names = {config["config_name"] for config in front_matter(tmp_path / "published")["configs"]}
    assert names == set(TABLES) - {"evictions"}
    assert "| `evictions` | 0 | `evictions/*.parquet` |" in body(tmp_path / "published")


def test_the_card_says_what_was_found_and_how_to_load_it(folder, run, audit):
    text = body(folder)
    assert (audit.verdict.outcome, len(audit.verdict.gates)) == ("fail", 2)
    for sentence in (verdict_line(audit.verdict), *map(gate_sentence, audit.verdict.gates)):
        assert f"\n{escaped(sentence)}\n" in text
    for finding in audit.findings:
        assert f"\n- {escaped(finding_line(finding, audit.figures))}\n" in text
        assert all(f"\n  - {escaped(sentence)}\n" in text for sentence in finding_details(finding)[1:])
    assert "belong to their owners" in text
    assert 'load_dataset("path/to/this/folder", "observations", split="train")' in text
    assert "duckdb < queries.sql" in text
    assert "| settings.switches.mask | bottom-right |" in text
    assert f"| `observations` | {run.table('observations').num_rows} |" in text
    assert as_markdown(level=2) in text


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1_000, "1K<n<10K"),
        (9_999, "1K<n<10K"),
        (1_000_000, "1M<n<10M"),
        (999_999_999, "100M<n<1B"),
        (1_000_000_000, "n>1B"),
    ],
)
def test_sizes_are_named_as_the_hub_names_them(rows, name):
    assert size_category(rows) == name


def test_foreign_text_is_text_in_yaml():
    assert yaml.safe_load(f"a: {yaml_scalar(HOSTILE)}\nb: 1") == {"a": yaml.safe_load(yaml_scalar(HOSTILE)), "b": 1}
    assert "evil" in yaml.safe_load(yaml_scalar(HOSTILE))


@pytest.mark.parametrize(
    "text", [HOSTILE, "- a", "+ a", "= a", "1. a", "2) a", "# a", "> a", "    a", "[a]: http://b", "*a*", "`a", "a\\"]
)
def test_foreign_text_is_plain_text_in_markdown(text):
    paragraph = ["paragraph_open", "inline", "text", "paragraph_close"]
    item = ["bullet_list_open", "list_item_open", *paragraph, "list_item_close", "bullet_list_close"]
    shown = escaped(text)
    assert kinds(shown) == paragraph
    assert kinds(f"- {shown}") == item
    assert kinds(f"| a |\n| --- |\n| {shown} |") == kinds("| a |\n| --- |\n| b |")
    assert not re.search(r"www\.|[^\\]://|[^\\]@", shown)


def test_a_hostile_run_survives_whole(tmp_path):
    trace = rolling_trace(6, window=3, prelude=True)
    requests = [
        replace(request, request_id=f"{HOSTILE}{request.ordinal}", expected="y" * 1_000_000)
        for request in trace.requests
    ]
    run = damaged_run(tmp_path / "run", trace=replace(trace, requests=tuple(requests), source=HOSTILE))
    audit = written(run, tmp_path / "published", GATES)
    assert audit.verdict.outcome == "fail"
    assert open_run(tmp_path / "published").table("observations").equals(run.table("observations"))
    head = front_matter(tmp_path / "published")
    assert set(head) == {"pretty_name", "size_categories", "tags", "configs"}
    assert head["configs"][0]["config_name"] == "observations"
    tokens = list(flat(rendered(body(tmp_path / "published"))))
    assert not [token for token in tokens if token.type.startswith("html") or token.type in ("image", "s_open")]
    assert {token.attrs["href"] for token in tokens if token.type == "link_open"} == {
        "https://huggingface.co/docs/datasets",
        "https://duckdb.org",
    }
    headings = [token for token in tokens if token.type == "heading_open" and token.tag == "h1"]
    assert len(headings) == 1
    assert "{{ 7 \\* 7 }}" in body(tmp_path / "published")


def test_a_request_id_of_a_megabyte_does_not_make_a_card_of_one(audit):
    findings = tuple(replace(finding, examples=("z" * 1_000_000,)) for finding in audit.findings)
    card = dataset_card(replace(audit, findings=findings), {"observations": 1})
    assert len(card) < 60_000
    assert "zzz" in card


# The real libraries

_LOAD = """
import sys, datasets
datasets.disable_progress_bars()
folder, cache, *names = sys.argv[1:]
for name in names:
    table = datasets.load_dataset(folder, name, split="train", cache_dir=cache)
    print(name, table.num_rows, *table.column_names)
print("default", *datasets.load_dataset(folder, split="train", cache_dir=cache).column_names)
"""


def test_the_datasets_package_loads_every_config(folder, run, audit, tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", _LOAD, str(folder), str(tmp_path / "cache"), *TABLES]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    fresh = {"comparisons": audit.comparisons, "summary": audit.summary}
    expected = {name: fresh[name] if name in fresh else run.table(name) for name in TABLES}
    assert ran.stdout.splitlines() == [
        *(f"{name} {table.num_rows} {' '.join(table.column_names)}" for name, table in expected.items()),
        f"default {' '.join(TABLES['observations'].names)}",
    ]
