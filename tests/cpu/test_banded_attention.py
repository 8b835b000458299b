"""Banded attention in C is its formula in float64: outputs, gradients, dropout; what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.core.banded import Band, GivenRows, LeadingIndex, LeadingKeys
from headwater.core.functional import banded_attention
from headwater.cpu import build
from headwater.cpu.attention import KeyRules, fused_banded_attention
from headwater.cpu.build import TensorMismatch, training_library

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everything(band: Band, queries: int, keys: int, kinds: str) -> dict:
    """Arguments of banded_attention for two rows, four heads, two key/value heads of 16; their letters choose them."""
    made: dict = {}
    if "m" in kinds:
        made["key_mask"] = drawn(2, keys, seed=4) > -0.6
        made["key_mask"][1, keys // 3 :] = False
    if "d" in kinds:
        made["document_ids"] = torch.arange(keys).expand(2, keys) // torch.tensor([[33], [70]])
    if "l" in kinds:
        bias = torch.where(drawn(2, 1, 1, 19, seed=8) > 1.0, -torch.inf, drawn(1, 4, queries, 19, seed=9))
        made["leading"] = LeadingKeys(drawn(2, 2, 19, 16, seed=5), drawn(2, 2, 19, 16, seed=6), bias)
    if "b" in kinds:
        made["distance_bias"] = drawn(4, band.width, seed=7)
    if "r" in kinds:
        generator = torch.Generator().manual_seed(2)
        made["random_blocks"] = torch.randint(
            keys // band.block, (4, -(-queries // band.block), 3), generator=generator
        )
    return made


def in_float64(made: dict) -> dict:
    def wide(t):
        return t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t

    made = {name: wide(value) for name, value in made.items()}
    if "leading" in made:
        old = made["leading"]
        made["leading"] = LeadingKeys(wide(old.k), wide(old.v), wide(old.bias))
    return made


def learned(made: dict) -> list[Tensor]:
    tensors = [made["leading"].k, made["leading"].v] if "leading" in made else []
    tensors += [made["distance_bias"]] if "distance_bias" in made else []
    return [t.requires_grad_() for t in tensors]


def both(band: Band, queries: int, keys: int, kinds: str, p: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients: of C in float32, and of the formula in float64."""
    results = []
    made = everything(band, queries, keys, kinds)
    for dtype in (torch.float32, torch.float64):
        q, k, v = (
            drawn(2, h, n, 16, seed=i).to(dtype) for i, (h, n) in enumerate(((4, queries), (2, keys), (2, keys)))
        )
        chosen = made if dtype == torch.float32 else in_float64(made)
        inputs = [t.requires_grad_() for t in (q, k, v)] + learned(chosen)
        torch.manual_seed(5)
        out = banded_attention(q, k, v, band, 0.3, p, **chosen)
        above = drawn(*out.shape, seed=9).to(dtype)
        results.append([out, *torch.autograd.grad(out, inputs, above)])
    return list(zip(*results, strict=True))


def assert_alike(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for in_c, formula in pairs:
        assert in_c.dtype == torch.float32
        torch.testing.assert_close(in_c.double(), formula, rtol=2e-5, atol=2e-5)


WINDOW, AROUND, BLOCKS, ROOM = Band(40, 0), Band(37, 55), Band(1, 1, block=64), Band(2, 1, block=8, first_query=40)
CASES = [(WINDOW, 700, 700, kinds) for kinds in ("", "m", "d", "l", "b", "mdlb")]
CASES += [(AROUND, 613, 613, kinds) for kinds in ("", "md", "lb")]
CASES += [(BLOCKS, 640, 640, kinds) for kinds in ("", "l", "r", "mdlr")]
CASES += [(ROOM, 96, 160, kinds) for kinds in ("", "mr")]
CASES += [(Band(1, 0, block=24, causal=True), 240, 240, "m"), (Band(2, 2, block=7), 200, 200, "ml")]
CASES += [(Band(600, 600), 530, 530, "l"), (Band(0, 0), 17, 17, "m"), (Band(3, 0, first_query=5), 3, 11, "")]


@pytest.mark.parametrize(("band", "queries", "keys", "kinds"), CASES)
def test_it_is_the_formula(band: Band, queries: int, keys: int, kinds: str):
    assert_alike(both(band, queries, keys, kinds))


@pytest.mark.parametrize(("band", "kinds"), [(WINDOW, "ml"), (BLOCKS, "lr"), (AROUND, "b")])
def test_it_drops_what_the_formula_drops(band: Band, kinds: str):
    assert_alike(both(band, 640, 640, kinds, p=0.3))


@settings(max_examples=15, deadline=None)
@given(
    back=st.integers(0, 300), ahead=st.integers(0, 300), block=st.integers(1, 70), causal=st.booleans(),
    first=st.integers(0, 130), queries=st.integers(1, 260), rest=st.integers(0, 90),
    kinds=st.sampled_from(["", "ml", "d"]),
)  # fmt: skip
def test_any_band_is_the_formula(back, ahead, block, causal, first, queries, rest, kinds):
    band = Band(back // block, ahead // block, block, causal, first)
    assert_alike(both(band, queries, first + queries + rest, kinds))


def test_a_band_that_leaks_by_one_would_show():
    q = drawn(1, 2, 300, 16)
    right = banded_attention(q.double(), q.double(), q.double(), Band(9, 4), 0.3)
    for leak in (Band(9, 5), Band(10, 4)):
        assert (banded_attention(q, q, q, leak, 0.3) - right).abs().max() > 1e-3


def test_the_number_of_keys_has_no_limit():
    """A window of 9,000 positions of 20,000, and dropout over more keys than fit a tile in the cache."""
    q = drawn(1, 1, 20_000, 16)
    out = banded_attention(q, q, q, Band(8999, 0), 0.25)
    last = 0.25 * q[:, :, -1:] @ q[:, :, -9000:].mT
    torch.testing.assert_close(out[:, :, -1:], last.softmax(-1) @ q[:, :, -9000:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kinds", ["", "m"])
def test_leading_keys_by_index_are_the_same_as_their_tensors(kinds: str):
    """Outputs and gradients; the gradients of leading keys are added to those of the row's keys."""
    made = everything(WINDOW, 300, 300, kinds)
    index = torch.tensor([[0, 7, 299], [3, 3, 150]])  # the second row has a filler, which its bias hides
    bias = torch.tensor([[0.0, 0.5, 0.0], [0.0, -torch.inf, 0.0]])[:, None, None]
    results = []
    for by_index in (True, False):
        q, k, v = (drawn(2, h, 300, 16, seed=i).requires_grad_() for i, h in enumerate((4, 2, 2)))
        leading = LeadingIndex(index, bias)
        leading = leading if by_index else leading.gather(k, v)
        out = banded_attention(q, k, v, WINDOW, 0.3, leading=leading, **made)
        results.append([out, *torch.autograd.grad(out, (q, k, v), drawn(*out.shape, seed=9))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_rows_are_in_the_output_and_nothing_flows_through_what_they_replace(dtype: torch.dtype):
    q, k, v = (drawn(2, 4, 90, 16, seed=i).to(dtype).requires_grad_() for i in range(3))
    rows = drawn(3, 4, 16, seed=4).to(dtype).requires_grad_()
    row, query = torch.tensor([0, 1, 1]), torch.tensor([5, 0, 89])
    above = drawn(2, 4, 90, 16, seed=9).to(dtype)
    out = banded_attention(q, k, v, Band(9, 4), 0.3, given_rows=GivenRows(row, query, rows))
    grads = torch.autograd.grad(out, (q, k, v, rows), above)
    assert torch.equal(out.transpose(1, 2)[row, query], rows)
    assert torch.equal(grads[3], above.transpose(1, 2)[row, query])

    plain = banded_attention(q, k, v, Band(9, 4), 0.3)
    others = above.clone()
    others.transpose(1, 2)[row, query] = 0
    for grad, wanted in zip(grads, torch.autograd.grad(plain, (q, k, v), others), strict=False):
        torch.testing.assert_close(grad, wanted)


MISFITS = {
    "queries beyond the keys": KeyRules(3, 0, first_query=20),
    "a negative reach": KeyRules(-1, 4),
    "no block": KeyRules(3, 0, block=0),
    "a block that does not exist": KeyRules(1, 1, block=8, block_numbers=torch.full((2, 4, 1), 4, dtype=torch.int32)),
    "a negative block": KeyRules(1, 1, block=8, block_numbers=torch.full((2, 4, 1), -1, dtype=torch.int32)),
    "blocks of other queries": KeyRules(1, 1, block=8, block_numbers=torch.zeros((2, 3, 1), dtype=torch.int32)),
    "ids of other keys": KeyRules(
        3, 0, q_ids=torch.zeros(1, 32, dtype=torch.int32), k_ids=torch.zeros(1, 31, dtype=torch.int32)
    ),
    "wide numbers": KeyRules(3, 0, q_ids=torch.zeros(1, 32), k_ids=torch.zeros(1, 32)),
    "a bias of no keys": KeyRules(3, 0, leading_bias=torch.zeros(1, 2, 32, 4)),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_does_not_reach_c(what: str):
    q = drawn(1, 2, 32, 16)
    with pytest.raises(TensorMismatch):
        fused_banded_attention(q, q, q, MISFITS[what], 0.3, 0.0)


def test_leading_keys_that_do_not_fit_are_refused():
    q = drawn(1, 2, 32, 16)
    for k, v in (
        (drawn(1, 2, 4, 16), drawn(1, 2, 5, 16)),
        (drawn(1, 1, 4, 16), drawn(1, 1, 4, 16)),
        (drawn(1, 2, 4, 16), None),
    ):
        with pytest.raises(TensorMismatch):
            fused_banded_attention(q, q, q, KeyRules(3, 0), 0.3, 0.0, k, v)
