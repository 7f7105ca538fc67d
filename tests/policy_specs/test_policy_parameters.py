"""Parameters of policies: the fields of their dataclasses, read from text and written back in one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import PluginError, UsageError
from kvaudit.policies import Policy
from kvaudit.policy_specs.parameters import canonical, canonical_name, parameters_of, read_parameters


class First(Policy):
    name = "first"

    def select(self, context):
        return context.positions[: context.k]


@dataclass(frozen=True)
class Every(First):
    k: int = 8
    alpha: float = 0.5
    fast: bool = False
    model: str = "small"
    mode: Literal["mean", "max", 3] = "mean"
    limit: Optional[int] = None  # noqa: UP045
    length: int | float | None = 4
    label: str | None = None
    noted: Annotated[int, "a note"] = 1
    weights: tuple[float, ...] = (1.0, 2.0)
    made: Sequence[int] = field(default_factory=list)
    held: int = field(default=3, init=False)
    kind: ClassVar[str] = "no parameter"


@dataclass(frozen=True)
class Required(First):
    k: int
    m: int = 2


EVERY = parameters_of(Every)


def read(text: str) -> dict[str, Any]:
    return read_parameters("every", EVERY, text)


def test_parameters_are_the_init_fields_in_their_order_with_defaults():
    assert [parameter.name for parameter in EVERY] == [
        *("k", "alpha", "fast", "model", "mode", "limit", "length", "label", "noted", "weights", "made"),
    ]
    assert [parameter.default for parameter in EVERY[:4]] == [8, 0.5, False, "small"]
    assert EVERY[-1].default == []
    assert parameters_of(Required)[0].default is MISSING


def test_a_policy_that_is_no_dataclass_has_none():
    assert parameters_of(First) == ()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("k=9", "k", 9),
        ("k=-3", "k", -3),
        ("k=+08", "k", 8),
        ("alpha=1", "alpha", 1.0),
        ("alpha=1e-3", "alpha", 0.001),
        ("alpha=inf", "alpha", float("inf")),
        ("fast=true", "fast", True),
        ("fast=TRUE", "fast", True),
        ("model=Qwen/Qwen3-0.6B", "model", "Qwen/Qwen3-0.6B"),
        ("mode=max", "mode", "max"),
        ("mode=3", "mode", 3),
        ("limit=5", "limit", 5),
        ("limit=None", "limit", None),
        ("length=2", "length", 2),
        ("length=2.5", "length", 2.5),
        ("length=none", "length", None),
        ("label=8", "label", "8"),
        ("label=none", "label", None),
        ("noted=2", "noted", 2),
    ],
)
def test_a_value_is_read_by_its_annotation(text, name, value):
    default = {parameter.name: parameter.default for parameter in EVERY}[name]
    assert read(text) == ({} if value == default else {name: value})
    assert type(read(text).get(name, value)) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=8.0", "policy 'every': k is '8.0', not int"),
        ("k=1_0", "policy 'every': k is '1_0', not int"),
        ("k=", "policy 'every': k is '', not int"),
        ("k=٣", "policy 'every': k is '٣', not int"),
        ("alpha=nan", "policy 'every': alpha is 'nan', not float"),
        ("alpha=much", "policy 'every': alpha is 'much', not float"),
        ("alpha=1_0", "policy 'every': alpha is '1_0', not float"),
        ("fast=1", "policy 'every': fast is '1', not true or false"),
        ("model=a b", "policy 'every': model is 'a b', not text of letters"),
        ("model=", "policy 'every': model is '', not text of letters"),
        ("mode=min", "policy 'every': mode is 'min', not one of mean, max, 3"),
        ("limit=x", "policy 'every': limit is 'x', not int or none"),
        ("weights=1", "policy 'every': weights is '1', not a tuple"),
        ("made=1", "policy 'every': made is '1', not a Sequence"),
        ("held=1", "policy 'every' has no parameter 'held'"),
        ("kind=x", "policy 'every' has no parameter 'kind'"),
        ("K=1", "policy 'every' has no parameter 'K'"),
        ("k=1,k=2", "policy 'every' is given k twice"),
        ("k=1,", "'' is no parameter of policy 'every'"),
        ("k", "'k' is no parameter of policy 'every'"),
        ("=1", "'=1' is no parameter of policy 'every'"),
        ("k=1=2", "policy 'every': k is '1=2', not int"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(text, message):
    with pytest.raises(UsageError) as refused:
        read(text)
    assert refused.value.message.startswith(message)


def test_an_unknown_parameter_is_told_those_that_there_are_with_defaults():
    with pytest.raises(UsageError) as refused:
        read("nope=1")
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("it has k=8, alpha=0.5, fast=false, model=small, mode=mean, limit=none, ")
    with pytest.raises(UsageError) as refused:
        read_parameters("first", (), "k=1")
    assert refused.value.hint == "it has none"


def test_a_parameter_without_a_default_must_be_given():
    known = parameters_of(Required)
    assert read_parameters("required", known, "m=2,k=2") == {"k": 2}
    with pytest.raises(UsageError, match=r"policy 'required' needs k \(int\)") as refused:
        read_parameters("required", known, "m=3")
    assert refused.value.hint == "write required:k=VALUE"


def test_an_annotation_that_is_not_there_names_the_class():
    @dataclass(frozen=True)
    class Unresolved(First):
        k: "Nowhere" = 1  # type: ignore[name-defined]  # noqa: F821, UP037

    with pytest.raises(PluginError, match="Unresolved cannot be resolved: name 'Nowhere' is not defined"):
        parameters_of(Unresolved)


def test_what_equals_its_default_has_no_place_in_the_name():
    assert canonical_name("every", read("k=8,alpha=0.50,fast=False,limit=none")) == "every"
    assert canonical_name("every", read("alpha=-0")) == canonical_name("every", read("alpha=0")) == "every:alpha=0.0"
    assert canonical_name("every", read("mode=max,alpha=1,k=9")) == "every:k=9,alpha=1.0,mode=max"


@given(
    k=st.integers(-(10**12), 10**12),
    alpha=st.floats(allow_nan=False),
    fast=st.booleans(),
    label=st.none() | st.from_regex(r"[A-Za-z0-9_.+/@-]{1,64}", fullmatch=True).filter(lambda t: t.lower() != "none"),
    limit=st.none() | st.integers(),
)
def test_a_canonical_name_is_read_back_as_itself(**values):
    text = ",".join(f"{name}={canonical(value)}" for name, value in reversed(values.items()))
    found = read(text)
    name = canonical_name("every", found)
    assert read(name.partition(":")[2]) == found
    assert canonical_name("every", read(name.partition(":")[2])) == name
    assert {**{p.name: p.default for p in EVERY}, **found} == {**{p.name: p.default for p in EVERY}, **values}
