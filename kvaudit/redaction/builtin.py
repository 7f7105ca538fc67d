"""The detectors that kvaudit brings, by name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

from kvaudit.errors import UsageError
from kvaudit.redaction.detectors import Detector

KEY = "key"

SUMMARIES = MappingProxyType(
    {
        KEY: "keys, tokens, passwords in URLs and settings, private keys",
        "email": "e-mail addresses",
        "phone": "phone numbers with + and a country code",
        "card": "payment cards with a right check digit",
        "ip": "IP addresses, version 4 and 6",
    }
)


def built_in(names: Collection[str], cache: Path | None) -> list[Detector]:
    """The detectors of these names. `cache` is where compiled rules for keys are kept, None for nowhere.

    Raises UsageError for an unknown name.
    """
    unknown = [name for name in names if name not in SUMMARIES]
    if unknown:
        raise UsageError(f"unknown detector {unknown[0]!r:.80}", f"known: {', '.join(SUMMARIES)}")
    from kvaudit.redaction.addresses import find_addresses
    from kvaudit.redaction.personal import find_cards, find_emails, find_phones

    finders = {"email": find_emails, "phone": find_phones, "card": find_cards, "ip": find_addresses}
    made = [Detector(name, finders[name]) for name in SUMMARIES if name in names and name in finders]
    if KEY in names:
        from kvaudit.redaction.keys import KeyFinder

        made.insert(0, Detector(KEY, KeyFinder(cache)))
    return made
