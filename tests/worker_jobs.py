"""Jobs for tests of the worker: prompts out of stretches of token ids with a separator between them."""

from kvaudit.engines.vllm.worker.job import Job
from kvaudit.engines.vllm.worker.ledger import content_id
from kvaudit.records import Prompt, PromptSegment

SEPARATOR = (907, 216)


def prompt_of(*parts, separator=SEPARATOR):
    """(kind, ids) each; a separator stands between two."""
    ids, segments = [], []

    def add(kind, part):
        segments.append(PromptSegment(kind, content_id(part), len(ids), len(ids) + len(part)))
        ids.extend(part)

    for index, (kind, part) in enumerate(parts):
        if index and separator:
            add("separator", separator)
        add(kind, part)
    return Prompt(tuple(ids), tuple(segments))


def job_of(*parts, request_id="r", policy=None, ratio=0.5, mode=None):
    mode = mode or ("own" if policy is None else "policy")
    return Job(request_id, "request", prompt_of(*parts), mode, ratio, 0, policy)
