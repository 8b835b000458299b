"""The sparse attentions, each with the laws that hold for it, and who sees whom, stated slowly for one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from combinations import D_MODEL, HEADS, VOCAB, Case

from headwater import core as hw
from headwater.core.base import BranchLayerSpec
from headwater.variants.bigbird import BigBirdAttention, FirstBlockInEvaluation, SeededBlocks, draw_blocks
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.linear_attention import LinearAttention
from headwater.variants.linformer import Linformer
from headwater.variants.longformer import FirstTokenIsGlobal, LongformerAttention
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.performer import Performer
from headwater.variants.transformer_xl import RecurrentAttention, RelativeXL
from headwater.variants.transient_global import RelativeBiasWithSummaries, TransientGlobalAttention


@dataclass(frozen=True)
class Tokens:
    """A row as a reader of the manual sees it: which tokens are real, their documents, which are global."""

    real: list[bool]
    documents: list[int]
    is_global: list[bool]

    def place(self, n: int) -> int:
        """Positions are counted over the real tokens of a document."""
        same = [m for m in range(n) if self.real[m] and self.documents[m] == self.documents[n]]
        return len(same)

    def __len__(self) -> int:
        return len(self.real)


Sees = Callable[[Tokens, int, int], bool]  # (row, query, key)


@dataclass(frozen=True)
class Kind:
    """A sparse attention. laws: the names of those that hold, out of law_kit. sees: the rule of one layer."""

    name: str
    attention: BranchLayerSpec
    laws: tuple[str, ...]
    sees: Sees
    packed: bool = False
    holes: bool = True

    def case(self, layers: int = 2) -> Case:
        """A small model of this attention."""
        norm = hw.LayerNorm()
        block = hw.Block((hw.pre(norm, self_attn=self.attention), hw.pre(norm, ffn=hw.FeedForward(24, "gelu"))))
        stack = hw.Stack(D_MODEL, hw.Embeddings(VOCAB, hw.Learned(64), scale=2.0), (block,) * layers, norm)
        init = (("*", hw.Normal(0.35)),)
        side = {"decoder": stack} if self.attention.receptive_field[1] == 0 else {"encoder": stack}
        return Case(self.name, hw.Model(hw.LMHead(VOCAB), **side, init=init))


ALWAYS = (
    "batched_is_alone",
    "hooked_is_fused",
    "recomputed_is_kept",
    "copied_is_same",
    "written_is_read",
    "accumulated_is_full_batch",
    "counted_is_built",
    "blind_rows_are_finite",
    "hidden_changes_nothing",
)
PADDED = ("padded_right_is_unpadded", "padded_left_is_unpadded", "padded_anywhere_is_unpadded")


def longformer_sees(row: Tokens, q: int, k: int) -> bool:
    near = abs(row.place(q) - row.place(k)) <= 2
    wide = row.is_global[q] or row.is_global[k]
    return row.real[k] and row.documents[q] == row.documents[k] and (near or wide)


def _longformer(**settings) -> LongformerAttention:
    return LongformerAttention(HEADS, bias="qkv", mask=hw.LocalWindow(2), **settings)


UNPADDED = tuple(law for law in ALWAYS if law not in ("hooked_is_fused", "recomputed_is_kept"))  # these two pad left


def bigbird_sees(row: Tokens, q: int, k: int) -> bool:
    """Blocks of two tokens, one random block; any head may have it."""
    last = (len(row) - 1) // 2
    ours, theirs = q // 2, k // 2
    ends = {0, last}
    if not row.real[k] or {ours, theirs} & ends or abs(ours - theirs) <= 1:
        return row.real[k]
    return theirs in draw_blocks(HEADS, last + 1, 1, 0, 0)[:, ours - 1].flatten().tolist()


def chunks_see(row: Tokens, q: int, k: int) -> bool:
    """Chunks of four tokens; a chunk sees itself and the one before."""
    return row.real[k] and k <= q and 0 <= q // 4 - k // 4 <= 1


def ring_sees(row: Tokens, q: int, k: int) -> bool:
    """Rows are padded to whole chunks, which form a ring; a chunk sees one before and one after."""
    chunks = -(-len(row) // 4)
    return row.real[k] and (q // 4 - k // 4) % chunks in (0, 1, chunks - 1)


def lsh_sees(row: Tokens, q: int, k: int) -> bool:
    """As many chunks as there are: everything but itself, which the residual stream carries as it is."""
    return row.real[k]


def summaries_see(row: Tokens, q: int, k: int) -> bool:
    """The window, and through summaries everything: tokens after the last full block are summed with it."""
    return row.real[k]


LONGT5 = TransientGlobalAttention(
    HEADS, mask=hw.LocalWindow(2), position=RelativeBiasWithSummaries(8, 6), block_size=4, scale=0.5
)
KINDS = {
    "longt5": Kind("longt5", LONGT5, (*UNPADDED, "padded_right_is_unpadded"), summaries_see, holes=False),
    "longt5, no full block": Kind(
        "longt5, no full block",
        replace(LONGT5, block_size=64),
        (*UNPADDED, "padded_right_is_unpadded"),
        lambda row, q, k: row.real[k] and abs(q - k) <= 2,
        holes=False,
    ),
    "chunks": Kind(
        "chunks",
        ChunkedAttention(HEADS, chunk=4, mask=hw.Causal()),
        (*UNPADDED, "padded_right_is_unpadded"),
        chunks_see,
        holes=False,
    ),
    "chunks, ring": Kind("chunks, ring", ChunkedAttention(HEADS, chunk=4, after=1), UNPADDED, ring_sees, holes=False),
    "lsh": Kind("lsh", LSHAttention(HEADS, chunk=4, before=4, after=4, rounds=2), UNPADDED, lsh_sees, holes=False),
    "lsh, one chunk": Kind("lsh, one chunk", LSHAttention(HEADS, chunk=32), UNPADDED, lsh_sees, holes=False),
    "lsh, causal": Kind(
        "lsh, causal",
        LSHAttention(HEADS, chunk=32, mask=hw.Causal()),
        (*UNPADDED, "padded_right_is_unpadded"),
        lambda row, q, k: row.real[k] and k <= q,
        holes=False,
    ),
    "bigbird": Kind(
        "bigbird",
        BigBirdAttention(HEADS, block_size=2, random_blocks=SeededBlocks(1)),
        UNPADDED,
        bigbird_sees,
        holes=False,
    ),
    "bigbird, as published": Kind(
        "bigbird, as published",
        BigBirdAttention(HEADS, block_size=2, random_blocks=FirstBlockInEvaluation(1)),
        UNPADDED,
        lambda row, q, k: (
            row.real[k] and bool(abs(q // 2 - k // 2) <= 1 or {q // 2, k // 2} & {0, (len(row) - 1) // 2})
        ),
        holes=False,
    ),
    "longformer": Kind(
        "longformer", _longformer(), (*ALWAYS, *PADDED, "packed_is_alone"), longformer_sees, packed=True
    ),
    "longformer, grouped": Kind(
        "longformer, grouped", _longformer(kv_heads=2), (*ALWAYS, *PADDED, "packed_is_alone"), longformer_sees, True
    ),
    "longformer, rotary": Kind(
        "longformer, rotary",
        _longformer(position=hw.Rotary()),
        (*ALWAYS, *PADDED, "packed_is_alone"),
        longformer_sees,
        packed=True,
    ),
    "chunks, rotary": Kind(
        "chunks, rotary",
        ChunkedAttention(HEADS, chunk=4, mask=hw.Causal(), position=hw.Rotary()),
        (*UNPADDED, "padded_right_is_unpadded"),
        chunks_see,
        holes=False,
    ),
    "longformer, first token": Kind(
        "longformer, first token",
        _longformer(global_tokens=FirstTokenIsGlobal()),
        (*ALWAYS, *PADDED, "packed_is_alone"),
        longformer_sees,
    ),
}


# ------------------------------------------------------------------------------ sums, mixtures and memories of all keys


def all_see(row: Tokens, q: int, k: int) -> bool:
    return row.real[k] and row.documents[q] == row.documents[k]


def past_sees(row: Tokens, q: int, k: int) -> bool:
    return k <= q and all_see(row, q, k)


CACHED = ("cached_is_whole", "cached_batches_are_alone")
WITHOUT_WEIGHTS = tuple(law for law in ALWAYS if law != "hooked_is_fused")  # theirs sum to one but for ε, or are fewer


def _kernel(kernel: hw.SDPA, mask: hw.Causal | hw.Bidirectional) -> hw.Attention:
    return hw.Attention(HEADS, mask=mask, kernel=kernel)


SUMS = {
    "linear": Kind(
        "linear",
        _kernel(LinearAttention(), hw.Causal()),
        (*WITHOUT_WEIGHTS, *PADDED, *CACHED, "packed_is_alone"),
        past_sees,
        packed=True,
    ),
    "linear, two-way": Kind(
        "linear, two-way",
        _kernel(LinearAttention(), hw.Bidirectional()),
        (*WITHOUT_WEIGHTS, *PADDED, "packed_is_alone"),
        all_see,
        packed=True,
    ),
    "performer": Kind("performer", _kernel(Performer(8), hw.Causal()), (*WITHOUT_WEIGHTS, *PADDED, *CACHED), past_sees),
    "performer, two-way": Kind(
        "performer, two-way", _kernel(Performer(8), hw.Bidirectional()), (*WITHOUT_WEIGHTS, *PADDED), all_see
    ),
    "linformer": Kind(
        "linformer",
        _kernel(Linformer(32, 6), hw.Bidirectional()),
        tuple(law for law in (*WITHOUT_WEIGHTS, "padded_right_is_unpadded") if law != "recomputed_is_kept"),
        all_see,
        holes=False,
    ),
    "xl": Kind(
        "xl",
        RecurrentAttention(HEADS, mask=hw.Causal(), position=RelativeXL(), memory=6),
        (*ALWAYS, *PADDED, *CACHED, "packed_is_alone", "cache_follows_its_rows"),
        past_sees,
        packed=True,
    ),
}
