"""Variants: components beyond the core, one idea per file (mixture of experts, RoPE scaling, soft-capped attention).

Importing this package registers all of them, so that a spec that has one can be read.
"""

from headwater.variants import (
    experts,
    mean_pool_bridge,
    multi_task_head,
    normed_ffn,
    parallel_block,
    rope_scaling,
    soft_cap,
    transformer_xl,
    xformers,
)

__all__ = [
    "experts",
    "mean_pool_bridge",
    "multi_task_head",
    "normed_ffn",
    "parallel_block",
    "rope_scaling",
    "soft_cap",
    "transformer_xl",
    "xformers",
]
