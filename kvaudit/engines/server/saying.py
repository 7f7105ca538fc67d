"""What a server said where it was no API's answer, in few words."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from kvaudit.engines.server.jsons import object_in
from kvaudit.proxy.answers import error_in

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_PAGE = re.compile(r"[\s\ufeff]*(?:<\?xml[^>]*>\s*)?<(?:!doctype\s+html|html|head|body|title)\b", re.I)
_TITLE = re.compile(r"<title\b[^<>]*>([^<]*)", re.I)
_UNSEEN = re.compile(r"<(script|style)\b.*?(?:</\1[^<>]*>?|\Z)|<[^<>]*>", re.I | re.S)
"""Each reads a text once, whatever stands in it: what is not closed goes to the end, and no tag has another in it."""
_SHOWN = 80
_READ = 1 << 16
"""Characters of a page that are looked at."""
_NOT_SECURE = (
    "WRONG_VERSION_NUMBER",
    "record layer failure",
    "UNKNOWN_PROTOCOL",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
)
"""What OpenSSL says to an answer that is not TLS."""
_NO_RESPONSE = "without sending a response"
_SECURE_ALERT = r"\x15\x03"
"""How an answer in TLS to a request that was not begins, as it is quoted."""


def page_in(text: str) -> str | None:
    """`a web page, 'Sign in'`: with its title, or its first words; None for what is no page."""
    text = _COMMENT.sub("", text[:_READ])
    if not _PAGE.match(text):
        return None
    title = _TITLE.search(text)
    seen = html.unescape(title[1] if title else _UNSEEN.sub(" ", text))
    words = " ".join(seen.replace("\ufeff", " ").split())
    return f"a web page, {words[:_SHOWN]!r}" if words else "a web page"


def error_in_place(event: Mapping[str, Any], *, whole: bool) -> str | None:
    """What a bare `{"message": ..., "code": ...}` says that came in place of an answer, or of a part of it."""
    told = event.get("message")
    return told if "choices" not in event and (whole or "code" in event) and isinstance(told, str) else None


def told_in(status: int, headers: Mapping[str, str], content: bytes) -> str:
    """What an answer that is none says: where a redirect leads, the error in a body, or the body."""
    if 300 <= status < 400:
        return f"it sends on to {_address(headers.get('location', ''))}"
    body = object_in(content)
    return error_in(body) or str(body.get("detail") or body.get("message") or "") or content.decode(errors="replace")


def _address(location: str) -> str:
    """Where a redirect leads, without what may be secret in it."""
    try:
        parts = urlsplit(location)
    except ValueError:
        return "nowhere"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) or "nowhere"


def with_scheme(url: str, said: str) -> str:
    """What httpx said, or that the port speaks the other one of http and https where that shows it."""
    if url.startswith("https:") and any(mark in said for mark in _NOT_SECURE):
        return "the port does not speak https, it seems: write http://"
    if url.startswith("http:") and _SECURE_ALERT in said:
        return "the port speaks https, it seems: write https://"
    if url.startswith("http:") and _NO_RESPONSE in said:
        return f"{said.rstrip('.')}, as a port that speaks https does"
    return said
