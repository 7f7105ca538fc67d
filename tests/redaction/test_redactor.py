"""What redaction promises of every text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redaction.sensitive_values import NAMED, VALUES, detectors

from kvaudit.errors import UsageError
from kvaudit.redaction.builtin import SUMMARIES
from kvaudit.redaction.detectors import Detector, Searched, Span, find
from kvaudit.redaction.patterns import user_detectors
from kvaudit.redaction.placeholders import Placeholders, placeholders_of
from kvaudit.redaction.redactor import Redactor

SALT = b"a salt of the tests"
PLACEHOLDER = placeholders_of(tuple(SUMMARIES))

PARTS = st.one_of(
    st.sampled_from([value for _, value in VALUES]),
    st.sampled_from([text.format(value) for text, value in NAMED.values()]),
    st.sampled_from([" ", "\n", ", ", "\\n", '"', "@", "+", "://", ":", "[KEY-0123abcd]", "[EMAIL-", "]", "a.b@", "é"]),
    st.text(max_size=12),
)
TEXTS = st.lists(PARTS, max_size=8).map("".join)


def redactor(*names: str, salt: bytes = SALT) -> Redactor:
    return Redactor(detectors(*names), salt)


@given(TEXTS)
@example("postgres://a:bob@example.com@b.example")
@settings(max_examples=150, deadline=None)
def test_nothing_that_is_found_remains_and_a_second_time_changes_nothing(text: str) -> None:
    once = redactor().redact(text)
    assert find(detectors(), once.text) == []
    assert redactor().redact(once.text) == (once.text, ())
    assert bool(once.replaced) == (once.text != text)


@given(st.lists(TEXTS, max_size=4))
@settings(max_examples=50, deadline=None)
def test_equal_texts_stay_equal_and_different_ones_different(texts: list[str]) -> None:
    one, other = redactor(), redactor()
    redacted = [one.redact(text).text for text in texts]
    assert redacted == [other.redact(text).text for text in texts]
    assert redacted == [one.redact(text).text for text in texts]
    if not any(PLACEHOLDER.search(text) for text in texts):
        assert len(set(redacted)) == len(set(texts))


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_hits_are_in_order_and_what_is_between_them_stays(text: str) -> None:
    hits = find(detectors(), text)
    assert all(0 <= hit.start < hit.end <= len(text) for hit in hits)
    assert all(before.end <= after.start for before, after in pairwise(hits))
    ends = [0, *(hit.end for hit in hits)]
    starts = [*(hit.start for hit in hits), len(text)]
    between = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    pattern = r"(?:\[[A-Z]+-[0-9a-f]+\])".join(map(re.escape, between))
    if not find(detectors(), (once := replaced_once(text))):
        assert re.fullmatch(pattern, once, re.DOTALL)
        assert redactor().redact(text).text == once


def replaced_once(text: str) -> str:
    """Written apart from the code that is tested: from the last hit to the first."""
    placeholders = Placeholders(SALT)
    for hit in reversed(find(detectors(), text)):
        text = text[: hit.start] + placeholders.of(hit.name, text[hit.start : hit.end]) + text[hit.end :]
    return text


@given(st.text(max_size=400) | st.binary(max_size=400).map(lambda data: data.decode("latin-1")))
@example("\ud800 bob@example.com \udfff")
@example("a@" * 500 + "b.com")
@example("\\" * 1000 + "n" + ":" * 1000)
@settings(max_examples=150, deadline=None)
def test_any_text_can_be_redacted(text: str) -> None:
    redactor().redact(text)


def test_placeholders_tell_the_detector_and_nothing_of_the_value() -> None:
    text = "bob@example.com and eve@example.com and bob@example.com"
    redacted = redactor().redact(text)
    bob, eve, again = re.findall(r"\[EMAIL-[0-9a-f]{8}\]", redacted.text)
    assert redacted.text == f"{bob} and {eve} and {again}"
    assert bob == again != eve
    assert [detector for detector, _ in redacted.replaced] == ["email"] * 3
    assert redactor(salt=b"another salt").redact(text).text != redacted.text


def test_one_value_found_by_two_detectors_is_not_known_by_the_digits() -> None:
    placeholders = Placeholders(SALT)
    assert placeholders.of("ip", "8.8.8.8")[-9:] != placeholders.of("own", "8.8.8.8")[-9:]


def test_values_that_share_their_first_digits_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Digest:
        def __init__(self, value: bytes) -> None:
            self._value = value

        def hexdigest(self) -> str:
            return "0" * 12 + self._value.hex().rjust(52, "0")

    monkeypatch.setattr("kvaudit.redaction.placeholders.hmac.new", lambda salt, value, kind: Digest(value))
    placeholders = Placeholders(SALT)
    made = [placeholders.of("ip", value) for value in ("first", "second", "first", "third")]
    assert made[0] == made[2] == "[IP-00000000]"
    assert made[1] == "[IP-000000000000]"
    assert len(set(made)) == 3
    assert all(PLACEHOLDER.fullmatch(placeholder) for placeholder in made)


def test_strings_of_a_value_are_redacted_wherever_they_are() -> None:
    value = {"a": ["bob@example.com", 1, None], "bob@example.com": {"b": "x"}, "c": True}
    redacted, replaced = redactor().redact_values(value)
    address = replaced[0].placeholder
    assert redacted == {"a": [address, 1, None], address: {"b": "x"}, "c": True}
    assert len(replaced) == 2


def test_a_users_pattern_is_a_detector_among_the_others() -> None:
    own = user_detectors([r"Ticket=\bT-\d+(?=\D)"], {"key"})
    redacted = Redactor([*detectors("email"), *own], SALT).redact("T-12, T-123 of bob@example.com")
    assert re.fullmatch(r"\[TICKET-\w{8}\], \[TICKET-\w{8}\] of \[EMAIL-\w{8}\]", redacted.text)


def test_a_pattern_that_matches_everything_leaves_placeholders_alone() -> None:
    greedy = Redactor([*detectors("email"), *user_detectors(["all=.+"], ())], SALT)
    once = greedy.redact("write to bob@example.com now")
    assert re.fullmatch(r"\[ALL-\w{8}\]", once.text)
    mixed = greedy.redact("write to [EMAIL-0123abcd] now")
    assert re.fullmatch(r"\[ALL-\w{8}\]\[EMAIL-0123abcd\]\[ALL-\w{8}\]", mixed.text)
    assert greedy.redact(mixed.text) == (mixed.text, ())


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("x", "'x' is no pattern"),
        ("=x", "'=x' is no pattern"),
        ("a b=x", "is no pattern"),
        ("x=(", "the pattern 'x' is broken: missing )"),
        ("x=a*", "the pattern 'x' matches a text of no characters"),
        ("x=", "the pattern 'x' matches a text of no characters"),
        ("IP=x", "there is a detector 'ip' already"),
    ],
)
def test_patterns_that_cannot_work_are_refused_at_once(definition: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        user_detectors([definition], {"ip"})
    assert message in refusal.value.message
    assert refusal.value.hint or "broken" in message


def test_two_patterns_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="there is a detector 'a' already"):
        user_detectors(["a=x", "A=y"], ())


def test_a_pattern_that_matches_nothing_between_characters_is_refused_when_it_does() -> None:
    (own,) = user_detectors(["x=(?<=a)"], ())
    with pytest.raises(UsageError, match="matches a text of no characters"):
        find([own], "banana")


def test_a_pattern_that_calls_itself_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"the pattern 'x' needs more memory than there is"):
        find(user_detectors(["x=(?R)"], ()), "x")


def test_all_texts_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.redaction.patterns.SECONDS_IN_ALL", 0.3)
    (own,) = user_detectors(["x=(?:a|a|aa)+$"], ())
    texts = ["a" * 16 + "b"] * 1000
    with pytest.raises(UsageError, match=r"the pattern 'x' takes too long on all texts together"):
        list(map(partial(find, [own]), texts))


@pytest.mark.parametrize("name", ["KEY", "API-KEY", "SESSION"])
def test_what_looks_like_a_placeholder_hides_nothing(name: str) -> None:
    digits = "0123456789abcdef" * 2
    assert redactor().redact(f"[{name}-{digits}]").replaced
    assert redactor().redact("[KEY-0123abcd] [EMAIL-0123456789ab] [IP-0123456789abcdef]").replaced == ()
    assert Redactor(user_detectors(["all=.+"], ()), SALT).redact("[OTHER-0123abcd]").replaced


def test_a_pattern_that_never_ends_is_ended() -> None:
    (own,) = user_detectors(["x=(?:a|a|aa)+$"], (), seconds=0.2)
    with pytest.raises(UsageError, match=r"the pattern 'x' takes longer than 0.2 s on a text of 5,001 characters"):
        find([own], "a" * 5000 + "b")


def test_redaction_goes_on_while_a_replacement_uncovers_more() -> None:
    def second_of_pair(searched: Searched) -> Iterator[Span]:
        """Sees a word only where none stands before it."""
        if match := re.search(r"(?<!\w )\b[a-z]+\b(?=\W|$)(?![^\[]*\])", searched.raw):
            yield match.span()

    redacted = Redactor([Detector("word", second_of_pair)], SALT).redact("one two")
    assert re.fullmatch(r"\[WORD-\w{8}\] \[WORD-\w{8}\]", redacted.text)
