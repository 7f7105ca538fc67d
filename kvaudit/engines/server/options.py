"""What the user asks of the engine: options by name, as `kvaudit replay --option NAME=VALUE` gives them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

from kvaudit.engines.server.presets import PRESETS
from kvaudit.errors import UsageError

Api = Literal["auto", "chat", "completions"]
ReferenceBy = Literal["auto", "url", "salt", "reset"]

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
KEY_VARIABLE = "KVAUDIT_API_KEY"
OTHER_KEY_VARIABLE = "KVAUDIT_OTHER_API_KEY"
OPTIONS: Mapping[str, str] = {
    "base-url": "",
    "api": "auto",
    "reference": "auto",
    "reference-url": "",
    "reset": "",
    "reset-url": "",
    "reset-method": "POST",
    "reset-body": "",
    "reset-command": "",
    "timeout": "300",
    "retries": "3",
    "patience": "120",
    "concurrency": "1",
    "api-key-env": KEY_VARIABLE,
    "other-key-env": OTHER_KEY_VARIABLE,
    "ca": "",
}
"""Every option of the engine with what it is where it is not given."""
_MOST = 100
_NAME = re.compile(r"[A-Za-z_]\w*")
_HARMLESS = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]{0,63}://[A-Za-z0-9._-]{0,64}(?::\d{0,6}(?!\w))?|[A-Za-z0-9._-]{1,64}:\d{1,6}(?!\w)"
)
"""What an address begins with, and no key does."""
_METHODS = ("GET", "POST", "PUT", "DELETE")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`base_url` and `reference_url` end before `/chat/completions`. Times in seconds. `key_variable` names the
    environment variable with the key of the server at `base_url`, `other_key_variable` that of the reference.
    """

    base_url: str
    api: Api
    reference: ReferenceBy
    reference_url: str | None
    reset: str | None
    reset_url: str | None
    reset_method: str
    reset_body: str
    reset_command: str | None
    timeout: float
    retries: int
    patience: float
    concurrency: int
    key_variable: str
    other_key_variable: str
    authority: Path | None


def read_options(given: Mapping[str, str], *, resets: bool = True) -> ServerOptions:
    """`resets`: the server's cache must be emptied. Raises UsageError, naming the option, for what is not known,
    missing or cannot be.
    """
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise UsageError(f"engine 'server' has no option {unknown[0]!r}", f"known: {', '.join(OPTIONS)}")
    values = {**OPTIONS, **given}
    if not values["base-url"]:
        raise UsageError("engine 'server' needs the address of a server", "give --base-url http://HOST:PORT/v1")
    reference = _one_of("reference", values["reference"], get_args(ReferenceBy))
    reference_url = server_url("reference-url", values["reference-url"]) if values["reference-url"] else None
    if reference == "url" and reference_url is None:
        raise UsageError("--reference url needs another server", "give --reference-url http://HOST:PORT/v1")
    if reference in ("salt", "reset") and reference_url is not None:
        raise UsageError(
            f"--reference {reference} and --reference-url are two ways to the same answers", "give one of them"
        )
    if resets:
        _check_reset(values, given)
        if "other-key-env" in given and reference_url is None:
            raise UsageError("--other-key-env is the key of another server, and there is none", "leave it out")
    return ServerOptions(
        base_url=server_url("base-url", values["base-url"]),
        api=cast(Api, _one_of("api", values["api"], get_args(Api))),
        reference=cast(ReferenceBy, "url" if reference_url else reference),
        reference_url=reference_url,
        reset=values["reset"] or None,
        reset_url=server_url("reset-url", values["reset-url"], whole=not values["reset"])
        if values["reset-url"]
        else None,
        reset_method=_one_of("reset-method", values["reset-method"].upper(), _METHODS),
        reset_body=values["reset-body"],
        reset_command=values["reset-command"] or None,
        timeout=_seconds("timeout", values["timeout"]),
        retries=_count("retries", values["retries"]),
        patience=_seconds("patience", values["patience"]),
        concurrency=_count("concurrency", values["concurrency"], least=1),
        key_variable=_variable("api-key-env", values["api-key-env"]),
        other_key_variable=_variable("other-key-env", values["other-key-env"]),
        authority=Path(values["ca"]) if values["ca"] else None,
    )


def _check_reset(values: Mapping[str, str], given: Mapping[str, str]) -> None:
    ways = [f"--{name}" for name in ("reset", "reset-url", "reset-command") if values[name]]
    if not ways:
        raise UsageError(
            "every arm begins with an empty cache, and nothing says how this server's is emptied",
            f"give --reset {'|'.join(PRESETS)}, --reset-url or --reset-command",
        )
    if values["reset"] and values["reset"] not in PRESETS:
        raise UsageError(f"unknown --reset {values['reset']!r}", f"known: {', '.join(PRESETS)}")
    takes_url = bool(values["reset"]) and PRESETS[values["reset"]].takes_url
    if len(ways) > 1 and not (ways == ["--reset", "--reset-url"] and takes_url):
        raise UsageError(f"{' and '.join(ways)} are two ways to empty a cache", "give one of them")
    for name in ("reset-method", "reset-body"):
        if given.get(name) and ways != ["--reset-url"]:
            raise UsageError(f"--{name} says how --reset-url is called, and {ways[0]} calls by itself", "leave it out")
    for variable in variables_in(values["reset-url"]):
        if variable not in os.environ:
            raise UsageError(f"--reset-url names ${variable}, which is not set", "export it into the environment")


def variables_in(text: str) -> list[str]:
    """The environment variables that a text names."""
    return [braced or plain for braced, plain in VARIABLE.findall(text)]


def server_url(name: str, text: str, *, whole: bool = False) -> str:
    """An address, without a slash at its end, or as it is where it is `whole`, with a user and a query.

    Raises UsageError, naming the option, for anything else.
    """
    variable = KEY_VARIABLE if name == "base-url" else OTHER_KEY_VARIABLE
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"--{name}{_shown(text)} is not the address of a server", "write http://HOST:PORT/v1")
    if (parts.username or parts.password) and not whole:
        raise UsageError(f"--{name} holds a password", f"put the key into the environment variable {variable}")
    if (parts.query and not whole) or parts.fragment:
        raise UsageError(f"--{name} has more than a path", "take the query and the fragment away")
    return text if whole else text.rstrip("/")


def _shown(text: str) -> str:
    """A text that is no address, as far as it looks like one: a key that was given in its place is not repeated."""
    from kvaudit.proxy.credentials import looks_drawn

    found = _HARMLESS.match(text)
    if found is None or "@" in text or looks_drawn(text):
        return ""
    return f" {found[0]!r}" + (" ..." if found[0] != text else "")


def key_in(variable: str) -> str | None:
    """The key in an environment variable; None where there is none. Raises UsageError for what no header can hold."""
    key = os.environ.get(variable, "").strip()
    if not all("!" <= letter <= "~" for letter in key):
        raise UsageError(
            f"{variable} holds what no key can: spaces, or letters beyond ASCII", "put the key alone there"
        )
    return key or None


def _variable(name: str, text: str) -> str:
    from kvaudit.proxy.credentials import looks_drawn

    if not _NAME.fullmatch(text) or looks_drawn(text):
        raise UsageError(
            f"--{name} is not the name of an environment variable",
            f"put the key into one, and give its name: --{name} {OPTIONS[name]}",
        )
    return text


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"--{name} is {value!r}", f"known: {', '.join(known)}")
    return value


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--{name} is {text!r}, no number of seconds above 0", "write 30, for instance")
    return seconds


def _count(name: str, text: str, *, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= _MOST:
        raise UsageError(f"--{name} is {text!r}, no whole number from {least} to {_MOST}")
    return int(text)
