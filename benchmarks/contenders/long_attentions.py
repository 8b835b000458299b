"""The attentions that long_workload.py times: Headwater's, torch's, and those of the peers, each with its formula.

A builder takes Inputs and returns two functions: run() -> output [1, N, H · D], and reference(row) -> [H, D], float64.
The peers are transformers 5.22.2, performer-pytorch 1.1.4 and local-attention 1.11.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH = 8, 64
SCALE = WIDTH**-0.5
FEATURES = 256
BLOCK, RANDOM_BLOCKS = 64, 3
CHUNK, ROUNDS = 64, 2  # of LSH attention
RADIUS = 127  # of LongT5

FeatureMap = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # one query [H, D], keys [H, N, D] -> φ of both
Built = tuple[Callable[[], Tensor], Callable[[int], Tensor]]


@dataclass
class Inputs:
    """q, k, v of all tokens [1, N, H · D], and a second set for a global token."""

    tensors: tuple[Tensor, ...]
    global_tensors: tuple[Tensor, ...]
    grad_out: Tensor

    @staticmethod
    def draw(n: int, needs_grad: bool) -> Inputs:
        torch.manual_seed(0)
        q, k, v, grad = (torch.randn(1, n, HEADS * WIDTH) for _ in range(4))
        return Inputs(tuple(t.requires_grad_(needs_grad) for t in (q, k, v)), (), grad)

    def add_global(self) -> Inputs:
        """The query of a global token, and the keys and values that it sees: projections of their own."""
        k, v = (torch.randn_like(t).requires_grad_(t.requires_grad) for t in self.tensors[1:])
        q = k[:, -1:].detach().clone().requires_grad_(k.requires_grad)
        self.global_tensors = (q, k, v)
        return self

    @property
    def n(self) -> int:
        return self.tensors[0].shape[1]

    def heads(self) -> tuple[Tensor, ...]:
        """q, k, v as [1, H, N, D]."""
        return tuple(t.view(1, self.n, HEADS, WIDTH).transpose(1, 2) for t in self.tensors)


class Given(nn.Module):
    """In place of a projection: returns a tensor that is there already; a copy for a layer that writes into it."""

    def __init__(self, tensor: Tensor, copied: bool = False) -> None:
        super().__init__()
        self.tensor = tensor
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor.clone() if self.copied else self.tensor


def merge(out: Tensor) -> Tensor:
    """[1, H, N, D] -> [1, N, H · D]"""
    return out.transpose(1, 2).flatten(2)


# ------------------------------------------------------------------------------------------------- dense re-statements


def softmax_row(inputs: Inputs, row: int, counts: Tensor) -> Tensor:
    """Attention of one row [H, D]; counts [N] or [H, N]: how many times each key stands in the softmax."""
    q, k, v = (t.detach().double().view(inputs.n, HEADS, WIDTH) for t in inputs.tensors)
    scores = torch.einsum("hd,nhd->hn", q[row], k) * SCALE + counts.double().log()
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v)


def near(inputs: Inputs, row: int, back: int, ahead: int) -> Tensor:
    distance = torch.arange(inputs.n) - row
    return ((distance >= -back) & (distance <= ahead)).long()


def longformer_row(inputs: Inputs, row: int, reach: int) -> Tensor:
    if row == 0:  # the global token: its own projections of all tokens
        q, k, v = inputs.global_tensors
        whole = Inputs((q.expand(1, inputs.n, -1), k, v), (), inputs.grad_out)
        return softmax_row(whole, 0, torch.ones(inputs.n))
    counts = near(inputs, row, reach, reach)
    counts[0] = 1
    return softmax_row(inputs, row, counts)


def bigbird_row(inputs: Inputs, row: int, random_counts: Callable[[int], Tensor]) -> Tensor:
    blocks = inputs.n // BLOCK
    block = row // BLOCK
    if block in (0, blocks - 1):
        return softmax_row(inputs, row, torch.ones(inputs.n))
    counts = torch.zeros(HEADS, blocks)
    for seen in (0, block - 1, block, block + 1, blocks - 1):
        counts[:, seen] = 1
    counts += random_counts(block)
    return softmax_row(inputs, row, counts.repeat_interleave(BLOCK, 1))


def lsh_row(inputs: Inputs, row: int, order: Tensor) -> Tensor:
    """LSH attention of one row, causal: all chunks that it reads are one softmax. order [H, rounds · N]."""
    qk, _k, v = (t.detach().double().view(inputs.n, HEADS, WIDTH) for t in inputs.tensors)
    rows = []
    for h in range(HEADS):
        keys = []
        for place in (order[h] == row).nonzero()[:, 0].tolist():
            chunk = place // CHUNK
            ring = order.shape[1] // CHUNK
            keys += [order[h, c % ring * CHUNK :][:CHUNK] for c in (chunk - 1, chunk)]
        seen = torch.cat(keys)
        if not (seen < row).any():  # itself only if there is nothing else, with the weight that float32 leaves it
            alone = torch.full((ROUNDS,), -1e5)
            rows.append(v[row, h] * (alone - alone.logsumexp(0)).exp().sum())
            continue
        seen = seen[seen < row]
        key = qk[seen, h] * torch.rsqrt(qk[seen, h].square().mean(-1, keepdim=True) + 1e-6)
        rows.append((SCALE * key @ qk[row, h]).softmax(0) @ v[seen, h])
    return torch.stack(rows)


def biased_row(inputs: Inputs, row: int, bias: Callable[[Tensor], Tensor]) -> Tensor:
    """LongT5's local attention of one row, without a scale; bias: of distances [N] -> [H, N]."""
    q, k, v = (t.detach().double().view(inputs.n, HEADS, WIDTH) for t in inputs.tensors)
    near = slice(max(0, row - RADIUS), row + RADIUS + 1)
    scores = torch.einsum("hd,nhd->hn", q[row], k[near]) + bias(torch.arange(inputs.n)[near] - row).double()
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v[near])


def linear_row(inputs: Inputs, row: int, keys: int, features: FeatureMap, key_eps: float = 0.0) -> Tensor:
    """φ(q) Σ φ(k) vᵀ / φ(q) (Σ φ(k) + key_eps) over the first `keys` keys."""
    q, k, v = (t.detach().double().view(inputs.n, HEADS, WIDTH).transpose(0, 1) for t in inputs.tensors)
    query, key = features(q[:, row], k[:, :keys])
    weights = torch.einsum("hm,hnm->hn", query, key)
    total = weights.sum(-1, keepdim=True) + key_eps * query.sum(-1, keepdim=True)
    return torch.einsum("hn,hnd->hd", weights / total, v[:, :keys])


def elu_features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return F.elu(q) + 1, F.elu(k) + 1


def favor_features(projection: Tensor, published_top: Tensor | None = None) -> FeatureMap:
    """FAVOR+: exp(W x' - |x'|² / 2 - c) + 1e-4, x' = x / d^¼, with c the maximum of W x' - |x'|² / 2.

    As published, it is that of W x'; published_top [H] is that of the keys.
    """
    matrix = projection.detach().double()

    def features(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = q * SCALE**0.5, k * SCALE**0.5
        query = q @ matrix.mT - (q * q).sum(-1, keepdim=True) / 2
        key = k @ matrix.mT - (k * k).sum(-1, keepdim=True) / 2
        if published_top is None:
            tops = query.amax(-1, keepdim=True), key.amax((1, 2), keepdim=True)
        else:
            tops = (q @ matrix.mT).amax(-1, keepdim=True), published_top[:, None, None]
        return (query - tops[0]).exp() + 1e-4, (key - tops[1]).exp() + 1e-4

    return features


# ------------------------------------------------------------------------------------------------------- torch


def full(inputs: Inputs, causal: bool) -> Built:
    q, k, v = inputs.heads()

    def reference(row: int) -> Tensor:
        return softmax_row(inputs, row, near(inputs, row, inputs.n, 0 if causal else inputs.n))

    return lambda: merge(F.scaled_dot_product_attention(q, k, v, is_causal=causal)), reference


# ------------------------------------------------------------------------------------------------------- Headwater


def layer_of(spec, inputs: Inputs, global_token: bool = False) -> Callable[[], Tensor]:
    """The call of build_layer()."""
    return build_layer(spec, inputs, global_token)[1]


def build_layer(
    spec, inputs: Inputs, global_token: bool = False, position: nn.Module | None = None
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The layer of an attention with given projections, and its call, as a stack calls it."""
    from headwater.core.attention import ForwardContext, MaskGroup
    from headwater.core.cache import NoCache
    from headwater.core.embeddings import ModelInputs
    from headwater.core.masks import AttentionMask
    from headwater.core.modules import ComputedBuffers

    n = inputs.n
    layer = spec.build(HEADS * WIDTH).eval()
    for name, tensor in zip("qkv", inputs.tensors, strict=True):
        setattr(layer, name, Given(tensor))
    chosen = None
    if global_token:
        chosen = torch.arange(n)[None] == 0
        for name, tensor in zip(("q_global", "k_global", "v_global"), inputs.global_tensors, strict=True):
            setattr(layer, name, Given(tensor))
    layer.out = nn.Identity()
    for module in layer.modules():
        if isinstance(module, ComputedBuffers):
            module.init_buffers()
    if parameters := list(layer.parameters()):
        with torch.no_grad():
            for parameter in parameters:  # the mixtures of Linformer
                parameter.uniform_(-(FEATURES**-0.5), FEATURES**-0.5)
    index = torch.arange(n)[None]
    position = spec.position.build(WIDTH, HEADS) if position is None else position
    mask = AttentionMask(spec.mask, position, index, index, aligned=True)
    group = MaskGroup.build(mask, index, torch.float32, layer.needs_mask_tensor)
    context = ForwardContext((group,), NoCache(), ModelInputs(index, global_tokens=chosen))
    x = inputs.tensors[0]
    return layer, lambda: layer(x, context, 0)


def window(inputs: Inputs, size: int) -> Built:
    from headwater import core

    spec = core.Attention(HEADS, mask=core.SlidingWindow(size))
    return layer_of(spec, inputs), lambda row: softmax_row(inputs, row, near(inputs, row, size - 1, 0))


def longformer(inputs: Inputs, reach: int) -> Built:
    from headwater.core import LocalWindow
    from headwater.variants.longformer import LongformerAttention

    spec = LongformerAttention(HEADS, mask=LocalWindow(reach))
    inputs.add_global()
    return layer_of(spec, inputs, global_token=True), lambda row: longformer_row(inputs, row, reach)


def bigbird(inputs: Inputs) -> Built:
    from headwater.variants.bigbird import BigBirdAttention, SeededBlocks, draw_blocks

    blocks = inputs.n // BLOCK
    chosen = draw_blocks(HEADS, blocks, RANDOM_BLOCKS, 0, 0)  # [H, blocks - 2, R]

    def counts(block: int) -> Tensor:
        return torch.zeros(HEADS, blocks).scatter_(1, chosen[:, block - 1], 1.0)

    spec = BigBirdAttention(HEADS, block_size=BLOCK, random_blocks=SeededBlocks(RANDOM_BLOCKS))
    if spec.reads_all(inputs.n):  # so short that full attention costs less
        return layer_of(spec, inputs), lambda row: softmax_row(inputs, row, torch.ones(inputs.n))
    return layer_of(spec, inputs), lambda row: bigbird_row(inputs, row, counts)


def linear(inputs: Inputs, causal: bool) -> Built:
    from headwater import core
    from headwater.variants.linear_attention import LinearAttention

    rule = core.Causal() if causal else core.Bidirectional()
    run = layer_of(core.Attention(HEADS, mask=rule, kernel=LinearAttention()), inputs)
    return run, lambda row: linear_row(inputs, row, row + 1 if causal else inputs.n, elu_features)


def performer(inputs: Inputs, causal: bool) -> Built:
    from headwater import core
    from headwater.variants.performer import Performer, RandomFeatures

    rule = core.Causal() if causal else core.Bidirectional()
    spec = Performer(features=FEATURES)
    matrix = RandomFeatures(spec.features, WIDTH, spec.seed)
    matrix.init_buffers()
    features = favor_features(matrix.projection)
    run = layer_of(core.Attention(HEADS, mask=rule, kernel=spec), inputs)
    return run, lambda row: linear_row(inputs, row, row + 1 if causal else inputs.n, features)


def linformer(inputs: Inputs) -> Built:
    from headwater import core
    from headwater.variants.linformer import Linformer

    spec = core.Attention(HEADS, kernel=Linformer(inputs.n, FEATURES, share_kv=True))
    layer, run = build_layer(spec, inputs)
    (mixture,) = (p.detach().double() for p in layer.parameters())  # [N, features]

    def reference(row: int) -> Tensor:
        q, k, v = (t.detach().double().view(inputs.n, HEADS, WIDTH) for t in inputs.tensors)
        keys, values = (torch.einsum("nf,nhd->fhd", mixture, t) for t in (k, v))
        weights = (torch.einsum("hd,fhd->hf", q[row], keys) * SCALE).softmax(-1)
        return torch.einsum("hf,fhd->hd", weights, values)

    return run, reference


def lsh(inputs: Inputs) -> Built:
    from headwater import core
    from headwater.variants.lsh_attention import LSHAttention

    spec = LSHAttention(HEADS, chunk=CHUNK, rounds=ROUNDS, mask=core.Causal())
    layer, run = build_layer(spec, inputs)
    return run, lambda row: lsh_row(inputs, row, layer.choice[0])


def longt5_local(inputs: Inputs) -> Built:
    from headwater import core

    spec = core.Attention(
        HEADS, mask=core.LocalWindow(RADIUS), position=core.RelativeBias(num_buckets=32, max_distance=128), scale=1.0
    )
    position = spec.position.build(WIDTH, HEADS)
    _layer, run = build_layer(spec, inputs, position=position)
    return run, lambda row: biased_row(inputs, row, lambda d: position.table(position.bucket(d)).detach().T)


# ------------------------------------------------------------------------------------------------------- the peers


def transformers_longformer(inputs: Inputs, reach: int) -> Built:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    sizes = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "attention_window": [2 * reach]}
    layer = LongformerSelfAttention(LongformerConfig(**sizes, num_hidden_layers=1), 0).eval()
    inputs.add_global()
    given = dict(zip(("query", "key", "value"), inputs.tensors, strict=True))
    given |= dict(zip(("query_global", "key_global", "value_global"), inputs.global_tensors, strict=True))
    for name, tensor in given.items():
        # it works on [N, 1, ...], and on no places but those of global tokens for query_global
        setattr(layer, name, Given(tensor.transpose(0, 1), copied=name.startswith("query")))
    mask = torch.zeros(1, inputs.n)
    mask[:, 0] = 1  # 0 = local, 1 = global, -1 = hidden

    def run() -> Tensor:
        out = layer(
            inputs.tensors[0], mask, is_index_masked=mask < 0, is_index_global_attn=mask > 0, is_global_attn=True
        )
        return out[0]

    return run, lambda row: longformer_row(inputs, row, reach)


def transformers_bigbird(inputs: Inputs) -> Built:
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    sizes = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "block_size": BLOCK}
    config = BigBirdConfig(**sizes, num_random_blocks=RANDOM_BLOCKS, max_position_embeddings=inputs.n)
    layer = BigBirdBlockSparseAttention(config, seed=0).eval()
    for name, tensor in zip(("query", "key", "value"), inputs.tensors, strict=True):
        setattr(layer, name, Given(tensor))
    make_masks = BigBirdModel.create_masks_for_block_sparse_attn
    blocked, band, from_mask, to_mask = make_masks(torch.ones(1, inputs.n), BLOCK)

    def counts(block: int) -> Tensor:  # in evaluation its random blocks are the first block, again and again
        first = torch.zeros(HEADS, inputs.n // BLOCK)
        first[:, 0] = RANDOM_BLOCKS
        return first

    def run() -> Tensor:
        return layer(inputs.tensors[0], band, from_mask, to_mask, blocked, blocked)[0]

    return run, lambda row: bigbird_row(inputs, row, counts)


def transformers_lsh(inputs: Inputs) -> Built:
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    sizes = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "attention_head_size": WIDTH}
    sizes |= {"lsh_attn_chunk_length": CHUNK, "num_hashes": ROUNDS, "hash_seed": 0, "is_decoder": True}
    layer = LSHSelfAttention(ReformerConfig(**sizes, num_buckets=None, axial_pos_embds=False)).eval()
    layer.query_key = Given(inputs.tensors[0])
    layer.value = Given(inputs.tensors[2])

    def order() -> Tensor:
        qk = inputs.heads()[0]
        buckets = layer._hash_vectors(qk, ROUNDS, None)
        return layer._get_sorted_bucket_idx_and_undo_sorted_bucket_idx(inputs.n, buckets, ROUNDS)[0][0] % inputs.n

    chosen: list[Tensor] = []

    def reference(row: int) -> Tensor:
        if not chosen:
            chosen.append(order())
        return lsh_row(inputs, row, chosen[0])

    return lambda: layer(inputs.tensors[0], num_hashes=ROUNDS).hidden_states, reference


def transformers_longt5_local(inputs: Inputs) -> Built:
    from transformers import LongT5Config
    from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, _get_local_attention_mask

    sizes = {"d_model": HEADS * WIDTH, "d_kv": WIDTH, "num_heads": HEADS, "local_radius": RADIUS}
    layer = LongT5LocalAttention(LongT5Config(**sizes), has_relative_attention_bias=True).eval()
    for name, tensor in zip("qkv", inputs.tensors, strict=True):
        setattr(layer, name, Given(tensor))
    layer.o = nn.Identity()
    mask = _get_local_attention_mask(torch.ones(1, inputs.n), RADIUS + 1, torch.device("cpu"))

    def bias(distance: Tensor) -> Tensor:
        buckets = layer._relative_position_bucket(distance, True, 32, 128)
        return layer.relative_attention_bias(buckets).detach().T

    return lambda: layer(inputs.tensors[0], mask)[0], lambda row: biased_row(inputs, row, bias)


def performer_pytorch(inputs: Inputs, causal: bool) -> Built:
    from performer_pytorch import FastAttention

    layer = FastAttention(WIDTH, nb_features=FEATURES, causal=causal).eval()
    q, k, v = inputs.heads()
    top = (k.detach().double() * SCALE**0.5 @ layer.projection_matrix.double().mT).amax((0, 2, 3))  # also of later keys
    features = favor_features(layer.projection_matrix, top)
    key_eps = 1e-6 * FEATURES**0.5 if causal else 0.0  # beside features that it divides by √M

    def reference(row: int) -> Tensor:
        return linear_row(inputs, row, row + 1 if causal else inputs.n, features, key_eps)

    return lambda: merge(layer(q, k, v)), reference


def local_attention(inputs: Inputs, size: int) -> Built:
    from local_attention import LocalAttention

    layer = LocalAttention(size, causal=True, exact_windowsize=True, use_rotary_pos_emb=False).eval()
    q, k, v = inputs.heads()
    return lambda: merge(layer(q, k, v)), lambda row: softmax_row(inputs, row, near(inputs, row, size, 0))


BUILDERS: dict[str, Callable[[Inputs], Built]] = {
    "full, causal": lambda inputs: full(inputs, True),
    "full": lambda inputs: full(inputs, False),
    "window 256": lambda inputs: window(inputs, 256),
    "window 512": lambda inputs: window(inputs, 512),
    "longformer 256": lambda inputs: longformer(inputs, 128),
    "longformer 512": lambda inputs: longformer(inputs, 256),
    "bigbird": bigbird,
    "linear, causal": lambda inputs: linear(inputs, True),
    "linear": lambda inputs: linear(inputs, False),
    "performer, causal": lambda inputs: performer(inputs, True),
    "performer": lambda inputs: performer(inputs, False),
    "linformer": linformer,
    "lsh, 2 rounds": lsh,
    "longt5 local": longt5_local,
    "transformers lsh, 2 rounds": transformers_lsh,
    "transformers longt5 local": transformers_longt5_local,
    "transformers longformer 512": lambda inputs: transformers_longformer(inputs, 256),
    "transformers bigbird": transformers_bigbird,
    "performer-pytorch, causal": lambda inputs: performer_pytorch(inputs, True),
    "performer-pytorch": lambda inputs: performer_pytorch(inputs, False),
    "local-attention 256": lambda inputs: local_attention(inputs, 256),
}
