"""The Transformer: one readable core from which every family is built.

Read masks, positions, functional, kernels, attention, stack and model, in that order.
"""

# ruff: noqa: F401  (the names that this package offers)

from headwater.core.attention import Attention, AttentionLayer, CrossAttention
from headwater.core.cache import NoCache, dynamic_cache, sliding_cache, static_cache
from headwater.core.embeddings import Embeddings, ModelInputs
from headwater.core.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from headwater.core.heads import (
    ClassificationHead,
    FirstToken,
    LastToken,
    LMHead,
    MeanPooling,
    MLMTransform,
    NoHead,
    NoTransform,
    Pooled,
    Pooler,
    TokenClassificationHead,
)
from headwater.core.init import PAPER_INIT, FanIn, Normal, Xavier, Zero, scaled_normal
from headwater.core.kernels import SDPA, Eager
from headwater.core.masks import And, Bidirectional, Causal, LocalWindow, SlidingWindow
from headwater.core.model import Model, NoBridge, Transformer
from headwater.core.norms import LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm
from headwater.core.positions import (
    Alibi,
    Learned,
    NoPosition,
    NoScaling,
    RelativeBias,
    Rotary,
    Sinusoidal,
    SinusoidalHalves,
)
from headwater.core.stack import Block, Branch, Stack, post, pre, sandwich
