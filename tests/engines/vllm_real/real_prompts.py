"""The fixture's prompts under an engine's tokenizer, and an arm of an audit by hand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvaudit.prompts import Prompts
from kvaudit.records import Prompt, Sampling
from kvaudit.traces import read_trace

FIXTURE = Path(__file__).parents[3] / "fixtures" / "rolling.jsonl.gz"


@dataclass(frozen=True)
class Asked:
    request_id: str
    prelude: tuple[Prompt, ...]
    prompt: Prompt
    sampling: Sampling
    expected: str


def fixture_requests(engine, count):
    trace = read_trace(FIXTURE, None)
    prompts = Prompts(engine.tokenizer, engine.capabilities.vocabulary_size)
    return [
        Asked(
            request.request_id,
            tuple(prompts.prelude(request)),
            prompts.request(request),
            Sampling(request.max_tokens, request.stop),
            request.expected,
        )
        for request in islice(trace.requests, count)
    ]


def references(engine, requests):
    """Full prefill's answers as references, by request id."""
    return {
        asked.request_id: engine.serve(asked.request_id, "request", asked.prompt, asked.sampling, None).reference
        for asked in requests
    }


def arm(engine, requests, policy, references):
    """What was served of each request, from an empty cache, preludes served before."""
    state = engine.reset()
    assert not state.entries
    served = []
    for asked in requests:
        for prompt in asked.prelude:
            engine.serve(asked.request_id, "prelude", prompt, Sampling(0), policy)
        reference = references[asked.request_id]
        served.append(engine.serve(asked.request_id, "request", asked.prompt, asked.sampling, policy, reference))
    return served
