"""The dataset card: YAML that the Hugging Face Hub reads, then what the audit found and how to load the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import orjson
from jinja2 import Environment, StrictUndefined

from kvaudit.analysis.audit import section
from kvaudit.reports.escape import excerpt, visible
from kvaudit.reports.words.findings import details_beside_line, finding_line
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.verdict import verdict_line
from kvaudit.schema.reference import as_markdown, files_of

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

DEFAULT_CONFIG = "observations"
LONGEST_TEXT = 1_200
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B")
_LARGEST = "n>1B"
_MARKUP = re.compile(r"([\\`*_\[\]<>|~&#$@]|:(?=//))")
_BLOCK = re.compile(r"^([-+=]|\d+(?=[.)](?: |$)))")
_BARE_LINK = re.compile(r"(www)(?=\.)", re.IGNORECASE)


def dataset_card(audit: Audit, rows: Mapping[str, int]) -> str:
    """README.md of a folder that holds these tables. `rows` counts the rows of each."""
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.filters |= {"yaml": yaml_scalar, "text": escaped}
    template = environment.from_string(files(__package__).joinpath("card.md.jinja").read_text(encoding="utf-8"))
    names = sorted(rows, key=lambda name: name != DEFAULT_CONFIG)
    tables = [{"name": name, "files": files_of(name), "rows": rows[name]} for name in names]
    return template.render(
        source=str(section(audit.manifest, "trace").get("source")),
        size=size_category(rows.get(DEFAULT_CONFIG, 0)),
        tables=tables,
        # The Hub and `datasets` refuse a configuration without a row.
        configs=[table for table in tables if table["rows"]],
        default=DEFAULT_CONFIG,
        verdict=[verdict_line(audit.verdict), *map(gate_sentence, audit.verdict.gates)],
        findings=[(finding_line(finding, audit.figures), details_beside_line(finding)) for finding in audit.findings],
        settings=list(_settings(audit.manifest)),
        schema=as_markdown(level=2),
    )


def size_category(rows: int) -> str:
    """The Hub's name for a data set of so many rows."""
    return next((size for power, size in enumerate(_SIZES, 1) if rows < 1000 * 10 ** (power - 1)), _LARGEST)


def yaml_scalar(text: str) -> str:
    """Foreign text as a YAML string: made visible, then quoted as JSON, which YAML reads."""
    return orjson.dumps(visible(text)).decode()


def escaped(text: str) -> str:
    """Foreign text in Markdown: on one line, cut where it is long, and without markup, HTML, links or ends of cells."""
    plain = _MARKUP.sub(r"\\\1", excerpt(text.strip(), length=LONGEST_TEXT))
    return _BLOCK.sub(lambda found: _led(found[1]), _BARE_LINK.sub(r"\1\\", plain))


def _led(start: str) -> str:
    return f"{start}\\" if start.isdigit() else f"\\{start}"


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("trace", "settings", "engine", "libraries"):
        yield from _flat(name, section(manifest, name))


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _flat(f"{name}.{key}", below)
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, "unset" if value is None else str(value)
