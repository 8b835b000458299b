"""Byte-level BPE from ranked pieces alone, as tiktoken and ggml files have them: the merges follow from the ranks.

The piece of rank n was made by merging two pieces of lower rank. They are found by encoding it with those alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.text.loaders.vocab import gpt2_spec
from headwater.text.pieces import byte_alphabet
from headwater.text.spec import TokenizerSpec, added_token

MAX_PIECE_BYTES = 256


def ranked_spec(pieces: Sequence[bytes], special_tokens: Sequence[str]) -> TokenizerSpec:
    """The tokenizer of pieces in the order of their ids; the special tokens have the ids that follow."""
    characters = {byte: character for character, byte in byte_alphabet().items()}

    def text(piece: bytes) -> str:
        return "".join(characters[byte] for byte in piece)

    ranks = {piece: rank for rank, piece in enumerate(pieces) if len(piece) <= MAX_PIECE_BYTES}
    pairs = [merge_of(piece, ranks) for piece in ranks]
    merges = [[text(pair[0]), text(pair[1])] for pair in pairs if pair is not None]
    vocab = {text(piece): rank for piece, rank in ranks.items()}
    first = len(pieces)
    spec = gpt2_spec(vocab | {special_tokens[0]: first}, merges, {"eos": special_tokens[0]}, {})
    spec["added_tokens"] += [added_token(token, first + n) for n, token in enumerate(special_tokens) if n]
    return spec


def merge_of(piece: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two pieces that were merged to this one; None for a byte, or where no such merge exists."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    limit = ranks[piece]
    while len(parts) > 2:
        merged = [ranks.get(left + right, limit) for left, right in zip(parts, parts[1:], strict=False)]
        lowest = min(merged)
        if lowest >= limit:
            return None
        at = merged.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None
