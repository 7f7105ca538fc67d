"""The manifest of a run: enough to know what was run, on what, and to run it again."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from kvaudit import __version__
from kvaudit.errors import RunError
from kvaudit.plan import Plan
from kvaudit.records import Trace
from kvaudit.schema import SCHEMA_VERSION
from kvaudit.store.layout import FORMAT, MANIFEST, check_schema_version

UNFINISHED = "unfinished"
FINISHED = "finished"

Manifest = dict[str, Any]

LIMITS = frozenset({"max_noise", "max_retried"})
"""Settings that no answer depends on."""
_LIBRARIES = ("numpy", "pyarrow", "torch", "transformers", "tokenizers", "safetensors", "gguf", "scipy", "statsmodels")


def settings_digest(trace_digest: str, plan: Plan) -> str:
    """SHA-256 over what decides every answer: two runs with the same digest may share a folder."""
    return _digest(__version__, SCHEMA_VERSION, trace_digest, plan.as_data(), _arms(plan))


def _digest(version: str, schema: int, trace: str, settings: Mapping[str, Any], arms: list[dict[str, Any]]) -> str:
    identity = {"kvaudit": version, "schema": schema, "trace": trace, "settings": settings, "arms": arms}
    return sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _arms(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "arm_id": arm.arm_id,
            "policy": arm.policy,
            "order": arm.order.name,
            "order_seed": arm.order.seed,
            "control": arm.control,
        }
        for arm in plan.arms
    ]


def _policies(plan: Plan) -> dict[str, dict[str, Any]]:
    """Where each policy came from and every parameter that it was made with, defaults too.

    Outside the digest: no answer depends on where a file lies, and names and source digests tell the rest.
    """
    return {spec.name: {"target": _shown(spec.target), "parameters": spec.values()} for spec in plan.specs}


def _shown(path: str) -> str:
    """A path as text that JSON can hold, also where the file system's name is not UTF-8."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def new_manifest(trace: Trace, plan: Plan, max_noise: float, max_retried: float | None = None) -> Manifest:
    """`max_noise` is the share of answers that full prefill may give differently, `max_retried` that of an arm's
    requests that may have been sent to a server again, None where the engine is none; no answer depends on them."""
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kvaudit_version": __version__,
        "status": UNFINISHED,
        "created": now(),
        "finished": None,
        "settings_digest": settings_digest(trace.digest, plan),
        "trace": {"digest": trace.digest, "source": _shown(trace.source), "requests": len(trace.requests)},
        "settings": {**plan.as_data(), **limits(max_noise, max_retried)},
        "policies": _policies(plan),
        "arms": _arms(plan),
        "engine": None,
        "host": _host(),
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
    }


def limits(max_noise: float, max_retried: float | None = None) -> Manifest:
    """What of the settings may change from one replay to the next, under the manifest's names."""
    return {"max_noise": max_noise} | ({} if max_retried is None else {"max_retried": max_retried})


def read_manifest(folder: Path) -> Manifest:
    """Raises RunError for a folder that is no run of this schema version."""
    path = folder / MANIFEST
    try:
        manifest = orjson.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(
            f"{folder} is no kvaudit run: {_missing(folder)}", "give the folder that `kvaudit replay` printed"
        ) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: {error}", "replay the trace into another folder") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{path} is not a manifest of kvaudit's", "give the folder that `kvaudit replay` printed")
    check_schema_version(path, manifest.get("schema_version"))
    missing = [key for key in ("settings_digest", "trace", "settings", "arms", "status") if key not in manifest]
    if missing:
        raise RunError(f"{path} is damaged: it lacks {', '.join(missing)}", "replay the trace into another folder")
    if not _digest_holds(manifest):
        raise RunError(
            f"{path} was changed: its settings, trace or arms are not those that were replayed",
            "restore it, or replay the trace into another folder",
        )
    return manifest


def _digest_holds(manifest: Manifest) -> bool:
    """Whether settings, trace and arms are those that the digest in it, and in every table, was made over."""
    try:
        settings = {name: value for name, value in manifest["settings"].items() if name not in LIMITS}
        found = _digest(
            manifest["kvaudit_version"],
            manifest["schema_version"],
            manifest["trace"]["digest"],
            settings,
            manifest["arms"],
        )
    except (AttributeError, KeyError, TypeError):
        return False
    return bool(found == manifest["settings_digest"])


def manifest_bytes(manifest: Manifest) -> bytes:
    return orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def engine_facts(description: Mapping[str, object]) -> dict[str, Any]:
    """An engine's description and the processor under it, as they will be read back, so that two can be compared.

    An engine that computes elsewhere names the processor itself.
    """
    facts: dict[str, Any] = orjson.loads(
        orjson.dumps({"processor": processor_name(), **description}, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
    )
    return facts


def processor_name() -> str:
    """The processor's model, which decides the order in which floats are summed; its architecture where unnamed."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _missing(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder"
    return f"it has no {MANIFEST}" if folder.is_dir() else "it is a file"


def _host() -> dict[str, object]:
    return {
        "name": platform.node(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
