"""Credentials under all the names, shapes and escapes that clients use; names of models and of caches are none."""

from __future__ import annotations

import json
from urllib.parse import quote

import orjson
import pytest
from test_proxy_secrets import PLACEHOLDER, chat, recorded, said

KEY = "sk-Abc9Xyz81Kq77TTzz0pQ"


def asked(text: str, **more: object) -> dict[str, object]:
    return chat(messages=[{"role": "user", "content": text}], **more)


@pytest.mark.parametrize(
    "name",
    ["accesstoken", "authtoken", "apitoken", "clientsecret", "pass", "passcode", "authentication", "dsn", "X-API-Key"],
)
def test_a_field_of_any_spelling_of_a_credential_is_taken(name: str) -> None:
    assert recorded(asked("hi", **{name: "hunter2"}))["request"][name].startswith("[secret-")


@pytest.mark.parametrize(
    "more",
    [
        {"connection_string": f"AccountName=x;AccountKey={KEY}"},
        {"service_account_json": json.dumps({"private_key": KEY})},
        {"headers": [{"name": "Authorization", "value": f"Bearer {KEY}"}]},
        {"extra_headers": [["Authorization", f"Bearer {KEY}"]]},
        {"extra_headers": [f"Authorization: Bearer {KEY}"]},
        {"extra_headers": json.dumps({"Authorization": f"Bearer {KEY}"})},
        {"hook": f"https://bob:{KEY}@h.example/cb?q=a b"},
    ],
)
def test_a_credential_in_any_shape_of_a_field_is_kept_nowhere(more: dict[str, object]) -> None:
    answer = orjson.dumps({"error": {"message": f"bad {KEY}"}})

    assert KEY not in said(recorded(asked(f"my {KEY}", **more), answer=answer, status=400))


NAMES = ["x-authtoken", "accesstoken", "clientsecret", "x-secretkey", "authentication", "x-passphrase", "x-pwd"]
HEADERS = [*NAMES, "x-bearer", "x-secrets", "x-api-keys", "x-auth-token-v2"]
PARAMETERS = [*NAMES, "authtoken", "apitoken", "secretkey", "hapikey", "passphrase", "pwd"]


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_any_spelling_is_looked_for(name: str) -> None:
    exchange = recorded(asked("it is hunter2pass9"), [(name.encode(), b"hunter2pass9")])

    assert "hunter2pass9" not in said(exchange)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_of_any_spelling_is_looked_for(name: str) -> None:
    assert "hunter2pass9" not in said(recorded(asked("it is hunter2pass9"), query=f"{name}=hunter2pass9".encode()))


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("authorization", f"Bearer\t{KEY}", KEY),
        ("authorization", f"Bearer Bearer {KEY}", KEY),
        ("authorization", f'Bearer "{KEY}"', KEY),
        ("authorization", f"Bearer {KEY},", KEY),
        ("authorization", 'Token token="mytoken-2024"', "mytoken-2024"),
        ("cookie", f'a={{"token":"{KEY}"}}', KEY),
        ("cookie", "a=" + quote(f'{{"token":"{KEY}"}}'), KEY),
    ],
)
def test_a_header_of_any_form_is_looked_for(name: str, value: str, secret: str) -> None:
    exchange = recorded(asked(f"<{secret}>"), [(name.encode(), value.encode())])

    assert PLACEHOLDER.sub("*", exchange["request"]["messages"][0]["content"]) == "<*>"


def inner(text: str) -> str:
    return json.dumps({"k": text})


SECRET = 'ab+cd/Ef9q"8w\\7e6r5t=='


@pytest.mark.parametrize(
    "text",
    [
        inner(inner(SECRET)),
        inner(SECRET).replace("/", "\\/"),
        inner(inner(SECRET).replace("/", "\\/")),
        inner(SECRET).replace("+", "\\u002B"),
        inner(inner(SECRET).replace("+", "\\u002B")),
        inner(inner(inner(SECRET))),
    ],
)
def test_a_key_that_is_escaped_more_than_once_is_found(text: str) -> None:
    answer = orjson.dumps({"choices": [{"message": {"content": text}}]})

    exchange = recorded(asked(text), [(b"x-api-key", SECRET.encode())], answer=answer)

    for kept in (exchange["request"]["messages"][0]["content"], exchange["answer"]["choices"][0]["text"]):
        assert "8w" not in kept
        assert PLACEHOLDER.search(kept)


def test_percent_signs_as_browsers_write_them_are_undone() -> None:
    exchange = recorded(asked(quote("p@ss!word(9)x", safe="!'()*")), [(b"x-api-key", b"p@ss!word(9)x")])

    assert PLACEHOLDER.fullmatch(exchange["request"]["messages"][0]["content"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_bodies_in_other_encodings_are_looked_into(encoding: str) -> None:
    raw = json.dumps(asked(f"my {KEY}")).encode(encoding)

    exchange = recorded(raw, [(b"authorization", f"Bearer {KEY}".encode())])

    assert KEY not in said(exchange)
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"cfg": {{"api_key": "{KEY}"}}, "cfg": {{"x": 1}}}}',
        f'{{"extra_headers": {{"authorization": "{KEY}"}}, "extra_headers": {{"x": 1}}}}',
        f'{{"api\\u005fkey": "{KEY}", "api_key": "other"}}',
    ],
)
def test_what_an_equal_name_drops_is_kept_nowhere(raw: str) -> None:
    exchange = recorded(raw.encode(), answer=orjson.dumps({"error": KEY}), status=400)

    assert KEY not in said(exchange)
    assert exchange["request_raw"] is None


def test_a_short_value_that_an_equal_name_drops_is_not_in_the_raw_text_either() -> None:
    exchange = recorded(b'{"api_key": "hunter2", "api_key": null, "messages": []}')

    assert exchange["request_raw"] is None
    assert "hunter2" not in said(exchange)


def test_a_key_that_is_escaped_whole_is_taken_out_of_the_raw_text() -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    exchange = recorded(f'{{"messages": ["{escaped}"]}}'.encode(), [(b"authorization", f"Bearer {KEY}".encode())])

    assert KEY not in said(exchange)
    assert escaped not in (exchange["request_raw"] or "")


def test_equal_names_without_credentials_are_kept_as_they_came() -> None:
    raw = b'{"model": "a", "model": "b", "messages": []}'

    assert recorded(raw)["request_raw"] == raw.decode()


@pytest.mark.parametrize("end", ['", "messages": [{"role"', '"', ""])
def test_a_key_of_a_body_that_was_cut_is_not_kept_in_the_answer(end: str) -> None:
    exchange = recorded(f'{{"api_key": "{KEY}{end}'.encode(), answer=orjson.dumps({"error": f"no {KEY}"}), status=400)

    assert KEY not in said(exchange)
    assert exchange["request_raw"] is None


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/gpt4omini20240718/chat/completions",
        "/inference/DeepSeekR1DistillQwen32B/chat/completions",
        "/models/llama3instruct70b/v1/chat/completions",
        "/serve/Llama3Instruct70Bfp8dynamic/v1/chat/completions",
        "/engines/a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6/chat/completions",
    ],
)
def test_names_of_models_stay_in_the_path(path: str) -> None:
    assert recorded(asked("x"), path=path)["path"] == path


def test_a_segment_that_the_request_names_as_its_model_stays() -> None:
    model = "a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6"

    exchange = recorded(asked("x", model=model), path=f"/serve/{model}/chat/completions")

    assert (exchange["path"], exchange["request"]["model"]) == (f"/serve/{model}/chat/completions", model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-cache-key", "support-bot-docs"),
        ("x-partition-key", "customer-42-eu"),
        ("x-sort-key", "created-at-descending"),
        ("x-idempotency-key", "0f8fad5b-d9cb-469f-a165-70867728950e"),
        ("x-key", "2024-01-01-00"),
        ("x-session-id", "0f8fad5b-d9cb-469f-a165-70867728950e"),
        ("authorization", "Bearer no-key-required"),
        ("authorization", "Bearer gpt-4o-mini"),
        ("authorization", "Bearer EMPTY"),
    ],
)
def test_values_that_are_no_secrets_stay_in_texts(name: str, value: str) -> None:
    body = asked(f"say {value.removeprefix('Bearer ')} or {value}", session_id=value)

    exchange = recorded(body, [(name.encode(), value.encode())], query=b"key=fast-lane-one")

    assert exchange["request"] == body
    assert exchange["problems"] == []


@pytest.mark.parametrize("value", [b"Bearer " + b"aa-" * 5000 + b"!", b"ab9" + b"\\" * 500 + b"x\\9"])
def test_long_values_take_no_long_time(value: bytes) -> None:
    exchange = recorded(asked("ab9" + "\\" * 300_000), [(b"authorization", value)])

    assert exchange["request"]["messages"][0]["content"].startswith("ab9")
