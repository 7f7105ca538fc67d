"""Values that look secret, put together while tests run: whole ones in a file would set off the scanners of others."""

from __future__ import annotations

import base64
import json
import random
import string
from functools import cache

from kvaudit.models.fetch import cache_folder
from kvaudit.redaction.builtin import SUMMARIES, built_in
from kvaudit.redaction.detectors import Detector

ALPHANUMERIC = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
_random = random.Random(20)


def drawn(length: int, alphabet: str = ALPHANUMERIC) -> str:
    return "".join(_random.choice(alphabet) for _ in range(length))


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _uuid() -> str:
    return "-".join(drawn(length, HEX) for length in (8, 4, 4, 4, 12))


def private_key(kind: str = "RSA ", lines: int = 12, *, whole: bool = True) -> str:
    body = "\n".join(drawn(64) for _ in range(lines))
    end = f"\n-----END {kind}PRIVATE KEY-----" if whole else ""
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}{end}"


KEYS = {
    "AWS access key": "AKIA" + drawn(16, string.ascii_uppercase + "234567"),
    "GitHub token": "ghp_" + drawn(36),
    "GitHub fine-grained token": "github_pat_" + drawn(22) + "_" + drawn(59),
    "GitLab token": "glpat-" + drawn(20),
    "OpenAI key": "sk-" + drawn(20) + "T3Blb" + "kFJ" + drawn(20),
    "OpenAI project key": "sk-proj-" + drawn(74) + "T3Blb" + "kFJ" + drawn(74),
    "Anthropic key": "sk-ant-" + "api03-" + drawn(93) + "AA",
    "OpenRouter key": "sk-or-" + "v1-" + drawn(64, HEX),
    "Langfuse key": "sk-lf-" + _uuid(),
    "LiteLLM key": "sk-" + drawn(20) + "42",
    "Hugging Face token": "hf_" + drawn(34, string.ascii_letters),
    "Google key": "AIza" + drawn(35),
    "Slack token": "xoxb-" + drawn(12, "123456789") + "-" + drawn(13, "123456789") + "-" + drawn(24),
    "Stripe key": "sk_live_" + drawn(24),
    "Stripe test key": "sk_test_" + drawn(24),
    "npm token": "npm_" + drawn(36),
    "Groq key": "gsk_" + drawn(52),
    "NVIDIA key": "nvapi-" + drawn(64),
    "JSON web token": ".".join([_part(b'{"alg":"HS256","typ":"JWT"}'), _part(b'{"sub":"1234567890"}'), drawn(43)]),
}
"""Known by their form, wherever they stand."""

KEYS |= {
    "Google client secret": "GOCSPX-" + drawn(28),
    "Google access token": "ya29." + "a0" + drawn(160),
    "webhook secret": "whsec_" + drawn(32),
    "Mailgun key": "key-" + drawn(32, HEX),
    "LangSmith key": "lsv2_" + "pt_" + drawn(32, HEX) + "_" + drawn(10, HEX),
    "Heroku key": "HRKU-" + _uuid(),
    "Fireworks key": "fw_" + drawn(24),
    "New Relic key": "NRAK-" + drawn(27, string.ascii_uppercase + "123456789"),
    "Tavily key": "tvly-" + "dev-" + drawn(32),
    "ElevenLabs key": "sk_" + drawn(48, HEX),
    "Notion secret": "secret_" + drawn(43),
    "Notion token": "ntn_" + drawn(46),
    "Jina key": "jina_" + drawn(60),
    "Supabase key": "sb_" + "secret_" + drawn(22) + "_" + drawn(8),
    "E2B key": "e2b_" + drawn(40, HEX),
    "Mapbox token": "sk." + "eyJ1" + drawn(60) + "." + drawn(22),
    "Discord token": "MT" + drawn(24) + "." + drawn(6) + "." + drawn(38),
}

NAMED = {
    "bearer": ("Authorization: Bearer {}", drawn(40)),
    "basic": ("authorization: basic {}", base64.b64encode(b"user:" + drawn(12).encode()).decode()),
    "URL": ("postgres://admin:{}@db.example.com:5432/x", drawn(12)),
    "URL without user": ("redis://:{}@cache:6379", drawn(12)),
    "assigned in code": ('api_key = "{}"', drawn(32)),
    "environment": ("export SERVICE_API_KEY={}", drawn(32)),
    "JSON": ('{{"client_secret": "{}", "x": 1}}', drawn(32)),
    "YAML": ("access-key: {}", drawn(24)),
    "AWS secret": ("aws_secret_access_key = {}", drawn(40)),
    "token": ("next_token: '{}'", drawn(24)),
    "password": ("password: {}", "hunT3r" + "2!xY"),
    "password in JSON": ('{{"db_password":"{}"}}', "c0rrect" + "horse"),
    "Telegram bot": (f"bot{drawn(9, '123456789')}:{{}}", "AA" + drawn(33)),
    "option": ("run --api-key {} now", drawn(32)),
    "option of a token": ("--token {}", drawn(24)),
    "option of a password": ('--db-password "{}"', "hunT3r" + "2xY9"),
    "tag": ("<apiKey>{}</apiKey>", drawn(32)),
    "tag of a password": ("<password>{}</password>", "hunT3r" + "2xY9"),
    "index": ("API_KEY['prod']='{}'", drawn(32)),
    "number": ("api_key_1={}", drawn(32)),
    "stage": ("access_token_prod={}", drawn(32)),
    "several": ("tokens: {}", drawn(32)),
    "full stop inside": ("api_key={}", drawn(16) + "." + drawn(20)),
    "sentence": ("my API key is {}.", drawn(32)),
    "authorization": ('{{"authorization": "{}"}}', drawn(40)),
    "bearer of letters": ("Bearer {}", "QwErTyUiOp" + "AsDfGhJkLzXcVb"),
    "at sign in a password": ("postgres://bob:{}@h/db", "p@ss"),
    "sshpass": ("sshpass -p {} ssh host", "hunT3r" + "2xY9"),
    "mysql": ("mysql -u root -p{} db", "hunT3r" + "2xY9"),
    "signature of a URL": ("https://a.blob.core.windows.net/c?sv=1&sig={}", drawn(43) + "%3D"),
    "Azure storage": (
        "AccountName=a;AccountKey={};EndpointSuffix=core.windows.net",
        base64.b64encode(_random.randbytes(64)).decode(),
    ),
}
"""Known by what stands before them: (text with {} for the value, value)."""


def long_token() -> str:
    """A JSON web token of three thousand characters."""
    claims = json.dumps({"sub": "1234567890", "groups": drawn(2100)}).encode()
    return ".".join([_part(b'{"alg":"HS256","typ":"JWT"}'), _part(claims), drawn(43)])


EMAILS = ("bob@example.com", "Alice.O'Hara+test@mail.example.co.uk", "jürgen@bücher.de", "x_1@corp.internal")
PHONES = ("+1 415-555-2671", "+14155552671", "+49 (0)30 901820", "+33 1 42 68 53 00", "+8613812345678")
CARDS = (
    "4111 1111 " + "1111 1111",
    "4111-1111-" + "1111-1111",
    "41111111" + "11111111",
    "55555555" + "55554444",
    "3782 822463 " + "10005",
    "60111111" + "11111117",
)
ADDRESSES = ("192.168.1.20", "8.8.8.8", "2001:db8::1", "fe80::1", "2001:db8:0:1:1:1:1:1", "::ffff:10.0.0.1")

VALUES = [
    *(("key", value) for value in KEYS.values()),
    ("key", private_key()),
    ("key", private_key("OPENSSH ")),
    *(("email", value) for value in EMAILS),
    *(("phone", value) for value in PHONES),
    *(("card", value) for value in CARDS),
    *(("ip", value) for value in ADDRESSES),
]

HARMLESS = {
    "UUID": "3f9a1c2b-1111-4aaa-9bbb-0123456789ab 41111111-1111-4111-8111-111111111111",
    "git SHA": "4fffed2070b70fb68057fc33206b6d7a84705602 4fffed2",
    "SHA-256": "sha256:" + 4 * "4fffed2070b70fb6",
    "prices": "2013-01-02,FB,27.44,28.0,69846400\n2013-01-03,FB,27.88,27.77,63140600",
    "floats": "0.4111111111111111 1.4111111111111111 4.11111111111111e+16 +1.6502530000 -4111.11 +37.5 25.5 100.0 95",
    "columns of numbers": "2013 2014 2015 2016 2017 4532 0151 1283 0366 4111",
    "times": "2024-01-02T12:30:45.123Z 12:30:45 2024-01-02T12:30:45+01:00 1700000000 1700000000000 1700000000000000",
    "version numbers": "v1.2.3.4 version 1.2.3.4 Chrome/120.0.0.0 lib==1.2.3.4 Section 1.2.3.4, 1.2.3.4.5 § 1.2.3.4",
    "loopback": "127.0.0.1 0.0.0.0 255.255.255.0 ::1 ::",
    "code": "std::string a::b dead::beef @app.route git.tag[1:2:3] x[::2] a ? b::c : d  1:2:3:4:5:6:7:8",
    "MAC address": "aa:bb:cc:dd:ee:ff 00:1A:2B:3C:4D:5E",
    "packages": "react@18.2.0 logo@2x.png user@host @scope/name a@b",
    "placeholders": "https://user:${PASSWORD}@host https://user:<password>@host api_key = os.environ['SERVICE_KEY_2']",
    "password prose": "The password: it is required. password=None, password: str = Field(), token: The5th",
    "settings": "max_tokens: 4096, pad_token: <|endoftext|>, key: value, secret: none, bearer of bad news and more",
    "calls": "password=generate_password2(length), token = tokens_of_request_2[0], secret_key=settings.SECRET_KEY_2",
    "CSS": "sk-fading-circle sk-circle sk-cube-grid-animation-name",
    "prices with plus": "+12.50 +3% 1+1=2 C++ +1 +100 000",
    "lines of a diff": "+ 1 650 253 0000\n+\t650 253 0000\n+12\n+1650253",
    "wrong check digit": "4111 1111 1111 1112",
    "products": "nginx/1.18.0.0 Python-3.11.2.1",
    "words as keys": "token=cl100k_base_tokenizer_v2 api_key: YOUR_API_KEY_HERE_1234 sk-learn-contrib-2024-notes-10",
    "words behind basic": "basic understanding_of_things_1",
    "attributes": "password=self.password_hash_v2",
    "no addresses": "git@github.com:a/b.git pkg@latest.io x@y.py",
    "LaTeX and paths": r"\newcommand{\foo} C:\new\table\1.2 /usr/lib/python3.11/site-packages",
}


@cache
def detectors(*names: str) -> tuple[Detector, ...]:
    """The built-in detectors of these names, all where none is named."""
    return tuple(built_in(names or tuple(SUMMARIES), cache_folder() / "key-rules"))


def image() -> str:
    """A picture as requests carry it."""
    return json.dumps({"image_url": "data:image/png;base64," + base64.b64encode(_random.randbytes(60_000)).decode()})
