"""Tiny models to tune, and adapters with random weights: at their initial weights most of them change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))  # tiny_models.py

from headwater.core import Transformer
from headwater.families.builders import decoder

VOCAB = 48


def tiny_decoder(seed: int = 0) -> Transformer:
    """A decoder of two layers, 32 wide, in eval mode."""
    return decoder(VOCAB, d_model=32, heads=2, layers=2, d_ff=64, position="rotary").build(seed=seed).eval()


def randomize(model: nn.Module, seed: int = 3) -> None:
    """Random numbers added to all that learns."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.2)


@pytest.fixture
def model() -> Transformer:
    return tiny_decoder()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def random_weights() -> Callable[[nn.Module], None]:
    return randomize
