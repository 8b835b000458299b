"""LLaMA 1, 2, 3 and its close kin: pre-norm decoders with rotary places and a gated feed-forward."""

from __future__ import annotations

from typing import Any

from headwater.core import (
    Attention,
    Block,
    ClassHead,
    DynamicScaling,
    GatedFeedForward,
    LanguageHead,
    LastToken,
    LinearScaling,
    Llama3Scaling,
    Model,
    NoHead,
    NoNorm,
    Normal,
    NoScaling,
    OffsetRMSNorm,
    Past,
    Picked,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    Window,
    YarnScaling,
    pre,
)
from headwater.errors import BadFile
from headwater.families.family import act, family
from headwater.families.writer import MAX_POSITIONS, Config, decoder_sizes, first, writer
from headwater.variants.experts import Experts
from headwater.weights.names import table
from headwater.weights.rope import read_rope
from headwater.weights.settings import Settings

ATTENTION = """
    [model.]embed_tokens                           decoder.embed.tokens
    [model.]layers.{i}.input_layernorm             decoder.layers.{i}.self_attn_norm
    [model.]layers.{i}.self_attn.q_proj            decoder.layers.{i}.self_attn.q
    [model.]layers.{i}.self_attn.k_proj            decoder.layers.{i}.self_attn.k
    [model.]layers.{i}.self_attn.v_proj            decoder.layers.{i}.self_attn.v
    [model.]layers.{i}.self_attn.o_proj            decoder.layers.{i}.self_attn.out
    [model.]layers.{i}.self_attn.q_norm            decoder.layers.{i}.self_attn.q_norm
    [model.]layers.{i}.self_attn.k_norm            decoder.layers.{i}.self_attn.k_norm
    [model.]layers.{i}.post_attention_layernorm    decoder.layers.{i}.ffn_norm
    [model.]norm                                   decoder.final_norm
    [model.]layers.{i}.self_attn.rotary_emb.inv_freq  -
"""
NAMES = table(ATTENTION + """
    [model.]layers.{i}.mlp.gate_proj               decoder.layers.{i}.ffn.gate
    [model.]layers.{i}.mlp.up_proj                 decoder.layers.{i}.ffn.up
    [model.]layers.{i}.mlp.down_proj               decoder.layers.{i}.ffn.down
""")  # fmt: skip
EXPERTS = table(ATTENTION + """
    [model.]layers.{i}.block_sparse_moe.gate             decoder.layers.{i}.ffn.router
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w1   decoder.layers.{i}.ffn.experts.{j}.gate
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w2   decoder.layers.{i}.ffn.experts.{j}.down
    [model.]layers.{i}.block_sparse_moe.experts.{j}.w3   decoder.layers.{i}.ffn.experts.{j}.up
""")  # fmt: skip
HEADS = {"language": table("lm_head  head.out"), "states": table("lm_head  -"), "class": table("score  head.out")}


def decoder(c: Settings, kind: str, norm: Any, **changes: Any) -> Model:
    """The decoder all of them are. changes: bias, qk_norm, sees (a rule, or one a layer), scale, ffn."""
    vocab, layers = c.size("vocab_size"), c.layers("num_hidden_layers")
    sees = changes.get("sees", Past())
    ffn = GatedFeedForward(
        c.size("intermediate_size"),
        act(c, "hidden_act", "hidden_activation", default="silu"),
        c.flag("mlp_bias", default=False),
    )
    make_ffn = changes.get("ffn", lambda plain: plain)
    position = rotary(c)

    def block(rule: Any) -> Block:
        attn = Attention(
            c.size("num_attention_heads"),
            c.maybe("size", "num_key_value_heads"),
            c.maybe("size", "head_dim"),
            bias=changes.get("bias", ""),
            sees=rule,
            position=position,
            qk_norm=changes.get("qk_norm", NoNorm()),
            dropout=c.number("attention_dropout", default=0.0),
        )
        return Block((pre(norm, self_attn=attn), pre(norm, ffn=make_ffn(ffn))))

    rules = sees if isinstance(sees, list) else [sees] * layers
    blocks = {rule: block(rule) for rule in dict.fromkeys(rules)}
    embed = Tokens(vocab, scale=changes.get("scale", 1.0))
    stack = Stack(c.size("hidden_size"), embed, tuple(blocks[rule] for rule in rules), norm)
    heads = {
        "language": LanguageHead(vocab),
        "states": NoHead(),
        "class": ClassHead(len(c.labels()), Picked(LastToken()), bias=False),
    }
    ties = kind == "language" and c.flag("tie_word_embeddings", default=changes.get("ties", False))
    return Model(
        decoder=stack,
        head=heads[kind],
        tied=(("head.out", "decoder.embed.tokens"),) if ties else (),
        init=(("*", Normal(c.number("initializer_range", default=0.02))),),
    )


def rotary(c: Settings, partial: float = 1.0) -> Rotary:
    """RoPE and its scaling, from either generation of config.json."""
    rope, longest = read_rope(c, partial=partial), c.size("max_position_embeddings", default=2048)
    n = dict(rope.numbers)
    trained = int(n.get("original_max_position_embeddings", longest))
    if rope.kind == "linear":
        scaling: Any = LinearScaling(n["factor"])
    elif rope.kind == "dynamic":
        scaling = DynamicScaling(n["factor"], trained)
    elif rope.kind == "llama3":
        scaling = Llama3Scaling(n["factor"], n["low_freq_factor"], n["high_freq_factor"], trained)
    elif rope.kind == "yarn" and not {"mscale", "mscale_all_dim"} & set(n):
        scaling = YarnScaling(
            n["factor"], trained, n.get("beta_fast", 32.0), n.get("beta_slow", 1.0), n.get("attention_factor")
        )
    elif rope.kind == "default":
        scaling = NoScaling()
    else:
        raise BadFile(f"{c.where}: rope scaling {rope.kind!r} with these numbers is not built here; known: default, "
                      "linear, dynamic, llama3, yarn")  # fmt: skip
    return Rotary(rope.theta, rope.partial, scaling)


def windows(c: Settings, layers: int) -> Any:
    """Qwen: which layers have a window, said by layer_types or by the older pair of numbers."""
    size, on = c.maybe("size", "sliding_window"), c.flag("use_sliding_window", default=False)
    first = c.size("max_window_layers", least=0, default=layers)
    kinds = c.items("layer_types", str, None)
    if kinds is None:
        kinds = ["sliding_attention" if on and size and i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise BadFile(
            f"{c.where}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
        )
    return [Window(size) if kind == "sliding_attention" and size else Past() for kind in kinds]


def eps(c: Settings, default: float = 1e-6) -> float:
    return c.number("rms_norm_eps", default=default)


@family("llama", names=NAMES, heads=HEADS)
def llama(c: Settings, kind: str) -> Model:
    return decoder(c, kind, RMSNorm(eps(c)), bias="qkvo" if c.flag("attention_bias", default=False) else "")


@family("mistral", names=NAMES, heads=HEADS)
def mistral(c: Settings, kind: str) -> Model:
    size = c.maybe("size", "sliding_window")
    return decoder(c, kind, RMSNorm(eps(c)), sees=Window(size) if size else Past())


@family("qwen2", names=NAMES, heads=HEADS)
def qwen2(c: Settings, kind: str) -> Model:
    return decoder(c, kind, RMSNorm(eps(c)), bias="qkv", sees=windows(c, c.layers("num_hidden_layers")))


@family("qwen3", names=NAMES, heads=HEADS)
def qwen3(c: Settings, kind: str) -> Model:
    norm, bias = RMSNorm(eps(c)), "qkvo" if c.flag("attention_bias", default=False) else ""
    return decoder(c, kind, norm, bias=bias, qk_norm=norm, sees=windows(c, c.layers("num_hidden_layers")))


@family("gemma", names=NAMES, heads=HEADS)
def gemma(c: Settings, kind: str) -> Model:
    bias = "qkvo" if c.flag("attention_bias", default=False) else ""
    return decoder(c, kind, OffsetRMSNorm(eps(c)), bias=bias, scale=c.size("hidden_size") ** 0.5, ties=True)


@family("mixtral", names=EXPERTS, heads=HEADS)
def mixtral(c: Settings, kind: str) -> Model:
    size, count, chosen = c.maybe("size", "sliding_window"), c.size("num_local_experts"), c.size("num_experts_per_tok")
    rule = Window(size) if size else Past()
    return decoder(c, kind, RMSNorm(eps(c, 1e-5)), sees=rule, ffn=lambda plain: Experts(plain, count, chosen))


# ------------------------------------------------------------------------------------------------ config.json of a spec


def settings(spec: Model) -> Config | None:
    """What the config.json of every one of them says; the writers below add their own keys."""
    s = decoder_sizes(spec)
    if s is None:
        return None
    return {
        "vocab_size": s.embed.vocab,
        "hidden_size": s.d_model,
        "intermediate_size": s.ffn.d_ff,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.attn.kv_heads or s.heads,
        "head_dim": s.head_dim,
        "hidden_act": s.activation,
        "rms_norm_eps": s.norm.eps,
        "attention_dropout": s.attn.dropout,
        "tie_word_embeddings": bool(spec.tied),
        **rope_settings(s.attn.position),
    }


def rope_settings(position: Any) -> Config:
    """The inverse of rotary(). A scaling that has no public name (PerFrequency) is left out, and so never matched."""
    if not isinstance(position, Rotary):
        return {"max_position_embeddings": MAX_POSITIONS}
    scaling, longest = position.scaling, MAX_POSITIONS
    rope: Config = {"rope_type": "default", "rope_theta": position.theta}
    if isinstance(scaling, LinearScaling):
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicScaling):
        rope |= {"rope_type": "dynamic", "factor": scaling.factor}
        longest = scaling.trained
    elif isinstance(scaling, Llama3Scaling):
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low,
                 "high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.trained}  # fmt: skip
        longest = int(scaling.factor * scaling.trained)
    elif isinstance(scaling, YarnScaling):
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.trained,
                 "beta_fast": scaling.fast, "beta_slow": scaling.slow}  # fmt: skip
        rope |= {} if scaling.attention is None else {"attention_factor": scaling.attention}
        longest = int(scaling.factor * scaling.trained)
    return {"max_position_embeddings": longest, "rope_parameters": rope}


def _window(spec: Model) -> int | None:
    window = first(spec.decoder, Window)
    return None if window is None else window.size


def _layer_types(spec: Model) -> Config:
    """Qwen's windows: their size, and which layers have one."""
    stack: Any = spec.decoder
    size = _window(spec)
    kinds = ["full_attention" if first(layer, Window) is None else "sliding_attention" for layer in stack.layers]
    return {"use_sliding_window": size is not None, "sliding_window": size, "layer_types": kinds}


@writer("llama", "Llama")
def llama_config(spec: Model) -> Config | None:
    if (said := settings(spec)) is None:
        return None
    attn, ffn = first(spec.decoder, Attention), first(spec.decoder, GatedFeedForward)
    return said | {"attention_bias": bool(attn.bias), "mlp_bias": ffn is not None and ffn.bias}


@writer("mistral", "Mistral")
def mistral_config(spec: Model) -> Config | None:
    said = settings(spec)
    return None if said is None else said | {"sliding_window": _window(spec)}


@writer("qwen2", "Qwen2")
def qwen2_config(spec: Model) -> Config | None:
    said = settings(spec)
    return None if said is None else said | _layer_types(spec)


@writer("qwen3", "Qwen3")
def qwen3_config(spec: Model) -> Config | None:
    said = settings(spec)
    if said is None:
        return None
    return said | _layer_types(spec) | {"attention_bias": bool(first(spec.decoder, Attention).bias)}


@writer("gemma", "Gemma")
def gemma_config(spec: Model) -> Config | None:
    said = settings(spec)
    return None if said is None else said | {"attention_bias": bool(first(spec.decoder, Attention).bias)}


@writer("mixtral", "Mixtral")
def mixtral_config(spec: Model) -> Config | None:
    said, experts = settings(spec), first(spec.decoder, Experts)
    if said is None or experts is None:
        return None
    counts = {"num_local_experts": experts.count, "num_experts_per_tok": experts.chosen}
    return said | counts | {"sliding_window": _window(spec)}
