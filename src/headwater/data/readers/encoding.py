"""Character encoding detection: byte-order mark, UTF-8, UTF-16, GB18030, latin-1. An uncertain file is refused."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from headwater.errors import BadFile, BadSetting
from headwater.i18n import _

BYTE_ORDER_MARKS = (  # longest first: the UTF-32 mark begins with the UTF-16 one
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
UTF8_MULTIBYTE = re.compile(rb"(?:[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})")


class TextEncoding(NamedTuple):
    """A character encoding: its name, the length of the byte-order mark, and the evidence for it."""

    name: str
    bom_length: int = 0  # bytes of the byte-order mark at the start
    evidence: str = "named"

    @property
    def newline(self) -> bytes:
        return "\n".encode(self.name)


def encoding_from_name(name: str, sample: bytes) -> TextEncoding:
    """The encoding a user named. A byte-order mark it allows is skipped; UTF-16 without one is little-endian."""
    try:
        codec = codecs.lookup(name).name
        "\n".encode(codec)
    except (LookupError, UnicodeError):
        raise BadSetting(
            _("no text encoding is called {name!r}; try utf-8, utf-16, gb18030 or latin-1", name=name)
        ) from None
    for bom, bom_codec in BYTE_ORDER_MARKS:
        if sample.startswith(bom) and bom_codec.startswith(codec.removesuffix("-sig")):
            return TextEncoding(bom_codec, len(bom))
    without_bom = {"utf-16": "utf-16-le", "utf-32": "utf-32-le", "utf-8-sig": "utf-8"}
    return TextEncoding(without_bom.get(codec, codec))


def detect_encoding(path: Path, sample: bytes) -> TextEncoding:
    """Detect the encoding from the first bytes: byte-order mark, UTF-16 by its zeros, UTF-8, GB18030, latin-1.

    A file that fits none of them is refused, because every byte string is valid in some encoding.
    """
    # Unicode
    for bom, name in BYTE_ORDER_MARKS:
        if sample.startswith(bom):
            return TextEncoding(name, len(bom), _("byte-order mark"))
    if utf16 := _detect_utf16(sample):
        return TextEncoding(utf16, 0, _("zero bytes"))
    invalid_offset = _first_invalid_utf8(sample)
    if invalid_offset < 0:
        return TextEncoding("utf-8", 0, _("well-formed"))

    # other encodings, from the bytes around the first one that is not UTF-8
    evidence = sample[max(0, invalid_offset - 1000) : invalid_offset + 100_000]
    if 2 * sum(map(len, UTF8_MULTIBYTE.findall(evidence))) > sum(byte > 127 for byte in evidence):
        return TextEncoding("utf-8", 0, _("mostly valid, first invalid byte at {offset}", offset=invalid_offset))
    if _looks_chinese(evidence):
        return TextEncoding(
            "gb18030", 0, _("not UTF-8 at byte {offset}, common Chinese characters as GB18030", offset=invalid_offset)
        )
    if _looks_western(evidence):
        return TextEncoding(
            _western_code_page(sample),
            0,
            _("not UTF-8 at byte {offset}, accented letters among ASCII letters", offset=invalid_offset),
        )
    raise BadFile(
        _(
            "{path}: byte {offset} is not UTF-8, and no other encoding is certain; name it: --encoding "
            "gb18030, big5, shift_jis, koi8-r or latin-1, for example",
            path=path,
            offset=invalid_offset,
        )
    )


def _detect_utf16(sample: bytes) -> str:
    """UTF-16 without a byte-order mark: many zero bytes, nearly all in one half of the byte pairs."""
    left = sample[0::2].count(0)
    right = sample[1::2].count(0)
    pairs = len(sample) // 2
    if pairs and right > 0.2 * pairs and right > 20 * left:
        return "utf-16-le"
    if pairs and left > 0.2 * pairs and left > 20 * right:
        return "utf-16-be"
    return ""


def _first_invalid_utf8(sample: bytes) -> int:
    """The offset of the first byte that is not UTF-8, or -1. A character cut off at the end is valid."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)
    except UnicodeDecodeError as error:
        return error.start
    return -1


def _looks_chinese(sample: bytes) -> bool:
    """GB18030: nearly all double bytes are in GB2312's first level (the 3755 most used characters) or punctuation.

    The characters are ordered by sound, so real text uses the full range; Korean bytes stay below C9.
    """
    text = codecs.getincrementaldecoder("gb18030")("replace").decode(sample)
    non_ascii = [c for c in text if ord(c) > 127]
    lead_bytes = [c.encode("gb18030", "replace")[0] for c in non_ascii]
    common = sum(0xB0 <= byte <= 0xD7 or byte in (0xA1, 0xA3) for byte in lead_bytes)
    num_late = sum(0xC9 <= byte <= 0xD7 for byte in lead_bytes)
    return (
        bool(non_ascii)
        and common > 0.85 * len(non_ascii)
        and 10 * num_late > common
        and text.count("\ufffd") * 100 < len(non_ascii)
    )


def _looks_western(sample: bytes) -> bool:
    """latin-1: accented letters are few, and next to ASCII characters: 'café', 'naïve', '«oui»'."""
    text = sample.decode("latin-1")
    non_ascii = [i for i, c in enumerate(text) if ord(c) > 127]
    num_ascii = sum(c.isascii() and c.isalpha() for c in text)
    num_next_to_ascii = sum((text[i - 1 : i] + text[i + 1 : i + 2]).isascii() for i in non_ascii)
    return bool(non_ascii) and len(non_ascii) < 0.35 * num_ascii and num_next_to_ascii > 0.8 * len(non_ascii)


def _western_code_page(sample: bytes) -> str:
    """latin-1 or cp1252: bytes 0x80-0x9F are control characters in latin-1, letters in the Windows code page."""
    if not any(0x80 <= byte <= 0x9F for byte in sample):
        return "latin-1"
    try:
        sample.decode("cp1252")
    except UnicodeDecodeError:
        return "latin-1"
    return "cp1252"
