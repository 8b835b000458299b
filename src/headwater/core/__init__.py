"""The Transformer: one readable core from which every family is built.

Read masks, positions, kernels, attention, stack and model, in that order.
"""

from headwater.core.attention import Attention, AttentionLayer, CrossAttention
from headwater.core.cache import NoCache, fixed, growing, rolling
from headwater.core.embed import Rows, Tokens
from headwater.core.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from headwater.core.heads import (
    ClassHead,
    FirstToken,
    LanguageHead,
    LastToken,
    Mean,
    NoHead,
    NoTransform,
    Picked,
    Pool,
    Several,
    TokenHead,
    Transform,
)
from headwater.core.init import PAPER, Normal, Width, Xavier, Zero, scaled_normal
from headwater.core.kernels import Fused, Plain, XFormers
from headwater.core.masks import Around, Both, Everyone, Past, Window
from headwater.core.model import MeanPool, Model, NoBridge, Transformer
from headwater.core.norms import LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm
from headwater.core.positions import (
    Alibi,
    Learned,
    NoPosition,
    RelativeBias,
    RelativeXL,
    Rotary,
    Sinusoidal,
    SinusoidalHalves,
)
from headwater.core.rope import DynamicScaling, LinearScaling, Llama3Scaling, NoScaling, PerFrequency, YarnScaling
from headwater.core.shapes import decoder, encoder, transformer
from headwater.core.stack import Block, Branch, ParallelBlock, Stack, post, pre, sandwich

__all__ = [
    "ACTIVATIONS",
    "PAPER",
    "Alibi",
    "Around",
    "Attention",
    "AttentionLayer",
    "Block",
    "Both",
    "Branch",
    "ClassHead",
    "CrossAttention",
    "DynamicScaling",
    "Everyone",
    "FeedForward",
    "FirstToken",
    "Fused",
    "GatedFeedForward",
    "LanguageHead",
    "LastToken",
    "LayerNorm",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Mean",
    "MeanPool",
    "Model",
    "NoBridge",
    "NoCache",
    "NoHead",
    "NoNorm",
    "NoPosition",
    "NoScaling",
    "NoTransform",
    "Normal",
    "OffsetRMSNorm",
    "ParallelBlock",
    "Past",
    "PerFrequency",
    "Picked",
    "Plain",
    "Pool",
    "RMSNorm",
    "RelativeBias",
    "RelativeXL",
    "Rotary",
    "Rows",
    "Several",
    "Sinusoidal",
    "SinusoidalHalves",
    "Stack",
    "TokenHead",
    "Tokens",
    "Transform",
    "Transformer",
    "Width",
    "Window",
    "XFormers",
    "Xavier",
    "YarnScaling",
    "Zero",
    "decoder",
    "encoder",
    "fixed",
    "growing",
    "post",
    "pre",
    "rolling",
    "sandwich",
    "scaled_normal",
    "transformer",
]
