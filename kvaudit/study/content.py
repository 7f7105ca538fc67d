"""What study.json must hold, and whether it does: wrong types, and names that the study does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvaudit.study.grid import AXES, KINDS, RATIO


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_texts_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _has_texts(value: object, *names: str) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names)


def _is_axis(name: str, values: object) -> bool:
    return name in AXES and (
        isinstance(values, list) and all(map(_is_number, values)) if name == RATIO else _are_texts(values)
    )


def _is_cell(value: Any) -> bool:
    return (
        _has_texts(value, "name", "settings_digest")
        and _is_number(value.get(RATIO))
        and _are_texts(value.get("policies"))
        and isinstance(value.get("switches"), dict)
    )


def _is_same(value: Any) -> bool:
    return _has_texts(value, "name", "cell", "why") and _are_texts(value.get("policies"))


_CONTENT: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "kvaudit_version": lambda value: isinstance(value, str),
        "kind": lambda value: value in KINDS,
        "study_digest": lambda value: isinstance(value, str),
        "trace": lambda value: _has_texts(value, "digest"),
        "settings": lambda value: isinstance(value, dict) and isinstance(value.get("switches", {}), dict),
        "max_noise": _is_number,
        "axes": lambda value: isinstance(value, dict) and all(_is_axis(*axis) for axis in value.items()),
        "cells": lambda value: isinstance(value, list) and bool(value) and all(map(_is_cell, value)),
        "same": lambda value: isinstance(value, list) and all(map(_is_same, value)),
        "skipped": lambda value: isinstance(value, list) and all(_has_texts(one, "name", "why") for one in value),
        "refused": _are_texts_by_name,
        "failed": lambda value: isinstance(value, dict) and all(map(_are_texts_by_name, value.values())),
        "engine": lambda value: value is None or isinstance(value, dict),
    }
)


def damaged_names(described: Mapping[str, Any]) -> list[str]:
    """What study.json lacks, or has of another type."""
    return [name for name, holds in _CONTENT.items() if name not in described or not holds(described[name])]


def foreign_names(described: Mapping[str, Any]) -> list[str]:
    """Cells and policies that undamaged content says were refused or failed, and that are not the study's."""
    policies = {cell["name"]: cell["policies"] for cell in described["cells"]}
    failures = [(name, policy) for name, failed in described["failed"].items() for policy in failed]
    return [
        *(name for name in (*described["refused"], *described["failed"]) if name not in policies),
        *(f"{policy} in {name}" for name, policy in failures if policy not in policies.get(name, [policy])),
    ]
