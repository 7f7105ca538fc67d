"""Policies as they are asked for: `NAME`, `pkg.module:Class` or `./file.py:Class`, each with parameters.

Parameters stand behind a further colon: `NAME:k=8,mode=mean`, `./file.py:Class:alpha=0.5`. NAME is one of kvaudit's own
or the name of an entry point in the group `kvaudit.policies`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from urllib.parse import quote

from kvaudit.errors import KvauditError, PluginError, PolicyError, UsageError
from kvaudit.plugins import BUILT_IN, available, find, load
from kvaudit.policies import Need, Policy, Start
from kvaudit.policy_specs.files import import_file
from kvaudit.policy_specs.parameters import Parameter, canonical, canonical_name, parameters_of, read_parameters
from kvaudit.policy_specs.sources import source_digest
from kvaudit.records import AS_SERVED, FULL_PREFILL

__all__ = [
    "Parameter",
    "PolicySpec",
    "named_policy",
    "parameters_of",
    "policy_class",
    "read_policies",
    "read_policy",
]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_FILE = re.compile(r"(?P<file>.+?\.py)(?::(?P<attribute>[^:=]*))?(?::(?P<parameters>.*))?")
_LONGEST_NAME = 150
"""Bytes of a name once it is quoted, so that the file of an arm has a name that every file system takes."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy with everything that is needed to make it.

    name: the canonical one that stands in arms, tables and reports: `base`, or `base:k=8` with the parameters that
        differ from their defaults, in the order of the fields.
    target: `module:Class` or `file.py:Class`, as it was given.
    policy: its class. known: the parameters that it takes. parameters: those that differ from their defaults.
    source: SHA-256 over what the class is written in (`source_digest`, `PolicyFile`), None where there is no file.
    """

    name: str
    base: str
    target: str
    policy: type[Policy]
    known: tuple[Parameter, ...]
    parameters: Mapping[str, Any]
    source: str | None

    def make(self) -> Policy:
        """A new one. A UsageError of its constructor is the user's to read; anything else becomes a PolicyError."""
        try:
            return self.policy(**self.parameters)
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(
                f"policy {self.name!r} cannot be made: {_said(error)}", "give it other parameters, or mend it"
            ) from error

    def values(self) -> dict[str, str]:
        """Every parameter as text, defaults too."""
        return {p.name: canonical(self.parameters.get(p.name, p.default)) for p in self.known}


def read_policies(texts: Iterable[str]) -> tuple[PolicySpec, ...]:
    """Each policy once, in order. Raises UsageError where two that are not the same have one name."""
    specs: dict[str, PolicySpec] = {}
    for spec in map(read_policy, texts):
        for other in specs.values():
            if other.base == spec.base and other.policy is not spec.policy:
                raise UsageError(
                    f"{other.target} and {spec.target} are both named {spec.base!r}",
                    "give one of the classes another `name`",
                )
        specs[spec.name] = spec
    return tuple(specs.values())


def read_policy(text: str) -> PolicySpec:
    """One policy as it is written on the command line; it was made once, so that it can be made.

    Raises UsageError for what is not known or cannot be, PluginError for what cannot be loaded. Both name it.
    """
    if matched := _FILE.fullmatch(text):
        return _outside(text, matched["file"], matched["attribute"] or "", matched["parameters"] or "")
    target, _, rest = text.partition(":")
    attribute, _, parameters = rest.partition(":")
    if target in available("policies") or not _is_module(target):
        if attribute and "=" not in rest:
            find("policies", target)
            raise UsageError(f"{text!r} is no policy", f"parameters are written {target}:NAME=VALUE,NAME=VALUE")
        return named_policy(target, rest)
    if "." not in target and (not attribute or "=" in attribute):
        find("policies", target)
    return _outside(text, target, attribute, parameters)


def named_policy(name: str, parameters: str = "") -> PolicySpec:
    """A built-in policy or one of an installed package's entry points. Raises as `read_policy`."""
    found = policy_class(name)
    return _made_once(name, find("policies", name).target, found, parameters, source_digest(found))


def policy_class(name: str) -> type[Policy]:
    """The class behind a name. Raises UsageError for an unknown name, PluginError for one that cannot be loaded."""
    plugin = find("policies", name)
    found = _checked_class(load("policies", name), name, plugin.target)
    if found.name != name:
        raise PluginError(
            f"policy {name!r} ({plugin.target}) calls itself {found.name!r}",
            "the entry point and the `name` of the class must be the same",
        )
    return found


def _outside(text: str, place: str, attribute: str, parameters: str) -> PolicySpec:
    """A class out of a file or a module that is no plug-in by name."""
    is_file = place.endswith(".py")
    file = import_file(Path(place)) if is_file else None
    module = file.module if file else _imported(place)
    target = f"{place}:{attribute}"
    if not attribute:
        raise UsageError(f"{text!r} names no class", _classes_in(module, place))
    if not hasattr(module, attribute):
        raise UsageError(f"{place} has no {attribute!r}", _classes_in(module, place))
    found = _checked_class(getattr(module, attribute), attribute, target)
    if found.name in BUILT_IN["policies"]:
        known = BUILT_IN["policies"][found.name].target
        same = known == f"{found.__module__}:{found.__qualname__}"
        hint = f"write --policy {found.name}" if same else "give the class another `name`"
        raise UsageError(f"{target} has the name of kvaudit's own policy {found.name!r}", hint)
    return _made_once(found.name, target, found, parameters, file.digest if file else source_digest(found))


def _made_once(base: str, target: str, policy: type[Policy], parameters: str, source: str | None) -> PolicySpec:
    known = parameters_of(policy)
    given = read_parameters(base, known, parameters)
    name = canonical_name(base, given)
    if len(quote(name, safe="")) > _LONGEST_NAME:
        raise UsageError(f"the policy's name is too long to name a file: {name!r:.120}", "give it fewer parameters")
    spec = PolicySpec(name, base, target, policy, known, given, source)
    try:
        made = spec.make()
    except PolicyError as error:
        raise UsageError(error.message, error.hint) from error
    if not isinstance(made.needs, Set):
        raise PluginError(f"policy {name!r} ({target}): its needs are no set", 'write needs = frozenset({"deviation"})')
    for what, declared, allowed in (("needs", made.needs, get_args(Need)), ("start", [made.start], get_args(Start))):
        if unknown := [one for one in declared if one not in allowed]:
            raise PluginError(
                f"policy {name!r} ({target}) declares {what} {unknown[0]!r}", f"known: {', '.join(allowed)}"
            )
    return spec


def _checked_class(found: object, name: str, target: str) -> type[Policy]:
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise PluginError(
            f"policy {name!r} ({target}) is no subclass of kvaudit.policies.Policy", "derive it from that"
        )
    own = getattr(found, "name", None)
    if not isinstance(own, str) or not _NAME.fullmatch(own) or own in (FULL_PREFILL, AS_SERVED):
        what = "has no `name`" if own is None else f"has the name {own!r}, which is reserved or no name of a policy"
        raise PluginError(
            f"policy {name!r} ({target}) {what}",
            "give the class a `name` of lower-case letters, digits, - and _, at most 64",
        )
    return found


def _imported(module: str) -> ModuleType:
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"module {module!r} cannot be imported: {_said(error)}", "install it, or name its file: ./file.py:Class"
        ) from error


def _is_module(target: str) -> bool:
    return all(part.isidentifier() for part in target.split("."))


def _classes_in(module: ModuleType, place: str) -> str:
    own = [
        name
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, Policy) and found.__module__ == module.__name__
    ]
    return (
        f"write {' or '.join(f'{place}:{name}' for name in own)}" if own else "it has no policy: derive one from Policy"
    )


def _said(error: BaseException) -> str:
    if isinstance(error, KvauditError):
        return error.message
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
