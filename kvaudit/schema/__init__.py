"""The Arrow schemas of a run's tables (DESIGN 6). Nullable columns are always present, types are never inferred.

tables.py     what every column is         values.py     words that columns hold
metrics.py    what every figure is         footer.py     what a file says of itself
queries.sql   questions for DuckDB         reference.py  all of it as a page
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

from kvaudit.schema.tables import DOCUMENTED

SCHEMA_VERSION = 1
QUERIES = "queries.sql"

TABLES: Mapping[str, pa.Schema] = MappingProxyType({name: table.schema for name, table in DOCUMENTED.items()})
