"""What the built-in detectors find, in which surroundings, and what they leave alone."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import time
from pathlib import Path

import pytest
from redaction.sensitive_values import CARDS, HARMLESS, KEYS, NAMED, PHONES, VALUES, detectors, image, private_key

from kvaudit.redaction.builtin import built_in
from kvaudit.redaction.detectors import Hit, find

FIXTURE = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"

SURROUNDINGS = {
    "alone": "{}",
    "prose": "Please use {} from now on.",
    "end of a sentence": "It is {}.",
    "brackets": "({}), [{}], <{}>",
    "JSON": '{{"a": "{}", "b": ["{}"]}}',
    "JSON in JSON": '{{\\"a\\": \\"{}\\"}}',
    "escaped lines": "first\\n{}\\nlast",
    "lines": "first\n{}\r\nlast\n",
    "query of a URL": "https://h.example/p?q={}&w=1",
    "code": "value = '{}'  # set",
    "table": "| a | {} | b |",
    "CSV": "1,{},2",
    "Chinese": "用{}，谢谢",
    "emoji": "\U0001f511{}\U0001f511",
}


def found(text: str, *names: str) -> list[tuple[str, str]]:
    return [(hit.name, text[hit.start : hit.end]) for hit in find(detectors(*names), text)]


CASES = [
    pytest.param(surroundings, name, value, id=f"{surroundings}-{name}-{value[:7]}")
    for surroundings in SURROUNDINGS
    for name, value in VALUES
    if not (surroundings == "query of a URL" and re.search(r"\s", value))
]


@pytest.mark.parametrize(("surroundings", "name", "value"), CASES)
def test_a_value_is_found_whatever_stands_around_it(surroundings: str, name: str, value: str) -> None:
    text = SURROUNDINGS[surroundings].replace("{}", value).replace("{{", "{").replace("}}", "}")
    assert found(text) == [(name, value)] * text.count(value)


@pytest.mark.parametrize("kind", NAMED)
def test_what_stands_before_a_value_makes_it_a_key(kind: str) -> None:
    text, value = NAMED[kind]
    whole = text.format(value)
    assert (("key", value)) in found(whole, "key")
    assert (("key", value)) in found(json.dumps({"tool": whole}), "key")


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_only_looks_like_a_value_is_left_alone(kind: str) -> None:
    assert found(HARMLESS[kind]) == []
    assert found(json.dumps({"text": HARMLESS[kind]}, ensure_ascii=False)) == []


def test_a_table_of_prices_and_a_picture_hold_nothing() -> None:
    assert found(gzip.decompress(FIXTURE.read_bytes()).decode()) == []
    assert found(image()) == []


def test_a_private_key_that_was_cut_off_is_found_as_far_as_it_goes() -> None:
    cut = private_key(whole=False)
    assert found(f"cat id_rsa\n{cut}\n\nand so on", "key") == [("key", cut)]


def test_the_rest_of_a_private_key_is_found_without_its_beginning() -> None:
    _, _, rest = private_key().partition("\n")
    assert found(f"{rest}\nand so on", "key") == [("key", rest)]
    assert found(rest.replace("PRIVATE KEY", "CERTIFICATE"), "key") == []


@pytest.mark.parametrize(
    "text",
    ["server {}", "nameserver: {}", "dev {}", "node1/{}:9000", "ssh root@{}", "10.0.0.1-{}", "http://{}:80/x", "ip={}"],
)
def test_an_address_is_one_behind_whatever_is_no_word_for_versions(text: str) -> None:
    assert ("ip", "10.0.0.5") in found(text.format("10.0.0.5"), "ip")


@pytest.mark.parametrize("text", ["{} 12/26 123", "{} exp 1226", "row 7 {} 8", "2 {}", "1\t{}\t2"])
@pytest.mark.parametrize("card", CARDS)
def test_a_card_is_one_with_its_date_and_in_a_table(text: str, card: str) -> None:
    assert found(text.format(card), "card") == [("card", card)]


@pytest.mark.parametrize("text", ["{} and {}", "call {}, or not", "{}; 12 34"])
@pytest.mark.parametrize("phone", PHONES)
def test_a_phone_number_ends_where_it_ends(text: str, phone: str) -> None:
    assert set(found(text.format(phone, phone), "phone")) == {("phone", phone)}


@pytest.mark.parametrize("phone", PHONES)
def test_numbers_behind_a_phone_number_do_not_hide_it(phone: str) -> None:
    """They may be taken for its end where numbers of a country have no fixed length."""
    ((_, value),) = found(f"{phone} 2024-01-02", "phone")
    assert value.startswith(phone)


OTHER_FORMS = [
    ("email", "bob＠example.com"),
    ("email", "иван@пример.рф"),
    ("email", "почта@example.com"),
    ("email", "用户@例子.公司"),
    ("email", '"john doe"@example.com'),
    ("phone", "+1\u2011415\u2011555\u20112671"),
    ("phone", "+1\u2013415\u2013555\u20132671"),
    ("phone", "+33\u202f1\u202f42\u202f68\u202f53\u202f00"),
    ("phone", "+1\u00a0415\u00a0555\u00a02671"),
    ("phone", "%2B14155552671"),
    ("card", "4111\u00a01111\u00a0" + "1111\u00a01111"),
    ("card", "4111  1111  " + "1111  1111"),
    ("card", "4111.1111." + "1111.1111"),
    ("card", "4111 1111-" + "1111 1111"),
    ("card", "62123456" + "78900000003"),
]


@pytest.mark.parametrize(("name", "value"), OTHER_FORMS, ids=lambda value: ascii(value))
@pytest.mark.parametrize("text", ["{}", "see {} now", "({})"])
def test_other_signs_and_scripts_hide_nothing(text: str, name: str, value: str) -> None:
    assert found(text.format(value)) == [(name, value)]


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("card_{}", "card", "41111111" + "11111111"),
        ("addr:{}", "ip", "2001:db8::1"),
        ("ip_{}", "ip", "203.0.113.9"),
        ("http://ip-{}.ec2.internal/x", "ip", "10-0-12-7"),
        ("https://wa.me/{}", "phone", "14155552671"),
    ],
)
def test_a_name_that_touches_a_value_does_not_hide_it(text: str, name: str, value: str) -> None:
    assert (name, value) in found(text.format(value))


@pytest.mark.parametrize(
    "text", ["Cookie: session={}", "Set-Cookie: sid={}; Path=/; HttpOnly", '{{"cookie": "a=b; session={}"}}']
)
def test_cookies_are_found(text: str) -> None:
    value = KEYS["npm token"][4:]
    assert any(value in one for _, one in found(text.format(value), "key"))


def test_json_that_was_escaped_again_and_again_is_seen_through() -> None:
    value = KEYS["npm token"][4:]
    text = json.dumps({"api_key": value})
    for _ in range(3):
        text = json.dumps(text)
        assert found(text, "key") == [("key", value)]


def test_a_private_key_of_putty_is_found() -> None:
    lines = "\n".join(private_key().splitlines()[1:-1])
    text = f"PuTTY-User-Key-File-3: ssh-rsa\nEncryption: none\nPrivate-Lines: 12\n{lines}\nPrivate-MAC: 00"
    assert found(text, "key") == [("key", lines)]


def test_texts_full_of_numbers_take_no_minutes() -> None:
    draw = random.Random(3)
    text = " ".join("+" + " ".join(str(draw.randrange(10, 9999)) for _ in range(4)) for _ in range(6_000))
    begun = time.process_time()
    found(text, "phone")
    assert time.process_time() - begun < 2.5


def test_a_key_in_base64_is_found() -> None:
    encoded = base64.b64encode(b"token " + KEYS["GitHub token"].encode()).decode()
    assert found(f"data: {encoded}", "key") == [("key", encoded)]


def test_an_address_in_a_percent_encoded_url_is_found() -> None:
    assert found("https://h.example/?to=bob%40example.com&x=1") == [("email", "bob%40example.com")]


def test_comments_that_silence_other_scanners_silence_nothing() -> None:
    key = KEYS["GitHub token"]
    assert found(f'key = "{key}"  # gitleaks:allow # nosec # kingfisher:ignore') == [("key", key)]


def test_values_that_overlap_become_one_under_the_name_of_the_longest() -> None:
    text = "ftp://u:p4ss.w0rd.long@mail.example.com"
    assert found(text, "key", "email") == [("email", "p4ss.w0rd.long@mail.example.com")]


def test_detectors_are_chosen_by_name() -> None:
    text = "bob@example.com 8.8.8.8"
    assert found(text, "ip") == [("ip", "8.8.8.8")]
    with pytest.raises(KeyError, match="phones"):
        built_in(["phones"], None)


def test_offsets_are_characters_of_the_text_itself() -> None:
    text = "日本\U0001f511\0" + KEYS["GitHub token"] + "\0é bob@example.com"
    assert find(detectors("key"), text) == [Hit(4, 4 + len(KEYS["GitHub token"]), "key")]
    assert found(text)[1] == ("email", "bob@example.com")
