"""Names of policies, engines, trace formats and reports, and how each is loaded: late, and by name.

A family member is one line in a table here; from outside, one entry point in `kvaudit.<family>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Literal

from kvaudit.errors import PluginError, UsageError

Standing = Literal["exact", "port", "described", "control"]
"""exact: follows published code or a formula. port: follows somebody else's port. described: follows a description, for
want of code. control: no paper has it; it makes the others meaningful."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """`target` is `module:attribute`; `summary` the one line that listings show; `needs` what it needs to work.

    `policies`: whether an engine takes recomputation policies. `settings`: those of `EngineSettings` that an engine
    without policies heeds beside model, seed and options. `digested`: an engine's options that may hold keys, of which
    a manifest keeps digests.
    `suffix`: how the files of a report end, `/` for a report that is a folder. `standing`: how closely a policy follows
    what was published, `source` where that stands.
    """

    name: str
    target: str
    summary: str
    needs: str = ""
    suffix: str = ""
    standing: Standing | None = None
    source: str = ""
    policies: bool = True
    settings: tuple[str, ...] = ()
    digested: tuple[str, ...] = ()


def _table(*plugins: Plugin) -> Mapping[str, Plugin]:
    return MappingProxyType({plugin.name: plugin for plugin in plugins})


BUILT_IN: Mapping[str, Mapping[str, Plugin]] = MappingProxyType(
    {
        "policies": _table(
            Plugin(
                "token-topk",
                "kvaudit.policies.tokens:TokenTopK",
                "the k tokens whose keys deviate most (LMCache's CacheBlend)",
                "deviation",
                standing="exact",
                source="LMCache, lmcache/v1/compute/blend/blender.py; arXiv:2405.16444",
            ),
            Plugin(
                "single-window",
                "kvaudit.policies.spans:SingleWindow",
                "the window of k neighbouring tokens with the largest deviation",
                "deviation",
                standing="exact",
                source="Request Order Matters, section 2.3",
            ),
            Plugin(
                "fixed-chunk",
                "kvaudit.policies.spans:FixedChunk",
                "equal spans across document borders, by mean deviation",
                "deviation",
                standing="exact",
                source="Request Order Matters, section 2.3",
            ),
            Plugin(
                "random-document",
                "kvaudit.policies.spans:RandomDocument",
                "whole documents in a seeded random order",
                "deviation, document segments",
                standing="exact",
                source="Request Order Matters, section 2.3",
            ),
            Plugin(
                "document-aligned",
                "kvaudit.policies.spans:DocumentAligned",
                "whole documents, by mean deviation",
                "deviation, document segments",
                standing="exact",
                source="Request Order Matters, section 2.3",
            ),
            Plugin(
                "none",
                "kvaudit.policies.bounds:ReuseAll",
                "recompute nothing: reuse as it is",
                "nothing",
                standing="exact",
                source="full KV reuse, the baseline of arXiv:2405.16444",
            ),
            Plugin(
                "all",
                "kvaudit.policies.bounds:RecomputeAll",
                "recompute every reusable token",
                "nothing",
                standing="control",
            ),
            Plugin(
                "cacheblend",
                "kvaudit.policies.cacheblend:CacheBlend",
                "the k tokens whose values deviate most (CacheBlend's own repository)",
                "value deviation",
                standing="exact",
                source="YaoJiayi/CacheBlend, vllm_blend/vllm/attention/backends/xformers.py",
            ),
            Plugin(
                "cacheblend-gradual",
                "kvaudit.policies.cacheblend_gradual:CacheBlendGradual",
                "CacheBlend's gradual filter: survivors ranked again layer by layer",
                "deviation at each layer",
                standing="described",
                source="arXiv:2405.16444, section 4.3",
            ),
            Plugin(
                "legolink",
                "kvaudit.policies.legolink:LegoLink",
                "the first tokens of every chunk after the first (EPIC)",
                "chunk borders",
                standing="exact",
                source="arXiv:2410.15332, LegoLink",
            ),
            Plugin(
                "prophetkv",
                "kvaudit.policies.prophetkv:ProphetKV",
                "the tokens that the query looks at, mean over all layers",
                "query attention",
                standing="port",
                source="arXiv:2602.02579, and a third-party port",
            ),
            Plugin(
                "a3",
                "kvaudit.policies.a3:A3",
                "the tokens that the question looks at, at the check layer",
                "query attention",
                standing="described",
                source="arXiv:2511.17560, abstract",
            ),
            Plugin(
                "fusionrag",
                "kvaudit.policies.fusionrag:FusionRAG",
                "the tokens that the question looks at in the last layer",
                "query attention",
                standing="described",
                source="arXiv:2601.12904, section 3.2",
            ),
            Plugin(
                "cacheclip",
                "kvaudit.policies.cacheclip:CacheClip",
                "windows that a small auxiliary model's query looks at",
                "auxiliary model",
                standing="described",
                source="arXiv:2510.10129, abstract",
            ),
            Plugin(
                "cache-craft",
                "kvaudit.policies.cache_craft:CacheCraft",
                "more of the chunks whose context mattered and is gone",
                "attention saved at write time",
                standing="port",
                source="arXiv:2502.15734, cache fix overhead, and a third-party port",
            ),
            Plugin(
                "lmcache-default",
                "kvaudit.policies.lmcache_default:LmcacheDefault",
                "LMCache's own selection untouched, for the engine lmcache alone",
                "engine lmcache",
                standing="exact",
                source="LMCache, lmcache/v1/compute/blend/blender.py, which selects by itself",
            ),
            Plugin(
                "random-token",
                "kvaudit.policies.controls:RandomToken",
                "k tokens in a seeded random order",
                "nothing",
                standing="control",
            ),
            Plugin(
                "random-span",
                "kvaudit.policies.controls:RandomSpan",
                "spans in a seeded random order",
                "nothing",
                standing="control",
            ),
            Plugin(
                "least-deviation",
                "kvaudit.policies.controls:LeastDeviation",
                "the k tokens that deviate least: the worst choice",
                "deviation",
                standing="control",
            ),
            Plugin(
                "token-runs",
                "kvaudit.policies.controls:TokenRuns",
                "token-topk widened to runs of m tokens",
                "deviation",
                standing="control",
            ),
            Plugin(
                "oracle",
                "kvaudit.policies.oracle:Oracle",
                "spans that most reduce the output's divergence, greedily, at any cost",
                "deviation, KL divergence of the output",
                standing="control",
            ),
        ),
        "engines": _table(
            Plugin(
                "embedded",
                "kvaudit.engines.embedded:open_engine",
                "kvaudit's own selective recomputation in torch, on the CPU or CUDA (the default)",
                "Llama, Mistral, Qwen2 or Qwen3 weights",
            ),
            Plugin(
                "vllm",
                "kvaudit.engines.vllm:open_vllm",
                "vLLM's offline engine, its exact prefix cache as the reuse under audit",
                "the extra kvaudit[lmcache]",
                policies=False,
                settings=("device", "dtype"),
            ),
            Plugin(
                "lmcache",
                "kvaudit.engines.vllm:open_lmcache",
                "vLLM with LMCache's blending (CacheBlend), with kvaudit's policies inside LMCache's blender",
                "the extra kvaudit[lmcache]",
            ),
            Plugin(
                "server",
                "kvaudit.engines.server:open_engine",
                "whatever answers behind an OpenAI-compatible URL, as it is: vLLM, SGLang, LMCache, llama.cpp, hosted",
                "--base-url, --model and a way to empty its cache (--reset)",
                policies=False,
                digested=("reset-url", "reset-body", "reset-command"),
            ),
            Plugin("scripted", "kvaudit.engines.scripted:open_engine", "for tests: planted faults", "nothing"),
        ),
        "traces": _table(
            Plugin(
                "kvaudit",
                "kvaudit.traces.native:read",
                "kvaudit's own JSON lines, segments written once",
                "",
            ),
            Plugin("capture", "kvaudit.traces.capture:read", "what the recording proxy wrote", ""),
            Plugin("messages", "kvaudit.traces.messages:read", 'OpenAI chat requests, {"messages": [...]} JSON lines'),
            Plugin(
                "openai-batch", "kvaudit.traces.openai_batch:read", "OpenAI Batch input files, with results among them"
            ),
            Plugin(
                "openai-responses", "kvaudit.traces.openai_responses:read", "OpenAI Responses requests, chains resolved"
            ),
            Plugin("anthropic", "kvaudit.traces.anthropic:read", "Anthropic Messages requests and message batches"),
            Plugin(
                "request-response",
                "kvaudit.traces.request_response:read",
                '{"request": ..., "response": ...} lines of these APIs',
            ),
            Plugin("litellm", "kvaudit.traces.litellm:read", "LiteLLM's standard log"),
            Plugin("otel", "kvaudit.traces.otel:read", "OpenTelemetry GenAI spans, OTLP JSON or a span a line"),
            Plugin("langfuse", "kvaudit.traces.langfuse:read", "Langfuse observations, JSON or Parquet"),
            Plugin("langsmith", "kvaudit.traces.langsmith:read", "LangSmith runs, JSON or Parquet"),
            Plugin("lmcache-agentic", "kvaudit.traces.lmcache_agentic:read", "LMCache's agentic traces"),
            Plugin("swe-agent", "kvaudit.traces.swe_agent:read", "trajectories of SWE-agent and mini-swe-agent"),
            Plugin("aiperf", "kvaudit.traces.aiperf:read", "aiperf's inputs.json"),
            Plugin("har", "kvaudit.traces.har:read", "HAR files of browsers and proxies"),
            Plugin(
                "mooncake",
                "kvaudit.traces.hash_only:read_mooncake",
                "Mooncake traces: hashes only, for kvaudit inspect alone",
            ),
            Plugin("weka", "kvaudit.traces.hash_only:read_weka", "WEKA traces: hashes only, for kvaudit inspect alone"),
        ),
        "reports": _table(
            Plugin(
                "terminal",
                "kvaudit.reports.terminal:render",
                "tables for people, at a terminal or piped",
                suffix=".txt",
            ),
            Plugin("json", "kvaudit.reports.json:render", "the same audit as data", suffix=".json"),
            Plugin(
                "markdown",
                "kvaudit.reports.markdown:render",
                "for a comment on a pull request, at most 64 KB",
                suffix=".md",
            ),
            Plugin(
                "html",
                "kvaudit.reports.html:render",
                "one page with figures, without scripts, works offline",
                suffix=".html",
            ),
            Plugin(
                "junit",
                "kvaudit.reports.junit:render",
                "XML with a test case for every gate, request and arm",
                suffix=".xml",
            ),
            Plugin("csv", "kvaudit.reports.csv:render", "every figure as a row", suffix=".csv"),
            Plugin(
                "parquet",
                "kvaudit.reports.parquet:write",
                "a folder with all tables, queries and a Hugging Face dataset card",
                suffix="/",
            ),
        ),
    }
)


def available(family: str) -> dict[str, Plugin]:
    """Every plug-in of a family by name: the built-in ones, then those that installed packages bring."""
    found = dict(BUILT_IN[family])
    for point in entry_points(group=f"kvaudit.{family}"):
        found.setdefault(point.name, Plugin(point.name, point.value, f"from {point.value}"))
    return found


def ignored(family: str) -> list[Plugin]:
    """Entry points of installed packages whose name is taken, by kvaudit's own or by another package's."""
    known = available(family)
    points = [Plugin(point.name, point.value, "") for point in entry_points(group=f"kvaudit.{family}")]
    return [plugin for plugin in points if plugin.target != known[plugin.name].target]


def find(family: str, name: str) -> Plugin:
    """A family's plug-in by its name, without loading it. Raises UsageError for an unknown name."""
    known: Mapping[str, Plugin] = BUILT_IN[family]
    if name not in known:
        known = available(family)
    if name not in known:
        raise UsageError(f"unknown {_singular(family)} {name!r}", f"known: {', '.join(known)}")
    return known[name]


def load(family: str, name: str) -> Any:
    """The object behind a name.

    Raises UsageError for an unknown name and PluginError, naming the plug-in, for one that cannot be loaded.
    """
    plugin = find(family, name)
    module, _, attribute = plugin.target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{_singular(family)} {name!r} ({plugin.target}) cannot be loaded: {error}",
            "install what it needs or take it out",
        ) from error


def _singular(family: str) -> str:
    return {"policies": "policy", "engines": "engine", "traces": "trace format", "reports": "report"}[family]
