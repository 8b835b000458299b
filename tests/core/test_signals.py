"""A stack may read a signal instead of token ids: its embedding checks it and makes one vector for each slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import headwater
from headwater.core.base import EmbeddingSpec
from headwater.core.embeddings import InputEmbedding, ModelInputs, describe, signal_inputs
from headwater.core.heads import NoHead
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import part


@part
class NumberFrames(EmbeddingSpec):
    """Frames of numbers [B, T, width], one slot each."""

    width: int

    def build(self, d_model: int) -> InputEmbedding:
        return FramesEmbedding(self.width, d_model)


class FramesEmbedding(InputEmbedding):
    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, d_model)

    def read(self, x: Tensor, name: str) -> ModelInputs:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != self.projection.in_features:
            raise BadInput(_("model: {name} must be frames, got {got}; give frames", name=name, got=describe(x)))
        return signal_inputs(x, slots=x.shape[1])

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        return self.projection(inputs.signal)


@pytest.fixture
def listener():
    spec = headwater.transformer(11, 13, d_model=16, heads=2, layers=2)
    return replace(spec, encoder=replace(spec.encoder, embed=NumberFrames(5)), tied=()).build(seed=0).eval()


def test_an_encoder_decoder_reads_a_signal(listener):
    frames = torch.randn(2, 7, 5)
    assert listener(torch.tensor([[1, 2, 3]] * 2), source=frames).shape == (2, 3, 13)
    memory = listener.encode(frames)
    assert memory.ids.tolist() == [list(range(7))] * 2


def test_padding_of_a_signal_changes_nothing(listener):
    frames = torch.randn(1, 7, 5)
    padded = torch.cat((frames, torch.full((1, 2, 5), 9.0)), 1)
    mask = torch.tensor([[True] * 7 + [False] * 2])
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        whole = listener(ids, source=frames)
        masked = listener(ids, source=padded, source_attention_mask=mask)
        unmasked = listener(ids, source=padded)
    torch.testing.assert_close(masked, whole, atol=1e-5, rtol=0)
    assert not torch.allclose(unmasked, whole, atol=1e-3)


def test_an_encoder_alone_reads_a_signal():
    spec = headwater.encoder(11, NoHead(), d_model=16, heads=2, layers=1)
    model = replace(spec, encoder=replace(spec.encoder, embed=NumberFrames(5)), tied=()).build(seed=0).eval()
    assert model(torch.randn(3, 4, 5)).shape == (3, 4, 16)


def test_a_wrong_signal_is_refused_by_the_embedding_that_reads_it(listener):
    with pytest.raises(BadInput, match=r"source must be frames, got int64 \(1, 3\); give frames"):
        listener(torch.tensor([[1]]), source=torch.tensor([[1, 2, 3]]))
    with pytest.raises(BadInput, match=r"ids must be int64 or int32 \[batch, length\], got float32 \(1, 3\)"):
        listener(torch.zeros(1, 3), source=torch.zeros(1, 4, 5))
    with pytest.raises(BadInput, match=r"attention_mask must have the shape of source \(1, 4\)"):
        listener.encode(torch.zeros(1, 4, 5), attention_mask=torch.ones(1, 5, dtype=torch.bool))
