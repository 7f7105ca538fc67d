"""What stands in the place of a value: the same for the same value under a salt, and of no use without it."""

from __future__ import annotations

import hmac
import re
from functools import cache
from hashlib import sha256

_DIGITS = (8, 12, 16)


@cache
def placeholders_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Placeholders under the names of these detectors, as `Placeholders` writes them; anything else in brackets is
    text like any other.
    """
    known = "|".join(re.escape(name.upper()) for name in names)
    digits = "|".join(rf"[0-9a-f]{{{count}}}" for count in _DIGITS)
    return re.compile(rf"\[(?:{known})-(?:{digits})\]")


class Placeholders:
    """`[EMAIL-3f9a1c2b]`: the detector's name and the first digits of HMAC-SHA256 of the value under the salt.

    Two values that share these digits are told apart by more of them, up to sixteen, which no two values share.
    """

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._digests: dict[str, str] = {}

    def of(self, name: str, value: str) -> str:
        message = f"{name}\0{value}".encode("utf-8", "surrogatepass")
        digest = hmac.new(self._salt, message, sha256).hexdigest()
        for digits in _DIGITS:
            placeholder = f"[{name.upper()}-{digest[:digits]}]"
            if self._digests.setdefault(placeholder, digest) == digest:
                break
        return placeholder
