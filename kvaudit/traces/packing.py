"""Files that are no lines of text in UTF-8, told by their first bytes, and what is to be done with them first."""

from __future__ import annotations

from dataclasses import dataclass

_UNPACK = "unpack it first"
_CONTENT = "take the text out of it first"
_WIDE = tuple(
    (
        first.encode(f"{form}-{order}"),
        f"text in {form}",
        f"convert it to UTF-8 first (iconv -f {form}{order} -t UTF-8)",
    )
    for form in ("UTF-32", "UTF-16")
    for order in ("LE", "BE")
    for first in ("\ufeff", "{", "[")
)
_KINDS = (
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"PK\x05\x06", "a zip archive", _UNPACK),
    (b"BZh", "compressed with bzip2", _UNPACK),
    (b"\x1f\x8b", "compressed with gzip twice", _UNPACK),
    (b"\x1f\x9d", "compressed with compress", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd twice", _UNPACK),
    (b"\xfd7zXZ\x00", "compressed with xz", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", _UNPACK),
    (b"LZIP\x01", "compressed with lzip", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (b"ARROW1", "an Arrow file", _CONTENT),
    (b"Obj\x01", "an Avro file", _CONTENT),
    (b"ORC", "an ORC file", _CONTENT),
    (b"%PDF-", "a PDF file", _CONTENT),
    (b"SQLite format 3\x00", "a SQLite database", _CONTENT),
    *_WIDE,
)
_TAR, _TAR_AT = b"ustar", 257

HEAD_BYTES = 512
"""How many of the first bytes tell."""


@dataclass(frozen=True, slots=True)
class Packing:
    """`what` the file is, as the end of a sentence, and its `remedy`."""

    what: str
    remedy: str


def packing_of(head: bytes) -> Packing | None:
    """How a file, decompressed where it is gzip or zstd, is packed; None where it may be text in UTF-8."""
    if head[_TAR_AT:].startswith(_TAR):
        return Packing("a tar archive", _UNPACK)
    for magic, what, remedy in _KINDS:
        if head.startswith(magic) and not (magic == b"BZh" and not head[3:4].isdigit()):
            return Packing(what, remedy)
    return None
