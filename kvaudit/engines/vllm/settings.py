"""What would spoil an audit of LMCache's blending, told before anything is started: each with what to do about it.

Most of it LMCache and vLLM accept without a word. A user's own LMCACHE_ variables are in force during an audit, since
they are what is deployed; kvaudit's options stand in their place where both would set the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvaudit.errors import UsageError

PREFIX = "LMCACHE_"
CHECK_LAYERS = "LMCACHE_BLEND_CHECK_LAYERS"
RATIOS = "LMCACHE_BLEND_RECOMPUTE_RATIOS"
SPECIAL_STRING = "LMCACHE_BLEND_SPECIAL_STR"
CHUNK_SIZE = "LMCACHE_CHUNK_SIZE"
CONFIG_FILE = "LMCACHE_CONFIG_FILE"
CAPACITY = "LMCACHE_MAX_LOCAL_CPU_SIZE"
LEAST_HIT = "LMCACHE_MIN_RETRIEVE_TOKENS"
DEFAULTS: Mapping[str, str] = {
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_USE_LAYERWISE": "True",
    "LMCACHE_ENABLE_BLENDING": "True",
    "LMCACHE_TRACK_USAGE": "false",
    CHUNK_SIZE: "16",
}
"""What blending needs, and a chunk size with which hardly a save is lost; a user's own values stand in their place."""

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""The models that LMCache has a layer by layer pass for (`lmcache.v1.compute.models.utils`)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What would be in force.

    lmcache: LMCache's environment. separators: token ids that stand between chunks. found_separator: those that LMCache
    would look for. longest: tokens of the longest prompt and answer; batched: how many vLLM computes at a time.
    """

    lmcache: Mapping[str, str]
    separator: tuple[int, ...]
    found_separator: tuple[int, ...]
    architecture: str
    rope_type: str
    layers: int
    longest: int
    batched: int
    prefix_caching: bool = False
    cuda_graphs: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """`spoils`: an audit under it would say nothing, or something wrong; otherwise it is told and goes on."""

    name: str
    wrong: str
    fix: str
    spoils: bool = True


def findings(setup: Setup) -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in check(setup))


def refuse(found: Sequence[Finding]) -> None:
    """Raise UsageError for findings that spoil an audit, all of them in one line."""
    spoiling = [finding for finding in found if finding.spoils]
    if spoiling:
        raise UsageError(
            "; ".join(f"{finding.name}: {finding.wrong}" for finding in spoiling),
            "; ".join(finding.fix for finding in spoiling),
        )


def in_manifest(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables in force, as a manifest tells them: of one that may hold a secret only a digest."""
    return {
        name: f"sha256:{sha256(value.encode()).hexdigest()[:16]}" if _MAY_BE_SECRET.search(name) else value
        for name, value in environment.items()
    }


_MAY_BE_SECRET = re.compile(r"KEY|SECRET|PASS|CREDENTIAL|AUTH|EXTRA_CONFIG|URL|_TOKEN(?!S|IZ)")


def as_lmcache_reads(value: str) -> str:
    """What LMCache makes of an environment variable: white space around it is taken off, then quotes, as Python's."""
    value = value.strip()
    if len(value) < 2 or value[0] != value[-1] or value[0] not in "'\"":
        return value
    try:
        inside = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value[1:-1]
    return inside if isinstance(inside, str) else value


def separator_string(
    text: str, ids: Sequence[int], leading: Sequence[int], encode: Callable[[str], list[int]]
) -> str | None:
    """What LMCache must be told so that it looks for exactly `ids`; None where nothing does.

    LMCache tokenises its string and drops the first token, which it takes for BOS. Where a tokenizer puts none there, a
    character that is a token of its own goes before the text, to be dropped.
    """
    for before in ("", *_DROPPED):
        if [*leading, *encode(before + text)][1:] == list(ids):
            return before + text
    return None


_DROPPED = ("x", "a", "0", ".", "\n", "#", "|", "\x00")


def _prefix_caching(setup: Setup) -> Iterator[Finding]:
    if setup.prefix_caching:
        yield Finding(
            "prefix-caching",
            "vLLM's prefix cache takes tokens that LMCache wants to blend (LMCache issue 3229)",
            "leave --option prefix-caching=on out",
        )


def _chunked_prefill(setup: Setup) -> Iterator[Finding]:
    if setup.batched < setup.longest:
        yield Finding(
            "chunked-prefill",
            f"vLLM computes at most {setup.batched} tokens at a time, and a prompt may have {setup.longest}: a prompt "
            "that comes in pieces is not blended as a whole",
            "leave --option max-num-batched-tokens out; where every prompt with its answer is short enough, "
            f"--option max-model-len={setup.batched} does as well",
        )


def _cuda_graphs(setup: Setup) -> Iterator[Finding]:
    if setup.cuda_graphs:
        yield Finding(
            "cuda-graphs",
            "a captured CUDA graph runs without the calls by which LMCache loads and stores layer by layer",
            "leave --option cuda-graphs=on out",
        )


def _config_file(setup: Setup) -> Iterator[Finding]:
    if setup.lmcache.get(CONFIG_FILE):
        yield Finding(
            "config-file",
            f"{CONFIG_FILE} names a file, and kvaudit sees only what the environment says",
            "unset it, and set what stands in it as LMCACHE_ variables",
        )


def _blending(setup: Setup) -> Iterator[Finding]:
    for name in ("LMCACHE_ENABLE_BLENDING", "LMCACHE_USE_LAYERWISE", "LMCACHE_LOCAL_CPU"):
        if as_lmcache_reads(setup.lmcache.get(name, "")).lower() not in ("true", "1"):
            yield Finding("blending", f"{name} is {setup.lmcache.get(name)!r}: nothing is blended", f"set {name}=True")


def _other_backends(setup: Setup) -> Iterator[Finding]:
    for name in ("LMCACHE_LOCAL_DISK", "LMCACHE_REMOTE_URL", "LMCACHE_ENABLE_P2P", "LMCACHE_ENABLE_PD"):
        if as_lmcache_reads(setup.lmcache.get(name, "")).lower() not in ("", "false", "0", "none", "null"):
            yield Finding(
                "backends",
                f"{name} adds a store that kvaudit cannot empty and look into: no arm could begin with an empty cache",
                f"unset {name}",
            )


def _shortest_hit(setup: Setup) -> Iterator[Finding]:
    least = setup.lmcache.get(LEAST_HIT)
    if least is not None and _numbers(least) != [0]:
        yield Finding(
            "shortest-hit",
            f"{LEAST_HIT} is {least!r}: LMCache leaves shorter hits out, and kvaudit could not tell them from hits "
            "that were lost",
            f"unset {LEAST_HIT}",
        )


def _check_layer(setup: Setup) -> Iterator[Finding]:
    layer = int(setup.lmcache[CHECK_LAYERS])
    if not 0 <= layer < setup.layers:
        yield Finding(
            "check-layer",
            f"{CHECK_LAYERS} is {layer}, and the model has {setup.layers} layers",
            f"give --check-layer, 0 to {setup.layers - 1}",
        )


def _separator(setup: Setup) -> Iterator[Finding]:
    given = setup.lmcache.get(SPECIAL_STRING, "")
    read = as_lmcache_reads(given)
    fix = f"unset {SPECIAL_STRING} and give --option separator=TEXT: kvaudit tells LMCache what makes it look for it"
    if given != read and given.strip() == read:
        yield Finding(
            "separator",
            f"{SPECIAL_STRING} is {given!r}, and LMCache takes the white space around it off: {read!r}",
            fix,
        )
    elif not setup.separator:
        yield Finding("separator", f"{SPECIAL_STRING} is {given!r}: nothing would stand between chunks", fix)
    elif setup.found_separator != setup.separator:
        yield Finding(
            "leading-token",
            f"LMCache would look for the token ids {list(setup.found_separator)} between chunks, and "
            f"{list(setup.separator)} stand there: it drops the first id of its separator, which it takes for a begin "
            "token",
            fix,
        )


def _model(setup: Setup) -> Iterator[Finding]:
    if setup.architecture not in MODELS:
        yield Finding("model", f"LMCache cannot blend a {setup.architecture}", f"take a model of {', '.join(MODELS)}")
    if setup.rope_type not in ("", "default"):
        yield Finding(
            "rope-scaling",
            f"LMCache moves keys by plain rotation, and the model's rotation is scaled ({setup.rope_type})",
            "take a model without rope scaling",
        )


def _chunk_size(setup: Setup) -> Iterator[Finding]:
    given = setup.lmcache[CHUNK_SIZE]
    size = int(given) if given.isascii() and given.isdecimal() else 0
    if not size:
        yield Finding("chunk-size", f"{CHUNK_SIZE} is {given!r}, no whole number above 0", f"set {CHUNK_SIZE}=16")
    elif size > 16:
        yield Finding(
            "chunk-size",
            f"with {CHUNK_SIZE}={size} LMCache stores nothing new of a prompt whose new tokens after the last "
            f"loaded chunk do not reach the next multiple of {size}: chunks are lost (LMCache issue 2029)",
            f"that is what this setting does where it is deployed, and it is audited as it is; {CHUNK_SIZE}=16 loses "
            "fewer",
            spoils=False,
        )


CHECKS: tuple[Callable[[Setup], Iterator[Finding]], ...] = (
    _config_file,
    _blending,
    _other_backends,
    _prefix_caching,
    _chunked_prefill,
    _cuda_graphs,
    _shortest_hit,
    _model,
    _check_layer,
    _separator,
    _chunk_size,
)


def _numbers(text: str) -> list[float] | None:
    """LMCache's lists are separated by commas; None where one is no number."""
    try:
        return [float(part) for part in as_lmcache_reads(text).split(",") if part.strip()]
    except ValueError:
        return None
