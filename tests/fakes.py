"""Fakes and builders that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import orjson

from kvaudit.engines import Engine, EngineSettings, Switches
from kvaudit.engines.scripted import open_engine as open_scripted
from kvaudit.plan import make_plan
from kvaudit.records import Request, Segment, Trace
from kvaudit.replay import Progress, replay
from kvaudit.store import Run, new_manifest, open_folder, open_run


def segment(kind: str, text: str, **fields: object) -> Segment:
    return Segment(kind, sha256(text.encode()).hexdigest()[:16], text, **fields)


def rolling_trace(requests: int, window: int = 4, *, prelude: bool = False, max_tokens: int = 8) -> Trace:
    """A rolling window over documents d0, d1, ...: each request drops the oldest and appends a new one."""

    def prompt(first: int) -> tuple[Segment, ...]:
        parts = [segment("instruction", "Answer from the documents.")]
        for number in range(first, first + window):
            parts += [segment("separator", " # # "), segment("document", f"document {number} says {number * 7919}.")]
        return *parts, segment("separator", " # # ")

    built = tuple(
        Request(
            request_id=f"r{ordinal}",
            ordinal=ordinal,
            segments=(*prompt(ordinal), segment("query", f"What does document {ordinal} say?")),
            prelude=(prompt(ordinal - 1),) if prelude and ordinal else (),
            max_tokens=max_tokens,
        )
        for ordinal in range(requests)
    )
    return Trace(built, sha256(repr(built).encode()).hexdigest(), "rolling.jsonl")


def write_trace(path: Path, trace: Trace) -> Path:
    """A trace as a person would write it, segments spelled out."""

    def spelled_out(segments: Sequence[Segment]) -> list[dict[str, str]]:
        return [{"kind": part.kind, "text": part.text} for part in segments]

    lines = [
        {
            "request": request.request_id,
            "segments": spelled_out(request.segments),
            "prelude": [spelled_out(segments) for segments in request.prelude],
            "max_tokens": request.max_tokens,
        }
        for request in trace.requests
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    return path


class WordTokenizer:
    """One id a word, numbered as they come; an unknown id raises."""

    digest = "words"

    def __init__(self, leading_ids: tuple[int, ...] = ()) -> None:
        self.leading_ids = leading_ids
        self.words: list[str] = ["<s>", "</s>"]
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content.strip()), (None, "")]
        return [*pieces, (None, "<assistant>")]


def scripted_settings(fault: str = "none", *, capacity: int | None = None, **options: str) -> EngineSettings:
    return EngineSettings(
        switches=Switches(capacity_bytes=capacity), options={"fault": fault, **options}, recompute_ratio=0.5
    )


def run_scripted(
    path: Path,
    trace: Trace,
    settings: EngineSettings | None = None,
    *,
    policies: Sequence[str] = ("none", "token-topk"),
    orders: int = 3,
    open_engine: Callable[[EngineSettings], Engine] = open_scripted,
    progress: Progress | None = None,
    **folder: bool,
) -> Run:
    """Replay a trace on the scripted engine into a run folder, or go on in it."""
    settings = settings or scripted_settings()
    plan = make_plan(len(trace.requests), "scripted", settings, policies, orders)
    with open_folder(path, new_manifest(trace, plan, 0.0), **folder) as claimed:
        replay(trace, lambda: open_engine(settings), plan, claimed, progress)
    return open_run(path)
