"""Hierarchical reading: chunks, then a stack over their summaries."""

from __future__ import annotations

import pytest
import torch

import headwater
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder, encoder
from headwater.inspection.costs import count
from headwater.variants.hierarchy import hierarchical

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "dropout": 0.0}


def model(chunk=4):
    return hierarchical(encoder(40, **SIZES), chunk=chunk, layers=1).build(seed=0).double().eval()


def test_a_row_of_one_chunk_is_the_flat_model_plus_its_summary():
    built, ids = model(chunk=9), torch.randint(0, 40, (2, 9))
    flat = encoder(40, **SIZES).build(seed=0).double().eval()
    missing = flat.load_state_dict({k: v for k, v in built.state_dict().items() if ".top." not in k}, strict=False)
    assert not missing.missing_keys
    states = flat.encoder(flat.inputs(ids), headwater.core.NoCache())
    ours = built.encoder(built.inputs(ids), headwater.core.NoCache())
    difference = ours - states  # the summary, the same at every token
    torch.testing.assert_close(difference, difference[:, :1].expand_as(difference))
    assert difference.abs().max() > 1e-3


def test_every_token_reaches_every_other_and_padding_reaches_none():
    built, ids = model(), torch.randint(0, 40, (2, 10))
    keep = torch.arange(10) < torch.tensor([[10], [6]])
    padded = built(ids, attention_mask=keep)
    torch.testing.assert_close(padded[1:, :6], built(ids[1:, :6]))
    torch.testing.assert_close(padded[:1], built(ids[:1]))
    more = torch.cat((ids, ids), 1)
    mask = torch.arange(20)[None] < keep.sum(1, keepdim=True)
    torch.testing.assert_close(built(more, attention_mask=mask)[:, :6], padded[:, :6])
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 40
    assert (built(changed)[0] - built(ids)[0]).abs().amax(-1).min() > 1e-9, "also through two borders of chunks"
    assert headwater.check(built, padding_sides=("right",), laws=("numbers", "batch", "padding", "gradients")).ok


def test_it_costs_less():
    flat, chunks = encoder(40, **SIZES), hierarchical(encoder(40, **SIZES), chunk=16)
    assert chunks.build(seed=0)(torch.randint(0, 40, (1, 700))).shape == (1, 700, 40)
    assert count(flat, length=700).parameters < count(chunks, length=700).parameters


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: hierarchical(encoder(40, **SIZES), chunk=0), "chunk must be at least 1"),
        (lambda: hierarchical(encoder(40, **SIZES), layers=0), "top must have a layer"),
        (lambda: hierarchical(decoder(40, **SIZES)), "the model must be an encoder"),
        (
            lambda: model()(torch.ones(1, 2, dtype=torch.long), attention_mask=torch.tensor([[False, True]])),
            "HierarchicalStack cannot be used with padding on the left",
        ),
        (
            lambda: model()(torch.ones(1, 2, dtype=torch.long), document_ids=torch.ones(1, 2, dtype=torch.long)),
            "HierarchicalStack cannot be used with packed documents",
        ),
    ],
)
def test_what_chunks_cannot_honour_is_refused(call, words):
    with pytest.raises((BadInput, BadSetting)) as fault:
        call()
    assert words in str(fault.value) and "\n" not in str(fault.value)
