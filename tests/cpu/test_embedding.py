"""A table gives its rows and gets their slopes, a large one too: those of a row looked up twice are added."""

import pytest
import torch
from torch import nn

from headwater.core.functional import embedding
from headwater.cpu import build, memory
from headwater.cpu.build import training_library

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


@pytest.fixture
def small_ones_too(monkeypatch):
    monkeypatch.setattr(memory, "HUGE_PAGE_MIN_BYTES", 0)


def both(ids, rows=11, width=4):
    ours, theirs = nn.Embedding(rows, width), nn.Embedding(rows, width)
    theirs.load_state_dict(ours.state_dict())
    above = torch.randn(*ids.shape, width)
    embedding(ids, ours).backward(above)
    theirs(ids).backward(above)
    return ours, theirs


@pytest.mark.parametrize("ids", [[[1, 2, 2], [10, 1, 1]], [0], [[]]])
def test_rows_and_their_slopes(small_ones_too, ids):
    ids = torch.tensor(ids, dtype=torch.long)
    ours, theirs = both(ids)
    assert "_EmbeddingLookup" in embedding(ids, ours).grad_fn.name()
    assert torch.equal(embedding(ids, ours), theirs(ids))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_a_row_counted_once_would_be_seen(small_ones_too, monkeypatch):
    """The planted fault: of a row that was looked up twice only the last slope stays."""
    monkeypatch.setattr(torch.Tensor, "index_add_", lambda self, dim, ids, rows: self.index_copy_(dim, ids, rows))
    ours, theirs = both(torch.tensor([3, 3]))
    assert not torch.allclose(ours.weight.grad, theirs.weight.grad)


def test_small_tables_are_left_to_torch():
    assert "_EmbeddingLookup" not in embedding(torch.tensor([1]), nn.Embedding(11, 4)).grad_fn.name()


def test_a_row_that_is_not_there_is_a_fault(small_ones_too):
    with pytest.raises(IndexError):
        embedding(torch.tensor([11]), nn.Embedding(11, 4))
