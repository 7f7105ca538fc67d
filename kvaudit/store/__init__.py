"""The run folder (DESIGN 6): a manifest, Parquet tables with fixed schemas, and a lock.

    manifest.json                                     what was run, on what, with which settings
    requests.parquet  references.parquet              the trace as prompts; full-prefill answers with log-probabilities
    observations/ARM.parquet                          one part an arm, and the mark that the arm is finished
    selections/ARM.parquet                            which tokens were recomputed
    provenance/ARM.parquet  writes/ARM.parquet  evictions/ARM.parquet
                                                      the ledger: what was reused, and what came and went
    comparisons.parquet  summary.parquet              what the audit made of it
    queries.sql                                       questions to ask of the tables, for DuckDB

Every file is written under a temporary name, synced and renamed. Every Parquet footer carries the schema version and
the digests of trace and settings, so that no part is ever read as another run's.
"""

from kvaudit.store.folder import RunFolder, open_folder, remove_run
from kvaudit.store.manifest import new_manifest
from kvaudit.store.reading import PlannedArm, Run, open_run

__all__ = ["PlannedArm", "Run", "RunFolder", "new_manifest", "open_folder", "open_run", "remove_run"]
