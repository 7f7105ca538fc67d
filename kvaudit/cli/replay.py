"""`kvaudit replay`: run every arm of an audit over a trace, then say what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.analysis.limits import MAX_NOISE, MAX_RETRIED
from kvaudit.cli.progress import ReplayInterruptedError
from kvaudit.cli.servers import SERVER, compared_deployments, resets_note, server_options
from kvaudit.cli.values import (
    default_run_folder,
    left_out_notes,
    name_and_value,
    no_limit_note,
    preset_with,
    report_command,
    size_in_bytes,
)
from kvaudit.engines import PRESETS, Deviation, EngineSettings, Gap, Keys, Lookup, Mask, Suffix, WriteBack
from kvaudit.engines.server.presets import PRESETS as RESETS
from kvaudit.errors import UsageError
from kvaudit.records import DEFAULT_MAX_TOKENS
from kvaudit.study.grid import AXES, Kind

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.plan import Plan
    from kvaudit.records import Trace
    from kvaudit.store import RunFolder

EXAMPLES = """\b
Examples:
  kvaudit replay trace.jsonl.gz
  kvaudit replay trace.jsonl --orders 5 --policy token-topk --policy none -o runs/nightly
  kvaudit replay trace.jsonl --policy legolink:k=8 --policy ./my_policy.py:MyPolicy:spread=0.25
  kvaudit replay trace.jsonl --like ideal --gap zero --recompute-ratio 0.05
  kvaudit replay trace.jsonl --study switches --policy token-topk -o studies/switches
  kvaudit replay trace.jsonl --model ./Qwen3-8B --device cuda --dtype bfloat16 --cache-capacity 20GiB
  kvaudit replay trace.jsonl --engine server --base-url http://gpu:8000/v1 --model Qwen/Qwen3-8B --reset vllm

\b
The same command goes on where it was interrupted. A finished replay exits with 0, or with 4 when the audit is
inconclusive; one in which the engine failed exits with 3, and a study goes on with its other policies and cells
before it does; one that was interrupted with Ctrl-C exits with 130.
"""

_DEFAULTS = EngineSettings()


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace to replay, made by `kvaudit record`.")],
    orders: Annotated[int, typer.Option(help="Orders: chronological, reversed, then seeded shuffles.")] = 5,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="A recomputation policy to audit: its name, pkg.module:Class or ./file.py:Class, with parameters as "
            "NAME:k=8,m=2; may be given again. [default: token-topk, document-aligned]",
        ),
    ] = None,
    recompute_ratio: Annotated[
        float, typer.Option(metavar="SHARE", help="The share of reusable tokens that is recomputed.")
    ] = _DEFAULTS.recompute_ratio,
    model: Annotated[
        str,
        typer.Option(metavar="MODEL", help="smollm2-135m, a model folder or a Hugging Face id; of a server, its name."),
    ] = _DEFAULTS.model,
    engine: Annotated[str, typer.Option(metavar="NAME", help="The engine; see `kvaudit engines`.")] = "embedded",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda.")] = _DEFAULTS.device,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = _DEFAULTS.dtype,
    like: Annotated[
        str,
        typer.Option(
            metavar="PRESET",
            help=f"Set the switches below as a real system does: {', '.join(PRESETS)} (`kvaudit engines --presets`).",
        ),
    ] = "lmcache",
    mask: Annotated[Mask | None, typer.Option(help="What recomputed rows may see.")] = None,
    gap: Annotated[Gap | None, typer.Option(help="What stands between chunks: separators and template glue.")] = None,
    lookup: Annotated[
        Lookup | None,
        typer.Option(help="Whether hits after a missed chunk are used, or nothing but exactly the same prefix."),
    ] = None,
    write_back: Annotated[WriteBack | None, typer.Option(help="What is written to the cache after a request.")] = None,
    keys: Annotated[
        Keys | None, typer.Option(help="Whether cached keys are moved to where a chunk stands now.")
    ] = None,
    suffix: Annotated[
        Suffix | None, typer.Option(help="Whether what follows the last hit is among the recomputed rows.")
    ] = None,
    deviation: Annotated[Deviation | None, typer.Option(help="Whether keys or values rank the tokens.")] = None,
    check_layer: Annotated[
        int | None,
        typer.Option(metavar="LAYER", min=0, max=10_000, help="The layer at which the policy selects. [default: 1]"),
    ] = None,
    cache_capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Evict above this size, e.g. 512MiB. [default: no limit]")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the engine's own; may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seeds the shuffles and the random policies.")] = _DEFAULTS.seed,
    max_noise: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="The largest share of answers that a second run of the same order may give differently.",
        ),
    ] = MAX_NOISE,
    max_retried: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="--engine server: the largest share of an arm's requests that may have been sent again.",
        ),
    ] = MAX_RETRIED,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="RUN", help="The run folder. [default: runs/TRACE-SETTINGS]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the audit that the run folder holds.")] = False,
    format_name: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="The trace's format, where it cannot be told.")
    ] = None,
    study: Annotated[
        Kind | None,
        typer.Option(help="Run a grid of audits over what the study is of; options that are given keep their value."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="--engine server: its address, up to /v1, http://HOST:8000/v1.")
    ] = None,
    api: Annotated[
        str | None, typer.Option(metavar="API", help="chat or completions. [default: as each request of the trace]")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="BY",
            help="Where full prefill comes from: url (--reference-url), salt (a cache_salt for each request) or reset "
            "(before each request). [default: the first of these that works]",
        ),
    ] = None,
    reference_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model on a server that reuses nothing.")
    ] = None,
    reset: Annotated[
        str | None, typer.Option(metavar="SERVER", help=f"Empty the cache as it is done at {', '.join(RESETS)}.")
    ] = None,
    reset_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Empty the cache by this call; with --reset lmcache, its server. A run keeps host and path in clear; "
            "of a user and a query there, of --reset-body and of --reset-command nothing but a digest.",
        ),
    ] = None,
    reset_method: Annotated[
        str | None, typer.Option(metavar="METHOD", help="How --reset-url is called. [default: POST]")
    ] = None,
    reset_body: Annotated[str | None, typer.Option(metavar="JSON", help="What is sent to --reset-url.")] = None,
    reset_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Empty the cache by a shell command, such as a container's restart."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long a server may send nothing. [default: 300]"),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(metavar="COUNT", help="How often a request is sent again; each is recorded. [default: 3]"),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long a busy server is asked to empty its cache. [default: 120]"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="Requests of an order that are under way at a time: a part of the audit, since it may change answers. "
            "[default: 1]",
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The environment variable with the key. [default: KVAUDIT_API_KEY]"),
    ] = None,
    other_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The same for --reference-url and --compare-url. [default: KVAUDIT_OTHER_API_KEY]",
        ),
    ] = None,
    compare_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="In place of an audit: ask this server the same, and say which answers changed; -o names a file. "
            "Exit code: 0 none, 1 some, beyond what varies from run to run, 4 inconclusive.",
        ),
    ] = None,
    compare_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model's name at --compare-url. [default: the same]")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM certificates that are trusted in place of public ones.")
    ] = None,
) -> None:
    """Replay a trace in several orders and under controls, and hold every answer against full prefill."""
    settings = EngineSettings(
        model=model,
        device=device,
        dtype=dtype,
        recompute_ratio=recompute_ratio,
        switches=preset_with(
            like,
            mask=mask,
            gap=gap,
            lookup=lookup,
            write_back=write_back,
            keys=keys,
            suffix=suffix,
            deviation=deviation,
            check_layer=check_layer,
            capacity_bytes=None if cache_capacity is None else size_in_bytes(cache_capacity),
        ),
        seed=seed,
        options=dict(name_and_value(text) for text in option or ()) | server_options(context, engine),
    )
    for name, limit in (("noise", max_noise), ("retried", max_retried)):
        if not 0 <= limit <= 1:
            raise UsageError(f"--max-{name} is {limit}", "give a share from 0 to 1, such as 0.01")
    from kvaudit.plan import make_plan
    from kvaudit.reports.escape import visible
    from kvaudit.reports.words.verdict import headline
    from kvaudit.store import new_manifest, open_folder
    from kvaudit.traces import read_trace

    recorded = read_trace(trace, format_name)
    for told in left_out_notes(recorded):
        typer.echo(visible(told), err=True)
    if note := no_limit_note(
        recorded.requests, DEFAULT_MAX_TOKENS, "`kvaudit record import --max-tokens` sets another limit"
    ):
        typer.echo(note, err=True)
    if compare_url is not None:
        raise typer.Exit(compared_deployments(context, recorded, settings))
    if study is not None:
        from kvaudit.cli.study import replay_study

        fixed = frozenset(axis for axis in AXES if _is_given(context, axis))
        code = replay_study(
            study, trace, recorded, engine, settings, policy or (), orders, fixed, max_noise, output, force
        )
        raise typer.Exit(code)
    plan = make_plan(len(recorded.requests), engine, settings, policy or (), orders)
    bearable = (max_noise, max_retried if engine == SERVER else None)
    manifest = new_manifest(recorded, plan, *bearable)
    path = output or default_run_folder(trace, manifest["settings_digest"])
    with open_folder(path, manifest, force=force) as folder:
        left = [arm for arm in plan.arms if arm.arm_id not in folder.finished]
        if left and engine == SERVER:
            typer.echo(resets_note(left, len(recorded.requests), settings.options), err=True)
        audit = _audited(recorded, plan, folder, *bearable)
    if not left:
        finished = audit.manifest["finished"]
        typer.echo(
            f"nothing was replayed: all {len(plan.arms)} arms were finished on {finished}; --force replays them",
            err=True,
        )
    for line in (*headline(audit), f"Report: {report_command(path)}"):
        typer.echo(line)
    raise typer.Exit(audit.verdict.exit_code)


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _audited(trace: Trace, plan: Plan, folder: RunFolder, max_noise: float, max_retried: float | None) -> Audit:
    from kvaudit.analysis.audit import analyse
    from kvaudit.cli.progress import progress_on_stderr
    from kvaudit.plugins import load
    from kvaudit.replay import replay as run_arms
    from kvaudit.schema import QUERIES
    from kvaudit.schema.reference import queries

    try:
        with progress_on_stderr() as progress:
            run_arms(trace, lambda: load("engines", plan.engine)(plan.settings), plan, folder, progress)
        folder.set_limits(max_noise, max_retried)
        audit = analyse(folder.run, provenance=folder.run.provenance)
        folder.write_table("comparisons", audit.comparisons.to_batches())
        folder.write_table("summary", audit.summary.to_batches())
        folder.write_text(QUERIES, queries())
    except KeyboardInterrupt as stop:
        arms = folder.run.arms()
        finished = sum(arm.finished for arm in arms)
        raise ReplayInterruptedError(
            f"interrupted: {finished} of {len(arms)} arms are finished and kept in {folder.path}",
            "the same command goes on from there",
        ) from stop
    return audit
