"""Which encoding a file is in: told by its marks, or found by evidence, or refused. Never guessed in silence."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from headwater.errors import BadFile, BadSetting

MARKS = (  # longest first: the UTF-32 mark begins with the UTF-16 one
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
FAMILIAR = re.compile(rb"(?:[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})")


class Encoding(NamedTuple):
    name: str
    mark: int = 0  # bytes of the byte-order mark at the start
    how: str = "named"

    @property
    def newline(self) -> bytes:
        return "\n".encode(self.name)


def named(name: str, start: bytes) -> Encoding:
    """The encoding a user named. A byte-order mark it allows is skipped; UTF-16 without one is little-endian."""
    try:
        wanted = codecs.lookup(name).name
        "\n".encode(wanted)
    except (LookupError, UnicodeError):
        raise BadSetting(f"no text encoding is called {name!r}; try utf-8, utf-16, gb18030 or latin-1") from None
    for mark, marked in MARKS:
        if start.startswith(mark) and marked.startswith(wanted.removesuffix("-sig")):
            return Encoding(marked, len(mark))
    return Encoding({"utf-16": "utf-16-le", "utf-32": "utf-32-le", "utf-8-sig": "utf-8"}.get(wanted, wanted))


def detect(path: Path, start: bytes) -> Encoding:
    """The encoding shown by the first bytes of a file: a mark, UTF-8, UTF-16 by its zeros, GB18030, latin-1.

    What fits none of them is refused, because every byte string is 'valid' in some encoding.
    """
    for mark, name in MARKS:
        if start.startswith(mark):
            return Encoding(name, len(mark), "byte-order mark")
    if wide := _wide(start):
        return Encoding(wide, 0, "zero bytes")
    fault = _utf8_fault(start)
    if fault < 0:
        return Encoding("utf-8", 0, "valid")
    evidence = start[max(0, fault - 1000) : fault + 100_000]
    if 2 * sum(map(len, FAMILIAR.findall(evidence))) > sum(byte > 127 for byte in evidence):
        return Encoding("utf-8", 0, f"mostly valid, first wrong byte at {fault}")
    if _looks_chinese(evidence):
        return Encoding("gb18030", 0, f"not UTF-8 at byte {fault}, common Chinese characters as GB18030")
    if _looks_western(evidence):
        return Encoding(_western_page(start), 0, f"not UTF-8 at byte {fault}, accented letters among plain ones")
    raise BadFile(
        f"{path}: byte {fault} is not UTF-8, and no other encoding is certain; name it: --encoding gb18030, big5, "
        "shift_jis, koi8-r or latin-1, for example"
    )


def _wide(start: bytes) -> str:
    """UTF-16 without a mark: a good share of zeros, nearly all on one side of the pairs."""
    left, right, pairs = start[0::2].count(0), start[1::2].count(0), len(start) // 2
    if pairs and right > 0.2 * pairs and right > 20 * left:
        return "utf-16-le"
    if pairs and left > 0.2 * pairs and left > 20 * right:
        return "utf-16-be"
    return ""


def _utf8_fault(start: bytes) -> int:
    """The offset of the first byte that is not UTF-8, or -1. A character cut off by the end is no fault."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError as error:
        return error.start
    return -1


def _looks_chinese(start: bytes) -> bool:
    """Nearly all double bytes fall in GB2312's first level: the 3755 most used characters, or its punctuation.

    They lie in the order of their sound, so real text uses all of it; Korean bytes stay in the part up to C8.
    """
    text = codecs.getincrementaldecoder("gb18030")("replace").decode(start)
    high = [c for c in text if ord(c) > 127]
    lead = [c.encode("gb18030", "replace")[0] for c in high]
    common = sum(0xB0 <= byte <= 0xD7 or byte in (0xA1, 0xA3) for byte in lead)
    spread = sum(0xC9 <= byte <= 0xD7 for byte in lead)
    return bool(high) and common > 0.85 * len(high) and 10 * spread > common and text.count("\ufffd") * 100 < len(high)


def _looks_western(start: bytes) -> bool:
    """Accented letters are few, and stand beside plain letters or spaces: 'café', 'naïve', '«oui»'."""
    text = start.decode("latin-1")
    high = [i for i, c in enumerate(text) if ord(c) > 127]
    plain = sum(c.isascii() and c.isalpha() for c in text)
    beside = sum((text[i - 1 : i] + text[i + 1 : i + 2]).isascii() for i in high)
    return bool(high) and len(high) < 0.35 * plain and beside > 0.8 * len(high)


def _western_page(start: bytes) -> str:
    """Bytes 0x80-0x9F are control characters in latin-1; text that uses them means the Windows page."""
    if not any(0x80 <= byte <= 0x9F for byte in start):
        return "latin-1"
    try:
        start.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"
