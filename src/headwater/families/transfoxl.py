"""Transformer-XL (model_type transfo-xl): adaptive embeddings, relative positions, and a memory of earlier segments.

transformers begins with a memory of zero vectors, which take part in the softmax. Here, as in the code of the authors,
the memory is empty at first. same_length becomes a sliding window.
"""

from __future__ import annotations

from headwater.core import Block, Causal, FeedForward, LayerNorm, Model, NoHead, Normal, SlidingWindow, Stack, post, pre
from headwater.errors import BadFile
from headwater.families.config_writers import ConfigDict, register_config_writer
from headwater.families.registry import register_family
from headwater.i18n import _
from headwater.variants.adaptive import AdaptiveEmbeddings, AdaptiveHead, tied_clusters
from headwater.variants.transformer_xl import RecurrentAttention, RelativeXL
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map

LAYER = "[transformer.]layers.{i}"
OURS = "decoder.layers.{i}"
BODY_NAMES = name_map(f"""
    [transformer.]word_emb.emb_layers.{{i}}      decoder.embed.tables.{{i}}
    [transformer.]word_emb.emb_projs.{{i}}       decoder.embed.projections.{{i}}.weight
    [transformer.]pos_emb.inv_freq               -
    {LAYER}.dec_attn.qkv_net                     {OURS}.self_attn.{{q,k,v}}  : split
    {LAYER}.dec_attn.o_net                       {OURS}.self_attn.out
    {LAYER}.dec_attn.r_net                       decoder.position_encodings.{{i}}.position_projection
    {LAYER}.dec_attn.r_w_bias                    decoder.position_encodings.{{i}}.u.weight
    {LAYER}.dec_attn.r_r_bias                    decoder.position_encodings.{{i}}.v.weight
    [transformer.]r_w_bias                       decoder.position_encodings.0.u.weight
    [transformer.]r_r_bias                       decoder.position_encodings.0.v.weight
    {LAYER}.dec_attn.layer_norm                  {OURS}.self_attn_post_norm : unless {OURS}.self_attn_norm
    {LAYER}.dec_attn.layer_norm                  {OURS}.self_attn_norm
    {LAYER}.pos_ff.CoreNet.0                     {OURS}.ffn.up
    {LAYER}.pos_ff.CoreNet.3                     {OURS}.ffn.down
    {LAYER}.pos_ff.layer_norm                    {OURS}.ffn_post_norm : unless {OURS}.ffn_norm
    {LAYER}.pos_ff.layer_norm                    {OURS}.ffn_norm
""")
HEAD_NAMES = {
    "language": name_map("""
        crit.out_layers.{i}     head.tables.{i}
        crit.out_projs.{i}      head.projections.{i}.weight
        crit.cluster_weight     head.clusters.weight
        crit.cluster_bias       head.clusters.bias
    """),
    "hidden_states": name_map("""
        crit.out_layers.{i}     -
        crit.out_projs.{i}      -
        crit.cluster_weight     -
        crit.cluster_bias       -
    """),
}


@register_family("transfo-xl", body_names=BODY_NAMES, head_names=HEAD_NAMES)
def read_transfo_xl_spec(config: HFConfig, head_type: str) -> Model:
    """A post-norm decoder (pre_lnorm: pre-norm) with relative positions, and adaptive embeddings and softmax."""
    config.ignore("init", "init_range", "proj_init_std", "proj_share_all_but_first", "sample_softmax", "adaptive")
    config.get_int("attn_type", minimum=0, maximum=0, default=0)  # others are not published
    d_model = config.get_int("d_model")
    heads = config.get_int("n_head")
    memory = config.get_int("mem_len", default=1600)
    num_layers = config.get_num_layers("n_layer")
    clamp = config.get_float("clamp_len", minimum=-1, default=1000)
    dropout = config.get_float("dropout", default=0.1)

    # a layer
    norm = LayerNorm(config.get_float("layer_norm_epsilon", default=1e-5))
    branch = pre if config.get_bool("pre_lnorm", default=False) else post
    attn = RecurrentAttention(
        heads,
        head_dim=config.get_int("d_head"),
        mask=SlidingWindow(memory) if config.get_bool("same_length", default=True) else Causal(),
        position=RelativeXL(int(clamp) if clamp > 0 else None, width=d_model),
        dropout=config.get_float("dropatt", default=0.0),
        memory=memory,
    )
    ffn = FeedForward(config.get_int("d_inner"), "relu", dropout=dropout)
    block = Block((branch(norm, self_attn=attn), branch(norm, ffn=ffn)), dropout)

    # embeddings and head
    vocab = config.get_int("vocab_size")
    width = config.get_int("d_embed", default=d_model)
    cutoffs = tuple(config.get_list("cutoffs", int, default=[]))
    div = config.get_int("div_val", default=1)
    embed = AdaptiveEmbeddings(vocab, width, cutoffs, div, scale=d_model**0.5, dropout=dropout)
    head = AdaptiveHead(vocab, width, cutoffs, div)
    tie_projections = config.get_list("tie_projs", bool, default=[False] + [True] * len(cutoffs))
    tied = _tied(config, head, d_model, tie_projections) if head_type == "language" else ()
    if not config.get_bool("untie_r", default=True):
        names = [f"decoder.position_encodings.{i}" for i in range(num_layers)]
        tied += tuple((f"{name}.{term}", f"{names[0]}.{term}") for name in names[1:] for term in "uv")

    stack = Stack(d_model, embed, (block,) * num_layers, dropout=dropout)
    init = (("*", Normal(config.get_float("init_std", default=0.02))),)
    return Model(decoder=stack, head=head if head_type == "language" else NoHead(), tied=tied, init=init)


def _tied(config: HFConfig, head: AdaptiveHead, d_model: int, projections: list[bool]) -> tuple[tuple[str, str], ...]:
    """The pairs that share a tensor: by default all tables, and the projections but for the first cluster."""
    pairs = tied_clusters("decoder.embed", head, d_model)
    if not config.get_bool("tie_word_embeddings", default=True):
        pairs = ()
    expected = [False] + [True] * len(head.cutoffs)
    if projections != expected:
        raise BadFile(
            _(
                "{where}: tie_projs must be {expected}, as it is published, got {projections}; no other is supported",
                where=config.where,
                expected=expected,
                projections=projections,
            )
        )
    return pairs


@register_config_writer("transfo-xl", "TransfoXL", lm_suffix="LMHeadModel")
def transfo_xl_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_transfo_xl_spec()."""
    stack = spec.decoder
    if stack is None or spec.encoder is not None or not isinstance(stack.embed, AdaptiveEmbeddings) or not stack.layers:
        return None
    embed = stack.embed
    block = stack.layers[0]
    if not isinstance(block, Block) or len(block.branches) != 2:
        return None
    attn_branch, ffn_branch = block.branches
    attn = attn_branch.layer
    ffn = ffn_branch.layer
    norm = attn_branch.post_norm if isinstance(attn_branch.post_norm, LayerNorm) else attn_branch.norm
    if not (isinstance(attn, RecurrentAttention) and isinstance(ffn, FeedForward) and isinstance(norm, LayerNorm)):
        return None
    position = attn.position
    clamp = position.clamp if isinstance(position, RelativeXL) and position.clamp is not None else -1
    shares_terms = any(path.endswith(".u") for path, _home in spec.tied)
    return {
        "vocab_size": embed.vocab,
        "cutoffs": list(embed.cutoffs),
        "d_embed": embed.width,
        "div_val": embed.div,
        "tie_projs": [False] + [True] * len(embed.cutoffs),
        "tie_word_embeddings": any(path.startswith("head.") for path, _home in spec.tied),
        "d_model": stack.d_model,
        "n_layer": len(stack.layers),
        "n_head": attn.heads,
        "d_head": attn.head_dim or stack.d_model // attn.heads,
        "d_inner": ffn.d_ff,
        "pre_lnorm": attn_branch.norm == norm,
        "mem_len": attn.memory,
        "same_length": attn.mask == SlidingWindow(attn.memory),
        "clamp_len": clamp,
        "untie_r": not shares_terms,
        "dropout": stack.dropout,
        "dropatt": attn.dropout,
        "layer_norm_epsilon": norm.eps,
    }
