"""Redaction on the command line: which detectors, under which salt, and what is said of what was replaced."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli.recorded import counted, say
from kvaudit.errors import KvauditError, UsageError
from kvaudit.redaction.builtin import KEY, SUMMARIES
from kvaudit.reports.escape import visible

if TYPE_CHECKING:
    from kvaudit.records import Request
    from kvaudit.redaction.detectors import Detector
    from kvaudit.redaction.requests import ChangedSegment, RequestRedactor

SALT_VARIABLE = "KVAUDIT_REDACT_SALT"
HEADER = "redacted"
_SHORTEST_SALT = 16
_SEGMENTS_SHOWN = 3
_DETECTORS = "\n".join(f"  {name + ':':<7} {summary}" for name, summary in SUMMARIES.items())

NOT_LOOKED_FOR = (
    "names, postal addresses, national phone numbers, bank accounts, passwords that nothing announces, "
    "encoded text and images are not looked for"
)

NOTES = f"""\b
Redaction (--redact) puts [EMAIL-3f9a1c2b] in the place of a value: in texts, ids,
sessions, stop strings, expected answers and the header. The same value has the same
placeholder, so that segments that recur still recur. Detectors:
{_DETECTORS}
Placeholders come from a salt that is made for each command and kept nowhere. Set
{SALT_VARIABLE} to {_SHORTEST_SALT} characters or more for the same placeholders in
several commands, and keep it as secret as the values. It can miss things:
{textwrap.fill(NOT_LOOKED_FOR, 80)}.
It can replace what is harmless, too: between the two, it replaces.
A capture of the proxy holds everything, raw requests too: import it with --redact, and
share what that writes. See kvaudit inspect TRACE --secrets.
"""

Redact = Annotated[
    bool, typer.Option("--redact", help=f"Put placeholders for secrets and personal data: {', '.join(SUMMARIES)}.")
]
RedactOnly = Annotated[
    str | None, typer.Option("--redact-only", metavar="NAMES", help="Redact these only, with commas between them.")
]
RedactPatterns = Annotated[
    list[str] | None,
    typer.Option("--redact-pattern", metavar="NAME=REGEX", help="Redact what this matches too; may be given again."),
]
Secrets = Annotated[
    bool,
    typer.Option(
        "--secrets",
        help="Look for secrets and personal data, before a file is shared, and nothing else. It rather names what is "
        f"harmless than miss something, and misses things all the same: {NOT_LOOKED_FOR}.",
    ),
]
SecretPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--secret-pattern", metavar="NAME=REGEX", help="With --secrets: look for this too; may be given again."
    ),
]


class Redaction:
    """What one command is to redact."""

    def __init__(self, only: str | None, patterns: Sequence[str]) -> None:
        """Raises UsageError for unknown names, broken patterns and a salt that is too short."""
        from kvaudit.redaction.redactor import Redactor
        from kvaudit.redaction.requests import RequestRedactor

        self._redactor = Redactor(chosen_detectors(only, patterns), _salt())
        self._requests: RequestRedactor = RequestRedactor(self._redactor)
        self._tokens: list[tuple[ChangedSegment, int, int]] | None = None
        self._total = 0

    def apply(
        self, requests: Sequence[Request], header: Mapping[str, object], model: str | None = None
    ) -> tuple[list[Request], dict[str, object]]:
        """The requests and the header as they may be shared; `model` names the tokenizer that counts what changed."""
        redacted = self._requests.redact(requests)
        self._total = len(redacted)
        kept = self._requests.redact_header(header)
        if model is not None and self._requests.changed:
            self._tokens = list(_counted_tokens(self._requests.changed, model))
        before = kept.get(HEADER)
        runs = [*(before if isinstance(before, list) else ()), self._as_data(model)]
        return redacted, kept | {HEADER: runs}

    def hide(self, text: str) -> str:
        """The text as it may be shown, with the placeholders that the trace has; it is not counted."""
        return self._redactor.redact(text).text

    def say(self) -> None:
        for line in self._report():
            say(visible(line))

    def _as_data(self, model: str | None) -> dict[str, object]:
        tally, changed = self._requests.tally, self._requests.changed
        data: dict[str, object] = {
            "detectors": list(self._redactor.names),
            "values": sum(map(len, tally.placeholders.values())),
            "places": tally.places.total(),
            "requests": tally.changed_requests,
            "segments": len(changed),
        }
        if self._tokens is not None:
            _, before, after = zip(*self._tokens, strict=True)
            data |= {"tokenizer": model, "tokens_before": sum(before), "tokens_after": sum(after)}
        return data

    def _report(self) -> Iterator[str]:
        tally, names = self._requests.tally, self._redactor.names
        found = [name for name in names if tally.places[name]]
        if found:
            width = max(len("redacted"), *map(len, found))
            yield f"{'redacted':<{width}}  {'values':>7}  {'places':>7}  {'requests':>8}"
            for name in found:
                values = len(tally.placeholders[name])
                yield f"{name:<{width}}  {values:>7,}  {tally.places[name]:>7,}  {tally.requests[name]:>8,}"
        if rest := [name for name in names if name not in found]:
            yield f"redaction found no {', '.join(rest)} ({NOT_LOOKED_FOR})"
        if self._requests.changed:
            yield from self._changes()

    def _changes(self) -> Iterator[str]:
        changed = self._requests.changed
        where = (
            f"{counted(len(changed), 'text')} changed, "
            f"in {self._requests.tally.changed_requests:,} of {counted(self._total, 'request')}"
        )
        if self._tokens is None:
            yield f"{where}; their token counts may differ from now on (--model NAME counts them)"
            return
        _, before, after = zip(*self._tokens, strict=True)
        yield f"{where}: {sum(before):,} tokens before, {sum(after):,} after"
        ranked = sorted(self._tokens, key=lambda one: -abs(one[2] - one[1]))
        for segment, old, new in ranked[:_SEGMENTS_SHOWN]:
            if old != new:
                more = f" (in {counted(segment.requests, 'request')})" if segment.requests > 1 else ""
                yield f"  request {segment.request_id!r}, segment {segment.number}{more}: {old:,} -> {new:,} tokens"


def asked(redact: bool, only: str | None, patterns: Sequence[str] | None) -> Redaction | None:
    """None where nothing is to be redacted. Each of the options turns redaction on."""
    return Redaction(only, patterns or ()) if redact or only is not None or patterns else None


def shown(redaction: Redaction | None, text: str) -> str:
    return text if redaction is None else redaction.hide(text)


@contextmanager
def hiding(redaction: Redaction | None) -> Iterator[None]:
    """Errors name what they are about: with redaction, they do it without what is to be redacted, of which they show
    no part either.
    """
    if redaction is None:
        yield
        return
    from kvaudit.traces.fields import hiding_values

    try:
        with hiding_values(redaction.hide):
            yield
    except KvauditError as error:
        error.message = shown(redaction, error.message)
        error.hint = error.hint and shown(redaction, error.hint)
        error.args = (error.message,)
        raise


def chosen_detectors(only: str | None, patterns: Sequence[str]) -> list[Detector]:
    """The built-in detectors and the patterns, or those of them that `only` names, with commas between them.

    Raises UsageError for names that are unknown and patterns that are broken.
    """
    from kvaudit.models.fetch import cache_folder
    from kvaudit.redaction.builtin import built_in
    from kvaudit.redaction.patterns import user_detectors

    own = user_detectors(patterns, SUMMARIES)
    known = [*SUMMARIES, *(detector.name for detector in own)]
    names = known if only is None else [name.strip().lower() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown detector {unknown[0]!r:.80}", f"known: {', '.join(known)}")
    if not names:
        raise UsageError("no detector is named", f"known: {', '.join(known)}")
    kept_rules = cache_folder() / "key-rules"
    if KEY in names and not kept_rules.exists():
        say("the rules for keys are compiled, which takes some seconds, once")
    made = built_in([name for name in names if name in SUMMARIES], kept_rules)
    return made + [detector for detector in own if detector.name in names]


def _salt() -> bytes:
    given = os.environ.get(SALT_VARIABLE)
    if given is None:
        return os.urandom(32)
    if len(given) < _SHORTEST_SALT:
        raise UsageError(
            f"{SALT_VARIABLE} has {counted(len(given), 'character')}: placeholders could be guessed",
            f"set it to {_SHORTEST_SALT} or more, or leave it out for one that is made for this command",
        )
    return os.fsencode(given)


def _counted_tokens(changed: Iterable[ChangedSegment], model: str) -> Iterator[tuple[ChangedSegment, int, int]]:
    from kvaudit.models.reading import open_tokenizer

    encode = open_tokenizer(model).tokenizer.encode
    for segment in changed:
        yield segment, len(encode(segment.before)), len(encode(segment.after))
