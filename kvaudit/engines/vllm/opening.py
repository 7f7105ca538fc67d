"""Opening the engine `lmcache`: settings checked, vLLM started, LMCache looked after."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvaudit.engines import PRESETS, EngineSettings
from kvaudit.engines.vllm import settings as lmcache_settings
from kvaudit.engines.vllm.chunking import Chunking
from kvaudit.engines.vllm.launch import HASH_SEED, Launch, Running
from kvaudit.engines.vllm.lmcache import LmcacheEngine
from kvaudit.engines.vllm.options import Options, check_own_switches, read_options
from kvaudit.engines.vllm.resetting import prove
from kvaudit.engines.vllm.settings import CAPACITY, CHECK_LAYERS, CHUNK_SIZE, RATIOS, SPECIAL_STRING, Finding, Setup
from kvaudit.engines.vllm.starting import Place, starting_arguments, with_more
from kvaudit.errors import EngineError, UsageError
from kvaudit.models.fetch import announce

EXTENSION = "kvaudit.engines.vllm.worker.extension.WorkerExtension"
DEFAULT_SEPARATOR = " # # "
_CPU_CAPACITY_GIB = "1"
"""LMCache takes all of its room when it starts, and its own default is 5 GiB; on a GPU that is left as it is."""
_FREE_SWITCHES = frozenset({"check_layer", "capacity_bytes"})


def open_engine(settings: EngineSettings) -> LmcacheEngine:
    """Start vLLM with LMCache and prove that it reuses and that it can be emptied.

    Raises UsageError for settings that would spoil an audit, PluginError for versions that are not supported,
    EngineError when it does not start or LMCache is not what it should be.
    """
    place, launch, separator, environment, found = _prepared(settings)
    lmcache_settings.refuse(found)
    for finding in found:
        announce(f"{finding.name}: {finding.wrong} ({finding.fix})")
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    running = Running(
        with_more(
            launch,
            {"kv_transfer_config": transfer, "worker_extension_cls": EXTENSION},
            environment,
        )
    )
    try:
        chunking = Chunking(separator, int(environment[CHUNK_SIZE]), place.tokenizer)
        told = {**environment, HASH_SEED: launch.environment[HASH_SEED]}
        engine = LmcacheEngine(running, place, settings, chunking, lmcache_settings.in_manifest(told))
        _check_health(engine.health, place, separator)
        prove(engine, separator, place.vocabulary, int(environment[CHUNK_SIZE]))
    except BaseException:
        running.close()
        raise
    return engine


def settings_findings(settings: EngineSettings) -> tuple[Finding, ...]:
    """What would spoil an audit or should be known, without starting anything. Raises UsageError for settings that are
    wrong in themselves and PluginError for versions that are not supported."""
    return _prepared(settings)[-1]


def _prepared(
    settings: EngineSettings,
) -> tuple[Place, Launch, tuple[int, ...], dict[str, str], tuple[Finding, ...]]:
    options = read_options("lmcache", settings)
    check_own_switches("lmcache", settings.switches, PRESETS["lmcache"], _FREE_SWITCHES)
    place = Place.of("lmcache", settings, options)
    separator, environment = lmcache_environment(place, settings, options, os.environ)
    launch = starting_arguments(place, settings, options, prefix_caching=options.prefix_caching is True)
    setup = _setup(place, options, separator, environment)
    return place, launch, separator, environment, lmcache_settings.findings(setup)


def lmcache_environment(
    place: Place, settings: EngineSettings, options: Options, given: Mapping[str, str]
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The token ids that stand between chunks, and LMCache's environment: the user's own, and kvaudit's settings.

    Raises UsageError where both set the same differently.
    """
    own = {name: value for name, value in given.items() if name.startswith(lmcache_settings.PREFIX)}
    switches = settings.switches
    ours = {CHECK_LAYERS: str(switches.check_layer), RATIOS: repr(settings.recompute_ratio)}
    if switches.capacity_bytes is not None:
        ours[CAPACITY] = repr(switches.capacity_bytes / 2**30)
    elif place.device == "cpu":
        own.setdefault(CAPACITY, _CPU_CAPACITY_GIB)
    tokenizer = place.tokenizer
    text = options.separator
    if text is None and SPECIAL_STRING in own:
        text = lmcache_settings.as_lmcache_reads(own[SPECIAL_STRING])
        separator = tuple(tokenizer.encode(text))
    else:
        text = DEFAULT_SEPARATOR if text is None else text
        separator = tuple(tokenizer.encode(text))
        told = lmcache_settings.separator_string(text, separator, tokenizer.leading_ids, tokenizer.encode)
        if told is None:
            raise UsageError(
                f"LMCache cannot be made to look for the separator {text!r} (token ids {list(separator)}): it drops "
                "the first id of what it is told",
                "take another separator for the trace",
            )
        ours[SPECIAL_STRING] = repr(told)
    for name, value in ours.items():
        if own.get(name, value) != value:
            raise UsageError(
                f"{name} is {own[name]!r} in the environment, and kvaudit sets it to {value!r}",
                f"unset it: {_OPTION_OF[name]} sets it",
            )
    return separator, {**lmcache_settings.DEFAULTS, **own, **ours}


_OPTION_OF = {
    CHECK_LAYERS: "--check-layer",
    RATIOS: "--recompute-ratio",
    CAPACITY: "--cache-capacity",
    SPECIAL_STRING: "--option separator=TEXT",
}


def _setup(place: Place, options: Options, separator: tuple[int, ...], environment: Mapping[str, str]) -> Setup:
    read = lmcache_settings.as_lmcache_reads(environment[SPECIAL_STRING])
    encoded = [*place.tokenizer.leading_ids, *place.tokenizer.encode(read)]
    return Setup(
        lmcache=environment,
        separator=separator,
        found_separator=tuple(encoded[1:]),
        architecture=place.architecture,
        rope_type=place.rope_type,
        layers=place.layers,
        longest=place.max_model_len,
        batched=options.max_num_batched_tokens or place.max_model_len,
        prefix_caching=options.prefix_caching is True,
        cuda_graphs=options.cuda_graphs,
    )


def _check_health(health: Mapping[str, Any], place: Place, separator: tuple[int, ...]) -> None:
    """What LMCache does in silence, and a run would not show."""
    connector = health.get("connector")
    if connector is None:
        raise EngineError("vLLM started without LMCache's connector")
    wrong = []
    if connector["trouble"]:
        wrong.append(str(connector["trouble"]))
    if not connector["hooked"]:
        wrong.append("kvaudit's hooks are not in force in vLLM's worker")
    if connector["roles"] != ["SCHEDULER", "WORKER"]:
        wrong.append(f"kvaudit sees LMCache's connectors {connector['roles']}, not both that serve a prompt")
    if not connector["blender"]:
        wrong.append("LMCache made no blender")
    if not connector["model_registered"]:
        wrong.append("the model is not registered with LMCache (LMCache issue 4131)")
    if connector["shim"] and place.device != "cpu":
        wrong.append("the CPU shim is in force on an accelerator")
    backends = connector["settings"].get("backends")
    if backends not in (None, ["LocalCPUBackend"]):
        wrong.append(f"it stores in {', '.join(backends)}, and kvaudit can empty and look into LocalCPUBackend only")
    found = connector["settings"].get("separator_ids")
    if found is not None and tuple(found) != separator:
        wrong.append(f"LMCache splits at the token ids {found}, not at {list(separator)}")
    if wrong:
        raise EngineError(f"LMCache is not what it should be: {'; '.join(wrong)}")
