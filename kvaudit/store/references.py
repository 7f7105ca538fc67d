"""Full-prefill answers, read back from disk so that every arm, today's or tomorrow's, is held against the same."""

from __future__ import annotations

from kvaudit.records import FULL_PREFILL, Reference
from kvaudit.store.reading import Run


class References:
    """By ordinal of the request. Kept as Arrow columns: a trace's log-probabilities are larger than its answers."""

    def __init__(self, run: Run) -> None:
        self._table = run.table("references").combine_chunks()
        observations = run.table("observations").select(["policy", "control", "request_id", "answer_ids"])
        self._answers = {
            row["request_id"]: tuple(row["answer_ids"] or ())
            for row in observations.to_pylist()
            if row["policy"] == FULL_PREFILL and row["control"] == "none"
        }

    def reference(self, ordinal: int) -> Reference:
        row = self._table.slice(ordinal, 1).to_pylist()[0]
        return Reference(tuple(row["generated_ids"]), row["top_ids"], row["top_logprobs"])

    def answer_ids(self, request_id: str) -> tuple[int, ...]:
        return self._answers[request_id]
