"""No credential of a client is recorded, wherever it stands; every other text is recorded as it is."""

from __future__ import annotations

import base64
import gzip
import json
import re
import string
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.proxy.credentials import is_made_of_words
from kvaudit.proxy.exchange import Exchange, api_of
from kvaudit.proxy.secrets import Secrets, placeholder

KEY = 'q7RzA81mmX92kkQ0/A81+zz=x"7'
"""With all that is written otherwise in JSON, in URLs or by PHP."""
SLASHLESS = "sk-q7RzA81mmX92kkQ0zz"
PLACEHOLDER = re.compile(r"\[secret-[0-9a-f]{8}\]")
USER = {"role": "user", "content": "What is it?"}
ORDINARY = (
    "The content-type is application/json; dark-mode-preference is on. SignedHeaders, host, us-east-1, AWS4-HMAC-SHA256"
    " and gpt-4o-2024-08-06 are words, api_key: none, Authorization: Bearer EMPTY, password: administrator, token, "
    "session, /v1/chat/completions, cookie=essential."
)

Headers = list[tuple[bytes, bytes]]


def recorded(
    body: object = None,
    headers: Headers | None = None,
    query: bytes = b"",
    path: str = "/v1/chat/completions",
    answer: bytes = b"{}",
    status: int = 200,
    kind: bytes = b"application/json",
) -> dict[str, Any]:
    api = api_of("POST", path)
    assert api is not None
    exchange = Exchange(api, path, headers or [], query, 10**7)
    exchange.add_request(body if isinstance(body, bytes) else orjson.dumps(body))
    exchange.begin_answer(status, [(b"content-type", kind)])
    exchange.add_answer(answer, 1.0)
    exchange.end("complete")
    return orjson.loads(exchange.line("r1-1"))  # type: ignore[no-any-return]


def said(exchange: dict[str, Any]) -> str:
    """All texts and keys of an exchange, also those inside of JSON, base64 and URLs."""
    found: list[str] = []
    waiting: list[Any] = [exchange]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            found.append(value)
            try:
                inner = json.loads(value)
            except ValueError:
                continue
            waiting += [inner] if isinstance(inner, dict | list) else []
    raw = exchange["request_raw"]
    if isinstance(raw, dict):
        found.append(base64.b64decode(raw["base64"]).decode(errors="replace"))
    return "\n".join(found)


def chat(**more: object) -> dict[str, object]:
    return {"model": "m", "messages": [USER], **more}


FIELDS: dict[str, Callable[[str], dict[str, object]]] = {
    "api_key": lambda key: chat(api_key=key),
    "apiKey": lambda key: chat(apiKey=key),
    "a password": lambda key: chat(metadata={"db": {"password": key}}),
    "extra headers": lambda key: chat(extra_headers={"Authorization": f"Bearer {key}", "X-Kind": "plain"}),
    "a header of a cookie": lambda key: chat(extra_headers={"Cookie": f"theme=dark; id={key}"}),
    "a header of another name": lambda key: chat(extra_headers={"X-Our-Auth": key}),
    "a remote tool": lambda key: chat(tools=[{"type": "mcp", "server_label": "x", "headers": {"Authorization": key}}]),
    "authorization of a remote tool": lambda key: chat(tools=[{"type": "mcp", "authorization": key}]),
    "authorization of a server": lambda key: chat(mcp_servers=[{"type": "url", "authorization_token": key}]),
    "credentials as an object": lambda key: chat(vertex_credentials={"type": "account", "private_key": key}),
    "credentials as a list": lambda key: chat(api_keys=[key]),
    "keys of data sources": lambda key: chat(
        data_sources=[{"type": "search", "parameters": {"authentication": {"type": "api_key", "key": key}}}]
    ),
}


@pytest.mark.parametrize("place", FIELDS)
def test_credentials_in_fields_of_the_body_are_not_kept(place: str) -> None:
    body = FIELDS[place](KEY)

    exchange = recorded(body)

    assert KEY not in said(exchange)
    assert PLACEHOLDER.search(orjson.dumps(exchange["request"]).decode())
    assert exchange["request"]["messages"] == [USER]
    assert exchange["problems"][0] == "credentials were removed from the request"
    if place == "credentials as an object":  # with a short value, which may stand elsewhere
        assert exchange["request_raw"] is None
    else:
        assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@pytest.mark.parametrize("place", FIELDS)
def test_a_credential_of_the_body_is_not_kept_in_prompt_and_answer_either(place: str) -> None:
    messages = [{"role": "user", "content": f"use {KEY}!"}]
    answer = {"choices": [{"message": {"content": f"I used {KEY}."}}]}

    exchange = recorded(FIELDS[place](KEY) | {"messages": messages}, answer=orjson.dumps(answer))

    assert KEY not in said(exchange)
    assert re.fullmatch(rf"use {PLACEHOLDER.pattern}!", exchange["request"]["messages"][0]["content"])
    assert re.fullmatch(rf"I used {PLACEHOLDER.pattern}\.", exchange["answer"]["choices"][0]["text"])


def basic(user: str) -> bytes:
    return base64.b64encode(user.encode())


HEADERS: dict[str, tuple[Headers, list[str]]] = {
    "bearer": ([(b"Authorization", b"Bearer " + KEY.encode())], [KEY]),
    "no scheme": ([(b"authorization", KEY.encode())], [KEY]),
    "basic": (
        [(b"authorization", b"Basic " + basic("alice:open-sesame-1"))],
        [basic("alice:open-sesame-1").decode(), "alice:open-sesame-1", "open-sesame-1"],
    ),
    "basic, a key as the user": ([(b"authorization", b"Basic " + basic(f"{SLASHLESS}:"))], [SLASHLESS]),
    "x-api-key": ([(b"x-api-key", KEY.encode())], [KEY]),
    "letters": ([(b"api-key", b"correcthorsebatterystaple")], ["correcthorsebatterystaple"]),
    "api-key": ([(b"api-key", b"correct horse battery staple")], ["correct horse battery staple"]),
    "x-goog-api-key": ([(b"x-goog-api-key", KEY.encode())], [KEY]),
    "security token": (
        [(b"x-amz-security-token", b"IQoJb3JpZ2luX2VjEKf//////1/w==")],
        ["IQoJb3JpZ2luX2VjEKf//////1/w=="],
    ),
    "cookie": (
        [(b"cookie", b"a=dark-mode-preference; sid=s%3A0123abcd4567ef890123.xY; b=c")],
        ["s%3A0123abcd4567ef890123.xY", "0123abcd4567ef890123", "s:0123abcd4567ef890123.xY"],
    ),
    "digest": (
        [(b"authorization", b'Digest username="alice", response="6629fae49393a05397450978507c4ef1", uri="/v1/x"')],
        ["6629fae49393a05397450978507c4ef1"],
    ),
    "SigV4": (
        [
            (
                b"authorization",
                b"AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20240101/us-east-1/bedrock/aws4_request, "
                b"SignedHeaders=content-type;host, "
                b"Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7",
            )
        ],
        ["AKIAIOSFODNN7EXAMPLE", "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"],
    ),
    "latin-1": ([(b"x-auth-token", "clé-0123456789".encode("latin-1"))], ["clé-0123456789"]),
    "utf-8": ([(b"x-auth-token", "clé-0123456789".encode())], ["clé-0123456789"]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_credentials_of_headers_are_kept_nowhere_and_ordinary_text_is(name: str) -> None:
    headers, secrets = HEADERS[name]
    asked = f"{ORDINARY} Then: {' '.join(secrets)}"
    body = chat(messages=[{"role": "user", "content": asked}], user=secrets[0])
    answer = orjson.dumps({"error": {"message": f"{ORDINARY} But {secrets[-1]} is wrong"}})

    exchange = recorded(body, headers, answer=answer, status=401)

    for secret in secrets:
        assert secret not in said(exchange)
    asked = exchange["request"]["messages"][0]["content"]
    assert asked.startswith(f"{ORDINARY} Then: [secret-")
    assert len(PLACEHOLDER.findall(asked)) == len(secrets)
    assert exchange["error"].startswith(f"{ORDINARY} But [secret-")
    assert exchange["session"] == placeholder(secrets[0])
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@pytest.mark.parametrize(
    ("query", "secrets"),
    [
        (b"key=" + quote(KEY, safe="").encode(), [KEY, quote(KEY, safe="")]),
        (b"api-version=2024-10-21&subscription-key=0123456789abcdef", ["0123456789abcdef"]),
        (b"X-Amz-Signature=5d672d79c15b13162d9279b0855cfba6", ["5d672d79c15b13162d9279b0855cfba6"]),
        (b"code=aXbq3910SnPzF_x8vRtY==", ["aXbq3910SnPzF_x8vRtY=="]),
    ],
)
def test_credentials_of_the_query_are_kept_nowhere(query: bytes, secrets: list[str]) -> None:
    answer = orjson.dumps({"error": f"{ORDINARY} see https://x/?{query.decode()} or {secrets[0]}"})

    exchange = recorded(chat(), query=query, answer=answer, status=400)

    for secret in secrets:
        assert secret not in said(exchange)
    assert exchange["error"].startswith(ORDINARY)


@pytest.mark.parametrize(
    "segment",
    [
        SLASHLESS,
        "0123456789abcdef0123456789abcdef",
        "12345678-1234-4abc-9def-012345678901",
        "sk-this-is-a-very-secret-key-0123456789",
        "Xy3-ab_4Gh9TrQw2-9zQpLm3Kd7_Rt5",
        "dkfjKSDJfkslQPWOeirutyVBncmxLKj",
    ],
)
def test_a_segment_of_the_path_that_looks_drawn_is_not_kept(segment: str) -> None:
    answer = orjson.dumps({"error": f"no such account: {segment}"})

    exchange = recorded(chat(), path=f"/accounts/{segment}/v1/chat/completions", answer=answer, status=404)

    assert exchange["path"] == f"/accounts/{placeholder(segment)}/v1/chat/completions"
    assert exchange["error"] == f"no such account: {placeholder(segment)}"


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/gpt-4o-2024-08-06/chat/completions",
        "/projects/my-project-123456/locations/us-central1/endpoints/openapi/chat/completions",
        "/serve/meta-llama-3-1-70b-instruct-awq-int4/v1/chat/completions",
        "/anthropic/claude-3-5-sonnet-20241022/v1/messages",
    ],
)
def test_other_segments_of_the_path_stay(path: str) -> None:
    assert recorded(chat(), path=path)["path"] == path


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("gzip", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:])),
        ("deflate", zlib.compress),
        ("zstd", zstandard.ZstdCompressor().compress),
    ],
)
def test_credentials_in_a_compressed_body_are_not_kept(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    raw = encode(orjson.dumps(chat(api_key=KEY, note=f"{SLASHLESS}")))
    headers = [(b"content-encoding", encoding.encode()), (b"x-api-key", SLASHLESS.encode())]

    exchange = recorded(raw, headers)

    assert exchange["request"] == chat(api_key=placeholder(KEY), note=placeholder(SLASHLESS))
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        (gzip.compress(b"{}", mtime=0)[:-9] + b"garbage!!", [(b"content-encoding", b"gzip")]),
        (b"whatever", [(b"content-encoding", b"compress")]),
    ],
)
def test_a_body_that_nobody_can_look_into_is_not_kept(raw: bytes, headers: Headers) -> None:
    exchange = recorded(raw, headers)

    assert (exchange["request"], exchange["request_raw"]) == (None, None)
    assert "its bytes are not kept" in exchange["problems"][0]


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages": [], "api_key": "hunter2"}',
        f'{{"messages": [], "api_key": "{SLASHLESS}x", "api_key": null}}'.encode(),
        f'{{"messages": [], "api_key": "{SLASHLESS}x", "api_key": "{SLASHLESS}"}}'.encode(),
        b'{"messages": [], "api_key": 123456789012}',
    ],
)
def test_bytes_from_which_a_credential_cannot_be_taken_safely_are_not_kept(raw: bytes) -> None:
    exchange = recorded(raw, [(b"x-api-key", SLASHLESS.encode())])

    assert SLASHLESS not in said(exchange)
    assert exchange["request"]["messages"] == []
    assert exchange["request_raw"] is None
    assert "cannot be taken out of them safely" in exchange["problems"][-1]


@pytest.mark.parametrize(
    "raw",
    [
        f'{{"messages": ["{SLASHLESS}"'.encode(),
        f'{{"user": "{escaped(SLASHLESS)}"'.encode(),
        f"a=b&c={quote(SLASHLESS).replace('-', '%2D')}".encode(),
        f'["{SLASHLESS}"]'.encode("utf-16"),
        b'{"api_key": "unknown"',
        b'--x\r\ncontent-disposition: form-data; name="password"\r\n\r\nhunter2',
        b"\xff" + SLASHLESS.encode(),
    ],
)
def test_a_body_that_is_no_json_is_kept_only_where_no_credential_can_be_in_it(raw: bytes) -> None:
    exchange = recorded(raw, [(b"authorization", f"Bearer {SLASHLESS}".encode())])

    assert (exchange["request"], exchange["request_raw"]) == (None, None)
    assert exchange["problems"][0] == "the request is not a JSON object"
    assert "they may hold credentials" in exchange["problems"][1]


SCHEMA = {
    "type": "object",
    "properties": {"api_key": {"type": "string", "description": "secret"}, "password": {"type": "string"}},
    "required": ["api_key"],
    "$defs": {"Authorization": {"type": "string", "default": "Bearer 0123456789abcdef0123"}},
}


@pytest.mark.parametrize(
    "body",
    [
        chat(messages=[{"role": "user", "content": ORDINARY}]),
        chat(tools=[{"type": "function", "function": {"name": "log_in", "parameters": SCHEMA}}]),
        chat(tools=[{"name": "log_in", "description": ORDINARY, "input_schema": SCHEMA}]),
        chat(tools=[{"type": "function", "name": "log_in", "parameters": SCHEMA}]),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"password": "hunter2"}'}}]}]),
        chat(messages=[{"role": "user", "content": [{"type": "x", "api_key": "in the prompt, 1234567"}]}]),
        chat(max_tokens=7, stop_token_ids=[5], logit_bias={"50256": -100}, skip_special_tokens=True, eos_token="</s>"),
        chat(
            prompt_cache_key="0123456789abcdef0123456789abcdef", session_id="session-0123456789abcdef0123456789abcdef"
        ),
        chat(metadata={"user_id": "a1b2c3d4-1234-4abc-9def-0123456789ab", "key": "value", "token": "blue"}),
        chat(api_key=None, authorization="", cookies=False),
        {"prompt": ORDINARY, "model": "gpt-4o-2024-08-06"},
        {"input": [{"role": "user", "content": ORDINARY}], "instructions": ORDINARY},
    ],
)
@pytest.mark.parametrize("name", ["bearer", "basic", "SigV4", "cookie", "digest"])
def test_a_request_without_credentials_in_its_body_is_kept_byte_for_byte(body: dict[str, object], name: str) -> None:
    raw = json.dumps(body, indent=1).encode()
    answer = {"choices": [{"message": {"content": ORDINARY}}]}

    exchange = recorded(raw, HEADERS[name][0], answer=orjson.dumps(answer))

    assert exchange["request"] == body
    assert exchange["request_raw"] == raw.decode()
    assert exchange["answer"]["choices"][0]["text"] == ORDINARY
    assert exchange["problems"] == []


def test_urls_of_remote_tools_lose_their_credentials_and_keep_the_rest() -> None:
    urls = [
        "https://alice:open-sesame-1@mcp.example.org/v1",
        "https://mcp.example.org/s/0123456789abcdef0123456789abcdef/mcp",
        "https://mcp.example.org/mcp?api_key=abcdefgh12345&region=us-east-1",
        "https://mcp.example.org/mcp/deepwiki?region=us-east-1&key=",
    ]

    exchange = recorded(chat(tools=[{"type": "mcp", "server_url": url} for url in urls]))

    kept = [PLACEHOLDER.sub("*", tool["server_url"]) for tool in exchange["request"]["tools"]]
    assert kept == [
        "https://alice:*@mcp.example.org/v1",
        "https://mcp.example.org/s/*/mcp",
        "https://mcp.example.org/mcp?api_key=*&region=us-east-1",
        urls[3],
    ]
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]


def test_a_short_password_of_a_url_is_taken_out_of_it_and_of_no_other_text() -> None:
    exchange = recorded(chat(metadata={"hook": "https://ops:ops@hooks.example.org/ops?key=ops"}, user="ops"))

    told = placeholder("ops")
    assert exchange["request"]["metadata"] == {"hook": f"https://ops:{told}@hooks.example.org/{told}?key={told}"}
    assert exchange["request"]["user"] == "ops"
    assert exchange["request_raw"] is None


@pytest.mark.parametrize("secret", ["a/b+c=d-0123456789", "https://x/?k=0123456789", 'q"0123456789', "clé-0123456789"])
def test_a_secret_is_found_however_it_is_written(secret: str) -> None:
    forms = [
        secret,
        quote(secret, safe=""),
        quote(secret),
        re.sub("%..", lambda match: match[0].lower(), quote(secret, safe="")),
        json.dumps({"key": secret}),
        json.dumps({"key": secret}, ensure_ascii=False),
        json.dumps({"key": secret}).replace("/", r"\/"),
    ]
    asked = [{"role": "user", "content": text} for text in forms]

    exchange = recorded(chat(messages=asked), [(b"x-api-key", secret.encode())])

    assert exchange["request"]["messages"][0]["content"] == placeholder(secret)
    for message in exchange["request"]["messages"]:
        assert "0123456789" not in message["content"]
        assert placeholder(secret) in message["content"]


def test_two_secrets_have_two_placeholders_and_one_has_one() -> None:
    def session(name: str) -> Any:
        return recorded(chat(session_id=name), [(b"x-session-token", name.encode())])["session"]

    assert session("session-0001") == session("session-0001") != session("session-0002")
    assert PLACEHOLDER.fullmatch(session("session-0001"))


@pytest.mark.parametrize("secret", ["EMPTY", "dummy", "none", "administrator", "abc1"])
def test_words_are_not_taken_for_secrets_in_texts(secret: str) -> None:
    asked = [{"role": "user", "content": f"The {secret} said Bearer {secret}"}]
    headers = [(b"authorization", f"Bearer {secret}".encode()), (b"cookie", f"a={secret}".encode())]

    more = {"Authorization": f"Bearer {secret}"}

    exchange = recorded(chat(messages=asked, password=secret, extra_headers=more), headers)

    assert exchange["request"]["messages"] == asked
    assert exchange["request"]["password"] == placeholder(secret)
    assert exchange["request"]["extra_headers"] == {"Authorization": f"Bearer {placeholder(secret)}"}


def test_a_secret_that_is_cut_by_the_length_of_an_error_is_not_kept() -> None:
    told = "x" * (4096 - len(SLASHLESS) // 2) + SLASHLESS

    for answer in (told.encode(), orjson.dumps({"error": told}), orjson.dumps({"strange": told})):
        exchange = recorded(chat(), [(b"x-api-key", SLASHLESS.encode())], answer=answer, status=401)
        assert SLASHLESS[:6] not in exchange["error"]


def test_a_secret_in_the_pieces_of_a_stream_is_not_kept() -> None:
    pieces = [SLASHLESS[:5], SLASHLESS[5:12], SLASHLESS[12:]]
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    stream = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)

    exchange = recorded(chat(), [(b"x-api-key", SLASHLESS.encode())], answer=stream, kind=b"text/event-stream")

    assert exchange["answer"]["choices"][0]["text"] == placeholder(SLASHLESS)


def test_a_secret_that_begins_as_an_escape_ends_is_no_trouble() -> None:
    secret = "nvapi-0123456789abcdef"
    raw = json.dumps(chat(messages=[{"role": "user", "content": f"\nvapi-0123456789abcdef {secret}"}])).encode()

    exchange = recorded(raw, [(b"x-api-key", secret.encode())])

    assert exchange["request"]["messages"][0]["content"] == f"\nvapi-0123456789abcdef {placeholder(secret)}"
    assert exchange["request_raw"] is None


secrets_drawn = st.text(string.ascii_letters + string.digits + "-_.~+/=", min_size=20, max_size=60).filter(
    lambda text: (
        any(map(str.isdigit, text))
        and any(map(str.isalpha, text))
        and "=" not in text.rstrip("=")
        and not is_made_of_words(text)
    )
)
texts = st.text(max_size=30)


@pytest.mark.parametrize("key", ["0aB/cdEfGhIjKlMnOpQr", "qWeRtYuIoPaSdFgHjKlZ", "aBcDeFgH-iJkLmNoP"])
def test_letters_of_both_cases_in_a_jumble_are_no_words(key: str) -> None:
    assert key not in said(recorded(chat(extra_headers={"Authorization": f"Bearer {key}"}, user=f"I am {key}")))


@pytest.mark.parametrize("words", ["no-key-required", "noKeyRequired", "MyOpenAIKey", "gpt-4o-mini", "iPhoneAppKey"])
def test_words_stay_words(words: str) -> None:
    assert is_made_of_words(words)


@given(secrets_drawn, texts, texts, st.sampled_from(sorted(FIELDS)), st.booleans())
def test_no_secret_is_ever_kept(secret: str, before: str, after: str, place: str, ascii_only: bool) -> None:
    around = f"{before}{secret}{after}"
    asked = [{"role": "user", "content": around}, {"role": "user", "content": json.dumps({around: quote(secret, "")})}]
    body = FIELDS[place](secret) | {"messages": asked, around: [around, {"x": f"{before}{secret}"}]}
    raw = json.dumps(body, ensure_ascii=ascii_only).encode(errors="replace")
    answer = json.dumps({"id": around, "error": {"message": around, "code": [around]}}).encode()
    headers = [(b"authorization", f"Bearer {secret}".encode()), (b"x-request-id", secret.encode())]

    exchange = recorded(raw, headers, answer=answer, status=500)

    assert secret not in said(exchange)
    if exchange["request_raw"] is not None:
        assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@given(st.text(string.ascii_letters + " -_/;:=.,\n", min_size=1, max_size=200))
def test_texts_of_words_are_never_altered(text: str) -> None:
    headers = [header for pairs, _ in HEADERS.values() for header in pairs]
    secrets = Secrets(headers, b"key=0123456789abcdef&code=words-of-a-kind", "/v1/my-deployment/chat/completions")

    assert secrets.removed(text) == text
