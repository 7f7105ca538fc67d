"""What stands in place of texts that may hold keys: enough to tell whether one is the same as before."""

from __future__ import annotations

from hashlib import sha256
from urllib.parse import urlsplit, urlunsplit

_SHOWN = 16


def digested(text: str) -> str:
    """Of an address, host and path stand as they are, and the digest is that of the whole, user and query too."""
    if not text:
        return text
    digest = f"sha256 {sha256(text.encode(errors='surrogateescape')).hexdigest()[:_SHOWN]}"
    try:
        parts = urlsplit(text)
    except ValueError:
        return digest
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return digest
    plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return plain if plain == text else f"{plain} ({digest})"
