"""What one token stands for, as bytes and as text one can read.

Four spellings are in use: byte-level BPE writes every byte as a printable character (a space is Ġ), sentencepiece
writes a space as ▁ and a lone byte as <0xE4>, WordPiece marks a piece that continues a word with ##,
subword-nmt one that ends a word with </w>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

ToBytes = Callable[[str], bytes]
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def spelling(spec: dict[str, Any]) -> ToBytes:
    """How the pieces of this tokenizer are spelt, told from its decoder."""
    kinds = [part["type"] for part in _parts(spec.get("decoder"))]
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "WordPiece" in kinds:
        return _from_wordpiece
    if "BPEDecoder" in kinds:
        return _from_end_of_word
    if "Metaspace" in kinds or "ByteFallback" in kinds or "Replace" in kinds:
        return _from_sentencepiece
    return str.encode


def _parts(decoder: Any) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder] if decoder else []


def _from_byte_level(piece: str) -> bytes:
    alphabet = byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()  # an added token, written as it is


def _from_sentencepiece(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


def _from_end_of_word(piece: str) -> bytes:
    return (piece.removesuffix("</w>") + " " * piece.endswith("</w>")).encode()


def _from_wordpiece(piece: str) -> bytes:
    return piece.removeprefix("##").encode() if piece.startswith("##") and len(piece) > 2 else b" " + piece.encode()


def readable(raw: bytes) -> str:
    """Bytes as text; those that are no whole character are shown as \\xNN.

    >>> readable(bytes([0xE4, 0xBD]))
    '\\\\xe4\\\\xbd'
    """
    return raw.decode("utf-8", "backslashreplace")


def joined(raws: Sequence[bytes]) -> list[tuple[str, int]]:
    """Pieces for display: (text, how many tokens), tokens that share a character taken together.

    >>> joined(["a".encode(), "你".encode()[:1], "你".encode()[1:], b"b"])
    [('a', 1), ('你', 2), ('b', 1)]
    """
    shown: list[tuple[str, int]] = []
    at = 0
    while at < len(raws):
        size = next((n for n in range(1, 5) if at + n <= len(raws) and _whole(b"".join(raws[at : at + n]))), 1)
        shown.append((readable(b"".join(raws[at : at + size])), size))
        at += size
    return shown


def _whole(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
