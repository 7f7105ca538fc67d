"""Time stamps of logs."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.traces.times import seconds


@pytest.mark.parametrize(
    "value",
    [
        *(1700000000, 1700000000.0, 1700000000000, 1700000000000000, 1700000000000000000, "1700000000", "1.7e9"),
        *("2023-11-14T22:13:20Z", "2023-11-14T22:13:20", "2023-11-14 22:13:20.000000000+00:00", " 1700000000000 "),
        *("2023-11-15T00:13:20+02:00", datetime(2023, 11, 14, 22, 13, 20), datetime(2023, 11, 14, 22, 13, 20, 0, UTC)),
    ],
)
def test_every_form_gives_seconds(value: object) -> None:
    assert seconds(value) == 1700000000.0


def test_a_time_without_a_zone_is_utc_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert seconds("2023-11-14T22:13:20") == 1700000000.0
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("value", [None, True, "", "soon", "nan", float("inf"), [], {}, "9" * 400, 9**999, b"1"])
def test_what_is_no_time_is_none(value: object) -> None:
    assert seconds(value) is None


def test_small_numbers_count_from_a_start_of_their_own() -> None:
    assert seconds(27.5) == 27.5


@given(st.text() | st.integers() | st.floats() | st.datetimes())
def test_nothing_is_an_error(value: object) -> None:
    seconds(value)
