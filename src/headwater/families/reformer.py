"""Reformer: reversible layers with local and LSH attention, and axial positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core import (
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    Normal,
    TokenClassificationHead,
    pre,
)
from headwater.core.base import HeadSpec, PositionSpec, check_dropout, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.core.heads import FirstToken
from headwater.core.masks import Bidirectional, MaskRule
from headwater.core.modules import Dropout
from headwater.core.stack import BlockSpec
from headwater.families.bert import classifier_dropout
from headwater.families.config_writers import HF_ACTIVATIONS, ConfigDict, find_part, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.parts import must, part
from headwater.variants.axial_positions import AxialPositions
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.chunked_ffn import ChunkedFeedForward
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.reversible import ReversibleStack
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

ATTENTION_TYPES = ("local", "lsh")
LAYER = "[reformer.]encoder.layers.{i}"
OURS = "decoder.layers.{i}"
BODY_NAMES = name_map(f"""
    [reformer.]embeddings.word_embeddings                decoder.embed.tokens
    [reformer.]embeddings.position_embeddings.weights.0  decoder.embed.position.rows
    [reformer.]embeddings.position_embeddings.weights.1  decoder.embed.position.columns
    [reformer.]embeddings.position_embeddings.embedding  decoder.embed.position.table
    {LAYER}.attention.layer_norm                {OURS}.self_attn_norm
    {LAYER}.attention.self_attention.query_key  {OURS}.self_attn.q : unless {OURS}.self_attn.k
    {LAYER}.attention.self_attention.query      {OURS}.self_attn.q
    {LAYER}.attention.self_attention.key        {OURS}.self_attn.k
    {LAYER}.attention.self_attention.value      {OURS}.self_attn.v
    {LAYER}.attention.output.dense              {OURS}.self_attn.out
    {LAYER}.feed_forward.layer_norm             {OURS}.ffn_norm
    {LAYER}.feed_forward.dense.dense            {OURS}.ffn.up
    {LAYER}.feed_forward.output.dense           {OURS}.ffn.down
    [reformer.]encoder.layer_norm               decoder.final_norm
""")
IGNORED_LM_HEAD = name_map("lm_head.decoder  -\nlm_head.bias  -")
HEAD_NAMES = {
    "language": name_map("lm_head.decoder  head.out\nlm_head.bias  -"),  # a bias is stored, and never added
    "hidden_states": IGNORED_LM_HEAD,
    "sequence_classification": name_map("classifier.dense  head.dense\nclassifier.out_proj  head.out")
    + IGNORED_LM_HEAD,
    "question_answering": name_map("qa_outputs  head.out") + IGNORED_LM_HEAD,
}


@part
class NarrowingHead(HeadSpec):
    """Sequence classification: out(dropout(tanh(dense(first)))), where dense narrows the first state to `width`."""

    num_labels: int
    width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "num_labels", _("give the number of labels"))
        check_positive(self, "width", _("d_model is usual"))
        check_dropout(self)

    def build(self, d_model: int) -> nn.Module:
        return NarrowingHeadLayer(self, d_model)


class NarrowingHeadLayer(nn.Module):
    """The module of NarrowingHead."""

    def __init__(self, spec: NarrowingHead, d_model: int) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, spec.width)
        self.dropout = Dropout(spec.dropout)
        self.out = nn.Linear(spec.width, spec.num_labels)

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        first = FirstToken().pool(x, inputs)  # [B, 2·D]
        return self.out(self.dropout(torch.tanh(self.dense(self.dropout(first)))))


# ------------------------------------------------------------------------------------------------- config.json to spec


@register_family("reformer", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_reformer_spec(config: HFConfig, head_type: str) -> Model:
    """Without is_decoder it reads both directions; the stack is called decoder all the same."""
    kinds = config.get_list("attn_layers", str)
    for kind in kinds:
        must(kind in ATTENTION_TYPES, "attn_layers", _("each must be local or lsh"), kind, _("correct config.json"))
    config.ignore("num_hidden_layers", "axial_norm_std", "chunk_size_lm_head", "use_cache")
    d_model = config.get_int("hidden_size")
    vocab = config.get_int("vocab_size")
    attentions = _attentions(config, kinds)
    norm = LayerNorm(config.get_float("layer_norm_eps", default=1e-12))
    ffn = pre(norm, ffn=_feed_forward(config))
    dropout = config.get_float("hidden_dropout_prob", default=0.05)
    blocks = {kind: Block((pre(norm, self_attn=attentions[kind]), ffn), dropout) for kind in attentions}
    layers: tuple[BlockSpec, ...] = tuple(blocks[kind] for kind in kinds)
    embed = Embeddings(vocab, _positions(config), dropout=dropout)
    stack = ReversibleStack(d_model, embed, layers, norm, dropout=dropout)
    heads: dict[str, HeadSpec] = {
        "language": LMHead(vocab),
        "hidden_states": NoHead(),
        "sequence_classification": NarrowingHead(len(config.get_labels()), d_model, classifier_dropout(config)),
        "question_answering": TokenClassificationHead(2),
    }
    std = config.get_float("initializer_range", default=0.02)
    return Model(decoder=stack, head=heads[head_type], init=(("*", Normal(std)),))


def _attentions(config: HFConfig, kinds: list[str]) -> dict[str, Attention]:
    """The attention of each kind of layer; rows are padded to whole chunks of both kinds."""
    mask: MaskRule = Causal() if config.get_bool("is_decoder", default=False) else Bidirectional()
    heads = config.get_int("num_attention_heads", default=12)
    head_dim = config.get_int("attention_head_size", default=64)
    lsh_chunk = config.get_int("lsh_attn_chunk_length", default=64)
    local_chunk = config.get_int("local_attn_chunk_length", default=64)
    both = set(kinds) == set(ATTENTION_TYPES)
    local = ChunkedAttention(
        heads,
        head_dim=head_dim,
        mask=mask,
        dropout=config.get_float("local_attention_probs_dropout_prob", default=0.05),
        chunk=local_chunk,
        before=config.get_int("local_num_chunks_before", minimum=0, default=1),
        after=config.get_int("local_num_chunks_after", minimum=0, default=0),
        paired_chunk=lsh_chunk if both else None,
    )
    lsh = LSHAttention(
        heads,
        head_dim=head_dim,
        mask=mask,
        dropout=config.get_float("lsh_attention_probs_dropout_prob", default=0.0),
        chunk=lsh_chunk,
        before=config.get_int("lsh_num_chunks_before", minimum=0, default=1),
        after=config.get_int("lsh_num_chunks_after", minimum=0, default=0),
        rounds=config.get_int("num_hashes", default=1),
        buckets=config.get_int_list("num_buckets", default=()),
        seed=config.get_optional("get_int", "hash_seed", minimum=0),
        paired_chunk=local_chunk if both else None,
        max_positions=config.get_int("max_position_embeddings", default=4096),
    )
    return {"local": local, "lsh": lsh}


def _feed_forward(config: HFConfig) -> FeedForward:
    d_ff = config.get_int("feed_forward_size", default=512)
    activation = read_activation(config, "hidden_act", default="relu")
    dropout = config.get_float("hidden_dropout_prob", default=0.05)
    chunk = config.get_int("chunk_size_feed_forward", minimum=0, default=0)
    return (
        ChunkedFeedForward(d_ff, activation, True, dropout, chunk)
        if chunk
        else FeedForward(d_ff, activation, True, dropout)
    )


def _positions(config: HFConfig) -> PositionSpec:
    shape = config.get_int_list("axial_pos_shape", default=(64, 64))
    widths = config.get_int_list("axial_pos_embds_dim", default=(64, 192))
    size = config.get_int("max_position_embeddings", default=4096)
    if not config.get_bool("axial_pos_embds", default=True):
        return Learned(size)
    pairs = len(shape) == 2 and len(widths) == 2
    must(
        pairs,
        "axial_pos_shape",
        _("shape and widths must be two sizes each"),
        (shape, widths),
        _("correct config.json"),
    )
    return AxialPositions((shape[0], shape[1]), (widths[0], widths[1]))


# ------------------------------------------------------------------------------------------------- spec to config.json


def _unused_bias(spec: Model, config: ConfigDict) -> dict[str, Tensor]:
    """The bias that transformers stores with the language model head, and never adds."""
    return {"lm_head.bias": torch.zeros(spec.head.vocab)} if isinstance(spec.head, LMHead) else {}


@register_config_writer("reformer", "Reformer", lm_suffix="ModelWithLMHead", extra_tensors=_unused_bias)
def reformer_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_reformer_spec()."""
    stack = spec.decoder
    local = find_part(spec.decoder, ChunkedAttention)
    lsh = find_part(spec.decoder, LSHAttention)
    ffn = find_part(spec.decoder, FeedForward)
    norm = find_part(spec.decoder, LayerNorm)
    attention = local or lsh
    if spec.encoder is not None or stack is None or attention is None or ffn is None or norm is None:
        return None
    if not isinstance(stack.embed, Embeddings):
        return None
    kinds = ["lsh" if find_part(layer, LSHAttention) is not None else "local" for layer in stack.layers]
    return {
        "vocab_size": stack.embed.vocab,
        "hidden_size": stack.d_model,
        "attn_layers": [kinds[index] for index in stack.order or range(len(kinds))],
        "num_attention_heads": attention.heads,
        "attention_head_size": attention.head_dim or stack.d_model // attention.heads,
        "feed_forward_size": ffn.d_ff,
        "hidden_act": HF_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "hidden_dropout_prob": ffn.dropout,
        "chunk_size_feed_forward": ffn.chunk if isinstance(ffn, ChunkedFeedForward) else 0,
        "layer_norm_eps": norm.eps,
        "is_decoder": attention.mask == Causal(),
        **_position_config(stack.embed.position),
        **({} if local is None else _local_config(local)),
        **({} if lsh is None else _lsh_config(lsh)),
    }


def _position_config(position: PositionSpec) -> ConfigDict:
    if isinstance(position, AxialPositions):
        grid = {"axial_pos_shape": list(position.shape), "axial_pos_embds_dim": list(position.widths)}
        return {"axial_pos_embds": True, **grid, "max_position_embeddings": position.max_positions}
    return {"axial_pos_embds": False, "max_position_embeddings": position.max_positions or 4096}


def _local_config(local: ChunkedAttention) -> ConfigDict:
    return {
        "local_attn_chunk_length": local.chunk,
        "local_num_chunks_before": local.before,
        "local_num_chunks_after": local.after,
        "local_attention_probs_dropout_prob": local.dropout,
    }


def _lsh_config(lsh: LSHAttention) -> ConfigDict:
    buckets: int | list[int] | None = list(lsh.buckets) or None
    if len(lsh.buckets) == 1:
        buckets = lsh.buckets[0]
    return {
        "lsh_attn_chunk_length": lsh.chunk,
        "lsh_num_chunks_before": lsh.before,
        "lsh_num_chunks_after": lsh.after,
        "lsh_attention_probs_dropout_prob": lsh.dropout,
        "num_hashes": lsh.rounds,
        "num_buckets": buckets,
        "hash_seed": lsh.seed,
        "max_position_embeddings": lsh.max_positions,
    }
