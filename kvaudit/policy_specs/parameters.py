"""A policy's parameters: the init fields of its dataclass, read from text and written back in one canonical form."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvaudit.errors import PluginError, UsageError
from kvaudit.policies import Policy

_WHOLE = re.compile(r"[+-]?[0-9]+")
_TEXT = re.compile(r"[A-Za-z0-9_.+/@-]{1,64}")
"""What a text parameter may hold: it becomes part of names of arms and files. Neither `,` nor `:` nor `=`."""

_NONE = "none"


@dataclass(frozen=True, slots=True)
class Parameter:
    """`hint` is its resolved annotation; `default` is `dataclasses.MISSING` where it must be given."""

    name: str
    hint: Any
    default: Any

    @property
    def kind(self) -> str:
        """Its type in words: `int`, `float or none`, `one of mean, max`."""
        return _kind(self.hint)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.default is MISSING else f"{self.name}={canonical(self.default)}"


def parameters_of(policy: type[Policy]) -> tuple[Parameter, ...]:
    """In the order of the fields; none for a policy that is no dataclass.

    Raises PluginError, naming the class, where an annotation cannot be resolved.
    """
    declared: list[Field[Any]] = [field for field in fields(policy) if field.init] if is_dataclass(policy) else []
    if not declared:
        return ()
    try:
        hints = get_type_hints(policy)
    except Exception as error:
        raise PluginError(
            f"the annotations of {policy.__qualname__} cannot be resolved: {error}",
            "import what they name, not for type checkers alone",
        ) from error
    return tuple(Parameter(field.name, hints[field.name], _default(field)) for field in declared)


def read_parameters(policy: str, known: tuple[Parameter, ...], text: str) -> dict[str, Any]:
    """`k=8,mode=mean` as values, in the order of the fields, without those that equal their default.

    Raises UsageError, naming the policy, for an unknown, repeated or missing parameter and for a value that does not
    fit.
    """
    by_name = {parameter.name: parameter for parameter in known}
    given: dict[str, Any] = {}
    for name, value in _pairs(policy, text):
        if name not in by_name:
            raise UsageError(f"policy {policy!r} has no parameter {name!r}", _those_it_has(known))
        if name in given:
            raise UsageError(f"policy {policy!r} is given {name} twice", "give it once")
        given[name] = _read(policy, known, by_name[name], value)
    missing = [str(p) for p in known if p.default is MISSING and p.name not in given]
    if missing:
        raise UsageError(
            f"policy {policy!r} needs {', '.join(missing)}", f"write {policy}:{missing[0].partition(' ')[0]}=VALUE"
        )
    return {p.name: given[p.name] for p in known if p.name in given and not _is_default(p, given[p.name])}


def canonical(value: object) -> str:
    """The one way in which a value is written, which `read_parameters` reads back."""
    match value:
        case None:
            return _NONE
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case _:
            return str(value)


def canonical_name(base: str, parameters: Mapping[str, Any]) -> str:
    """`name`, or `name:k=8,m=2` with the parameters that `read_parameters` returned."""
    given = ",".join(f"{name}={canonical(value)}" for name, value in parameters.items())
    return f"{base}:{given}" if given else base


def _pairs(policy: str, text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(",") if text else ():
        name, equals, value = pair.partition("=")
        if not name.isidentifier() or not equals:
            raise UsageError(f"{pair!r} is no parameter of policy {policy!r}", f"write {policy}:NAME=VALUE,NAME=VALUE")
        yield name, value


def _those_it_has(known: tuple[Parameter, ...]) -> str:
    return f"it has {', '.join(map(str, known))}" if known else "it has none"


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _is_default(parameter: Parameter, value: object) -> bool:
    return parameter.default is not MISSING and bool(parameter.default == value)


def _read(policy: str, known: tuple[Parameter, ...], parameter: Parameter, text: str) -> Any:
    for choice in _alternatives(parameter.hint):
        try:
            return _converted(choice, text)
        except (ValueError, KeyError):
            continue
    raise UsageError(f"policy {policy!r}: {parameter.name} is {text!r}, not {parameter.kind}", _those_it_has(known))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, text last: it takes whatever the others do not."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(sorted(members, key=lambda member: member is str))


def _converted(hint: Any, text: str) -> Any:
    """Raises ValueError or KeyError for a text that is no value of the type, and for a type that has no text."""
    if get_origin(hint) is Literal:
        return {canonical(choice): choice for choice in get_args(hint)}[text]
    return _READERS[hint](text)


def _whole(text: str) -> int:
    if _WHOLE.fullmatch(text):
        return int(text)
    raise ValueError(text)


def _real(text: str) -> float:
    value = float(text)
    if "_" in text or math.isnan(value):
        raise ValueError(text)
    return value + 0.0  # there is one zero


def _plain(text: str) -> str:
    if _TEXT.fullmatch(text):
        return text
    raise ValueError(text)


_READERS: Mapping[Any, Callable[[str], Any]] = {
    types.NoneType: lambda text: {_NONE: None}[text.lower()],
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: _whole,
    float: _real,
    str: _plain,
}


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(canonical, get_args(hint)))}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_kind, _alternatives(hint)))
    words = {int: "int", float: "float", bool: "true or false", types.NoneType: _NONE}
    if hint is str:
        return "text of letters, digits and _ . + / @ -"
    return words.get(hint, f"a {getattr(hint, '__name__', hint)}, which cannot be given as text")
