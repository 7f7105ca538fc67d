"""A policy of one's own to start from: a file that runs as it is, and its test."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from kvaudit.errors import UsageError
from kvaudit.plugins import available
from kvaudit.records import FULL_PREFILL

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_ ][A-Za-z0-9]+)*")
_WORD = re.compile(r"([A-Z]+(?![a-z])|[A-Z]?[a-z]+)[0-9]*|[0-9]+")
_LONGEST = 64
_TAKEN_MODULES = {"numpy", "kvaudit", "pytest", "conftest", *sys.stdlib_module_names}
_TAKEN_CLASSES = {"ClassVar", "Need", "Policy", "Positions", "SelectionContext"}


@dataclass(frozen=True, slots=True)
class Started:
    """`spec` names the policy as the command line takes it."""

    policy: Path
    test: Path
    spec: str


def write_new(name: str, folder: Path) -> Started:
    """Write `folder`/name.py and its test. Raises UsageError for a name that cannot be one and where a file is."""
    words = _words(name)
    module, class_name, listed = "_".join(words), "".join(word.capitalize() for word in words), "-".join(words)
    if keyword.iskeyword(module) or module in _TAKEN_MODULES or class_name in _TAKEN_CLASSES:
        raise UsageError(f"a file {module}.py with a class {class_name} would hide another", "take another name")
    if listed == FULL_PREFILL or listed in available("policies"):
        raise UsageError(f"there is a policy {listed!r} already", "take another name")
    policy, test = folder / f"{module}.py", folder / f"test_{module}.py"
    for path in (policy, test):
        if path.exists():
            raise UsageError(f"{path} is there already", "take another name, or another folder with -o")
    filled = {"title": " ".join(words).capitalize(), "name": listed, "module": module, "class_name": class_name}
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in ((policy, "new_policy.txt"), (test, "new_policy_test.txt")):
        path.write_text(Template(files(__package__).joinpath(template).read_text("utf-8")).substitute(filled), "utf-8")
    place = str(policy)
    return Started(
        policy, test, f"{place if policy.is_absolute() or place.startswith('.') else f'./{place}'}:{class_name}"
    )


def _words(name: str) -> list[str]:
    """`my-policy`, `my_policy` and `MyPolicy` are the same words."""
    words = [word[0].lower() for word in _WORD.finditer(name)]
    if not _NAME.fullmatch(name) or len("-".join(words)) > _LONGEST:
        raise UsageError(
            f"{name!r} cannot name a policy", f"take letters, digits and -, at most {_LONGEST}, such as my-policy"
        )
    return words
