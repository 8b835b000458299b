"""Token pieces as bytes, and as readable text for display.

There are four notations: byte-level BPE writes every byte as a printable character (a space is Ġ), sentencepiece
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


def piece_decoder(spec: dict[str, Any]) -> ToBytes:
    """The function piece -> bytes of a tokenizer, chosen by its decoder."""
    kinds = [part["type"] for part in _decoder_parts(spec.get("decoder"))]
    if "ByteLevel" in kinds:
        return _from_byte_level
    if "WordPiece" in kinds:
        return _from_wordpiece
    if "BPEDecoder" in kinds:
        return _from_end_of_word
    if "Metaspace" in kinds or "ByteFallback" in kinds or "Replace" in kinds:
        return _from_sentencepiece
    return str.encode


def _decoder_parts(decoder: Any) -> list[dict[str, Any]]:
    if not decoder:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _from_byte_level(piece: str) -> bytes:
    alphabet = byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()  # an added token, stored as plain text


def _from_sentencepiece(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace("▁", " ").encode()


def _from_end_of_word(piece: str) -> bytes:
    return (piece.removesuffix("</w>") + " " * piece.endswith("</w>")).encode()


def _from_wordpiece(piece: str) -> bytes:
    return piece.removeprefix("##").encode() if piece.startswith("##") and len(piece) > 2 else b" " + piece.encode()


def readable_text(raw: bytes) -> str:
    """Bytes as text; incomplete characters are shown as \\xNN.

    >>> readable_text(bytes([0xE4, 0xBD]))
    '\\\\xe4\\\\xbd'
    """
    return raw.decode("utf-8", "backslashreplace")


def merge_partial_characters(pieces: Sequence[bytes]) -> list[tuple[str, int]]:
    """Pieces for display: (text, number of tokens); tokens that share a character are merged.

    >>> merge_partial_characters(["a".encode(), "你".encode()[:1], "你".encode()[1:], b"b"])
    [('a', 1), ('你', 2), ('b', 1)]
    """
    merged: list[tuple[str, int]] = []
    start = 0
    while start < len(pieces):
        sizes = range(1, min(4, len(pieces) - start) + 1)
        size = next((n for n in sizes if _is_complete_utf8(b"".join(pieces[start : start + n]))), 1)
        merged.append((readable_text(b"".join(pieces[start : start + size])), size))
        start += size
    return merged


def _is_complete_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
