"""Variants: components beyond the core, one idea per file (mixture of experts, RoPE scaling, soft-capped attention).

Importing this package registers all of them, so that a spec that has one can be read.
"""

from headwater.variants import (
    axial_positions,
    bigbird,
    chunked_attention,
    chunked_ffn,
    experts,
    image_heads,
    longformer,
    lsh_attention,
    mean_pool_bridge,
    multi_task_head,
    normed_ffn,
    parallel_block,
    patches,
    reversible,
    rope_scaling,
    soft_cap,
    stochastic_depth,
    text_image_positions,
    towers,
    transformer_xl,
    transient_global,
    xformers,
)

__all__ = [
    "axial_positions",
    "bigbird",
    "chunked_attention",
    "chunked_ffn",
    "experts",
    "image_heads",
    "longformer",
    "lsh_attention",
    "mean_pool_bridge",
    "multi_task_head",
    "normed_ffn",
    "parallel_block",
    "patches",
    "reversible",
    "rope_scaling",
    "soft_cap",
    "stochastic_depth",
    "text_image_positions",
    "towers",
    "transformer_xl",
    "transient_global",
    "xformers",
]
