"""What stands in the place of a value: the same for the same value under a salt, and of no use without it."""

from __future__ import annotations

import hmac
import re
from hashlib import sha256

SHORTEST_DIGITS = 8
_STEP = 4
_ALL_DIGITS = 64

PLACEHOLDER = re.compile(rf"\[[A-Z][A-Z0-9-]*-[0-9a-f]{{{SHORTEST_DIGITS},{_ALL_DIGITS}}}\]")


class Placeholders:
    """`[EMAIL-3f9a1c2b]`: the detector's name and the first digits of HMAC-SHA256 of the value under the salt.

    Two values that share these digits are told apart by more of them.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._digests: dict[str, str] = {}

    def of(self, name: str, value: str) -> str:
        message = f"{name}\0{value}".encode("utf-8", "surrogatepass")
        digest = hmac.new(self._salt, message, sha256).hexdigest()
        for digits in range(SHORTEST_DIGITS, _ALL_DIGITS, _STEP):
            placeholder = f"[{name.upper()}-{digest[:digits]}]"
            if self._digests.setdefault(placeholder, digest) == digest:
                return placeholder
        return f"[{name.upper()}-{digest}]"
