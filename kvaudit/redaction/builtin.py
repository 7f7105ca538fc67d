"""The detectors that kvaudit brings, by name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

from kvaudit.redaction.detectors import Detector, Find

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
    """The detectors of these names, in the order of `SUMMARIES`. Raises KeyError for a name that is not among them.

    `cache` is where compiled rules for keys are kept, None for nowhere.
    """
    from kvaudit.redaction.addresses import find_addresses
    from kvaudit.redaction.personal import find_cards, find_emails, find_phones

    finders: dict[str, Find] = {"email": find_emails, "phone": find_phones, "card": find_cards, "ip": find_addresses}
    if KEY in names:
        from kvaudit.redaction.keys import KeyFinder

        finders[KEY] = KeyFinder(cache)
    made = {name: Detector(name, finders[name]) for name in names}
    return [made[name] for name in SUMMARIES if name in made]
