import numpy as np
import pytest
from worker_jobs import job_of

from kvaudit.engines.vllm.worker.job import Blended, Chunk, Job, Record
from kvaudit.policies.tokens import TokenTopK

CHUNKS = (
    Chunk(0, 3, "a", loaded=True, stored=True),
    Chunk(5, 9, "b", loaded=True, stored=True),
    Chunk(9, 12, "c", loaded=True, stored=True),
    Chunk(14, 20, "d", loaded=False, stored=True),
)


def test_a_policy_comes_with_the_mode_that_asks_for_one():
    with pytest.raises(ValueError, match="prefill"):
        job_of(("query", (1, 2)), policy=TokenTopK(), mode="prefill")
    with pytest.raises(ValueError, match="policy"):
        job_of(("query", (1, 2)), mode="policy")


def test_a_record_comes_back_as_it_went():
    selected, deviation = np.array([1, 3]), np.array([0.5, 2.0, 0.0, 1.0], dtype=np.float32)
    record = Record("r", "prelude", "policy", chunks=CHUNKS, blended=Blended(4, 1, 2, selected, deviation), decided=0)
    back = Record.unpacked(record.packed())
    assert (back.part, back.chunks, back.decided) == ("prelude", CHUNKS, 0)
    assert back.blended.selected.tolist() == [1, 3]
    assert back.blended.deviation.dtype == np.float32


def test_what_is_no_job_is_refused():
    with pytest.raises(TypeError, match="Job"):
        Job.unpacked(Record("r", "request", "own").packed())
