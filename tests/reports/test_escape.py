import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.reports.escape import EXCERPT, excerpt, first_difference, visible


@given(st.text())
def test_nothing_that_a_terminal_obeys_or_hides_is_left(text):
    shown = visible(text)
    assert all(character == " " or unicodedata.category(character)[0] in "LMNPS" for character in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, text 1.5 é 漢 😀", "plain, text 1.5 é 漢 😀"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\u202eevil\u200b", r"\u202eevil\u200b"),
        ("no\u00a0break", r"no\xa0break"),
    ],
)
def test_controls_are_shown_as_escapes(text, shown):
    assert visible(text) == shown


def test_a_short_text_is_shown_whole():
    assert excerpt("abc", around=2) == "abc"
    assert excerpt("") == "(empty)"


def test_a_long_text_is_cut_around_the_difference_and_says_so():
    text = "a" * 500_000 + "X" + "a" * 500_000
    shown = excerpt(text, around=500_000)
    assert "X" in shown
    assert shown.startswith("...")
    assert shown.endswith("... (1,000,001 characters)")
    assert len(shown) < EXCERPT + 60


@given(st.text("ab"), st.text("ab"))
def test_first_difference_is_that_of_a_loop(left, right):
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert first_difference(left, right) == common
