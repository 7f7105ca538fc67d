"""`kvaudit replay --compare-url`: two deployments side by side on one trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import orjson
import typer

from kvaudit.cli.outputs import write_file
from kvaudit.engines import Capabilities, EngineSettings
from kvaudit.errors import UsageError
from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import interval, names, percent

if TYPE_CHECKING:
    from kvaudit.deployments.comparing import Change, Compared, Outcome
    from kvaudit.engines.server.target import Target
    from kvaudit.records import Trace

FORMAT = "kvaudit deployments"
_EXIT_CODES: Mapping[Change, int] = {"same": 0, "changed": 1, "inconclusive": 4}


def compare_deployments(
    trace: Trace, settings: EngineSettings, other_url: str, other_model: str | None, output: Path, *, force: bool
) -> int:
    """Ask both, print what changed, write every answer to `output`, and return the exit code."""
    from kvaudit.deployments.comparing import outcome
    from kvaudit.engines.server.identity import same_address
    from kvaudit.engines.server.opening import opened_plainly
    from kvaudit.engines.server.options import read_options, server_url
    from kvaudit.wordings import Wordings

    options = read_options(settings.options, resets=False)
    other, theirs = server_url("compare-url", other_url), replace(settings, model=other_model or settings.model)
    if same_address(options.base_url, other) and theirs.model == settings.model:
        raise UsageError(
            "--compare-url and --base-url are one deployment", "give the other one's address, or --compare-model"
        )
    _check_place(output, force=force)
    Wordings().check(trace, Capabilities(policies=False, max_prompt_tokens=None))
    with ExitStack() as opened, _telling_of_interruption():
        before = opened_plainly(settings, options, options.base_url, options.key_variable)
        opened.callback(before.connection.close)
        after = opened_plainly(theirs, options, other, options.other_key_variable)
        opened.callback(after.connection.close)
        rows = _asked(trace, before, after)
    found = outcome(rows)
    for line in (*_deployment_lines((before, after), found), *_outcome_lines(found)):
        typer.echo(line)
    write_file(lambda file: file.writelines(_file(trace, (before, after), rows)), output)
    typer.echo(f"Answers: {visible(str(output))}")
    return _EXIT_CODES[found.change]


def _check_place(output: Path, *, force: bool) -> None:
    """Whether a file can be written there: asked before the servers are, whose answers would be lost."""
    try:
        if output.is_dir():
            raise UsageError(f"{output} is a folder", "name a file with -o")
        if output.exists() and not force:
            raise UsageError(f"{output} is there already", "choose another file with -o, or --force to replace it")
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.is_file() or not output.exists():
            NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}.").close()
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror or error}", "choose another place with -o") from error


def _asked(trace: Trace, before: Target, after: Target) -> tuple[Compared, ...]:
    from kvaudit.cli.progress import progress_on_stderr
    from kvaudit.deployments.asking import PASSES, compared

    with progress_on_stderr() as progress:
        progress.begin(2 * PASSES * len(trace.requests), 0)
        return compared(trace, before, after, progress.served)


@contextmanager
def _telling_of_interruption() -> Iterator[None]:
    from kvaudit.cli.progress import ReplayInterruptedError

    try:
        yield
    except KeyboardInterrupt as stop:
        raise ReplayInterruptedError(
            "interrupted: nothing was compared, and no answer is kept", "the same command begins anew"
        ) from stop


def _deployment_lines(targets: Sequence[Target], found: Outcome) -> Iterator[str]:
    noises = (found.noise_before, found.noise_after)
    for name, target, noise in zip(("before", "after"), targets, noises, strict=True):
        told = "" if noise is None else f"; {percent(noise.value)} of its answers differ from run to run"
        yield visible(f"{name}: {target.connection.base_url}, model {target.manner.model}{told}")


def _outcome_lines(found: Outcome) -> Iterator[str]:
    if found.answered < found.requests:
        refused = found.requests - found.answered
        yield f"{refused:,} of {found.requests:,} requests were answered by neither, and are not compared."
    if found.empty:
        yield f"{found.empty:,} of {found.answered:,} answers are empty, and are not compared."
    if noisy := found.answered - found.empty - found.steady:
        yield f"{noisy:,} of {found.answered:,} answers vary from run to run, and are not compared."
    if found.share is None:
        yield "Inconclusive: nothing was compared."
        return
    yield (
        f"{len(found.changed):,} of {found.steady:,} answers changed though each deployment gives its own again: "
        f"{percent(found.share.value)} (95 % interval {interval(found.share)} %)."
    )
    if found.changed:
        alone = f" One of the deployments does not answer {found.refused:,} of them." if found.refused else ""
        yield f"Changed: {names(found.changed)}.{alone}"
    if found.change == "inconclusive":
        yield (
            f"Inconclusive: answers that vary from run to run could explain {percent(found.explained)} of all."
            if found.changed
            else f"Inconclusive: only {found.steady:,} of {found.requests:,} requests could be compared."
        )


def default_file(trace: Path, settings: EngineSettings, other_url: str) -> Path:
    """The same for the same trace and servers."""
    told = orjson.dumps([settings.model, dict(settings.options), other_url], option=orjson.OPT_SORT_KEYS)
    return Path("runs") / f"{trace.name.partition('.')[0] or 'trace'}-deployments-{sha256(told).hexdigest()[:8]}.json"


def _file(trace: Trace, targets: Sequence[Target], rows: Sequence[Compared]) -> Iterator[str]:
    def described(target: Target) -> Mapping[str, Any]:
        return {
            "server": target.connection.base_url,
            "model": target.manner.model,
            "answers_as": target.claims.model,
            **target.facts(),
        }

    data = {
        "format": FORMAT,
        "version": 1,
        "trace": {"digest": trace.digest, "source": trace.source, "requests": len(trace.requests)},
        "before": described(targets[0]),
        "after": described(targets[1]),
        "requests": [
            {"request_id": row.request_id, "became": row.became, "before": row.before, "after": row.after}
            for row in rows
        ],
    }
    yield orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
