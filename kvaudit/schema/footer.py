"""What the footer of a table's file says: which table it is, and of which run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvaudit.schema import SCHEMA_VERSION

FOOTER: Mapping[str, str] = MappingProxyType(
    {
        "kvaudit.table": "name of the table",
        "kvaudit.schema_version": "version of the schema on this page; readers refuse any other",
        "kvaudit.trace_digest": "SHA-256 over what was replayed, as in manifest.json",
        "kvaudit.settings_digest": "SHA-256 over all that decides an answer, as in manifest.json",
    }
)


def footer(table: str, trace_digest: str, settings_digest: str) -> dict[str, str]:
    """The key-value metadata of a file of this table and run."""
    return dict(zip(FOOTER, (table, str(SCHEMA_VERSION), trace_digest, settings_digest), strict=True))
