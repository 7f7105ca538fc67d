"""Mutations that keep JSON whole: bytes alone seldom get beyond the parser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import orjson

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", [], {}, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(" ", "\n", "\r", "\0", "\u2028", "\ufeff", "\ufffd", "[", "{", "[1]", '{"role": "user"}', "NaN", "1e999"),
    *("9" * 30, "-1", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+14:00", "0001-01-01", "x" * 300),
    *([[]], [None], [{}], {"": None}, [[1, [2]], "x"]),
)

EVENT = b"data: "


def parsed_lines(content: bytes) -> list[Any]:
    """The JSON values of a file, one a line or one in all, or those of a stream of events."""
    try:
        return [orjson.loads(content)]
    except orjson.JSONDecodeError:
        pass
    values = []
    for line in content.split(b"\n"):
        try:
            values.append(orjson.loads(line.removeprefix(EVENT)))
        except orjson.JSONDecodeError:
            continue
    return values


def places(root: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    waiting = [root]
    while waiting:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        found += [(container, key) for key in keys]
        waiting += [below for key in keys if isinstance(below := container[key], dict | list)]
    return found


def field_names(values: Iterable[Any]) -> set[str]:
    return {key for value in values for _, key in places([value]) if isinstance(key, str)}


class JsonMutator:
    """Changes values, fields and lines of files; values and lines of `donors` are put into other places.

    Lines may be the data of server-sent events. Lines that hold no JSON are moved about as they are.
    """

    def __init__(self, donors: Sequence[Any]) -> None:
        self._values = [container[key] for container, key in places(list(donors))]
        self._names = sorted(field_names(donors)) or [""]
        self._lines = [orjson.dumps(donor) for donor in donors] or [b""]

    def mutated(self, content: bytes, random: Random) -> bytes:
        lines = [content] if _is_json(content) else content.split(b"\n")
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(lines))
            match random.randrange(12):
                case 0:
                    lines.insert(at, random.choice(lines))
                case 1:
                    lines.insert(at, random.choice(self._lines))
                case 2 if len(lines) > 1:
                    lines.insert(random.randrange(len(lines)), lines.pop(at))
                case 3 if len(lines) > 1:
                    del lines[at]
                case _:
                    lines[at] = self._changed(lines[at], random)
        return b"\n".join(lines)

    def _changed(self, line: bytes, random: Random) -> bytes:
        """The line as it is where it holds no JSON, or would be nested too deep."""
        prefix = EVENT if line.startswith(EVENT) else b""
        try:
            root = [orjson.loads(line.removeprefix(prefix))]
            self._change(*random.choice(places(root)), random)
            return prefix + b"".join(map(orjson.dumps, root))
        except (orjson.JSONDecodeError, TypeError):
            return line

    def _change(self, container: Any, key: Any, random: Random) -> None:
        value = container[key]
        match random.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[random.choice(self._names)] = container.pop(key)
            case 2 if isinstance(container, dict):
                container[random.choice(self._names)] = _copied(random.choice(self._values))
            case 3 if isinstance(container, list):
                container.insert(random.randint(0, len(container)), _copied(value))
            case 4:
                container[key] = orjson.dumps(value).decode()
            case 5:
                container[key] = random.choice(([value], {random.choice(self._names): value}))
            case 6 if self._values:
                container[key] = _copied(random.choice(self._values))
            case _:
                container[key] = _copied(random.choice(ODD_VALUES))


def _is_json(content: bytes) -> bool:
    try:
        orjson.loads(content)
    except orjson.JSONDecodeError:
        return False
    return True


def _copied(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))
