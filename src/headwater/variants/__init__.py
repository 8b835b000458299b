"""Variants: components beyond the core, one idea per file (mixture of experts, RoPE scaling, soft-capped attention).

Importing this package registers all of them, so that a spec that has one can be read.
"""

from headwater.variants import (
    bigbird,
    experts,
    image_heads,
    longformer,
    mean_pool_bridge,
    multi_task_head,
    normed_ffn,
    parallel_block,
    patches,
    rope_scaling,
    soft_cap,
    stochastic_depth,
    towers,
    transformer_xl,
    xformers,
)

__all__ = [
    "bigbird",
    "experts",
    "image_heads",
    "longformer",
    "mean_pool_bridge",
    "multi_task_head",
    "normed_ffn",
    "parallel_block",
    "patches",
    "rope_scaling",
    "soft_cap",
    "stochastic_depth",
    "towers",
    "transformer_xl",
    "xformers",
]
