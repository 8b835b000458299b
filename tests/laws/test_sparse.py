"""The laws of the sparse attentions: each kind keeps those of its list, and planted faults are seen."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import combinations as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_kit import LAWS
from law_tools import grads, ids, pull, same
from sparse_kinds import HEADS, KINDS, SUMS, Kind, Tokens

from headwater import core as hw
from headwater.core import cache, functional
from headwater.errors import BadInput
from headwater.inspection.attention_weights import attention_sites, capture_weights
from headwater.parts import swap
from headwater.variants import bigbird, chunked_attention, favor, linear_attention, longformer, transient_global

ALL = {**KINDS, **SUMS}
TRIALS = [(law, name) for name, kind in ALL.items() for law in kind.laws]


@pytest.mark.parametrize(("law", "name"), TRIALS)
def test_law(law, name):
    LAWS[law](ALL[name].case())


# ------------------------------------------------------------------------------------- who sees whom, at every length


def rows_of(kind: Kind, length: int = 29) -> list[Tokens]:
    """A plain row; a padded one; one with padding between tokens; a packed one. Some tokens are global."""
    plain = [True] * length
    one = [1] * length
    marks = [n in (3, 17) and "longformer" in kind.name for n in range(length)]
    none = [False] * length
    if kind.name == "longformer, first token":
        first = [n == 0 for n in range(length)]
        return [Tokens(plain, one, first)]
    rows = [Tokens(plain, one, none), Tokens([n < 23 for n in range(length)], one, marks)]
    if kind.holes:
        rows.append(Tokens([n % 5 != 1 for n in range(length)], one, marks))
    if kind.packed:
        rows.append(Tokens(plain, [1] * 11 + [2] * (length - 11), marks))
    return rows


def seen_of(kind: Kind, row: Tokens) -> torch.Tensor:
    """[Q, S]: whether answer q depends on token k, in a model of one layer: the gradient is not zero."""
    model = kind.case(layers=1).model()
    length = len(row)
    embedded = {}

    def listen(module, args, out):
        embedded["x"] = out.detach().requires_grad_()
        return embedded["x"]

    hook = model.output_stack.embed.register_forward_hook(listen)
    out = model(ids(length, seed=1).expand(length, -1), **inputs_of(kind, row, length))
    hook.remove()
    pull(out[torch.arange(length), torch.arange(length)]).backward()  # row q of the batch asks about token q
    model.zero_grad(set_to_none=True)
    return embedded["x"].grad.abs().amax(-1) > 0


def check_who_sees_whom(kind: Kind) -> None:
    for row in rows_of(kind):
        seen = seen_of(kind, row)
        for q in [q for q in range(len(row)) if row.real[q]]:
            want = [q == k or kind.sees(row, q, k) for k in range(len(row))]
            assert seen[q].tolist() == want, f"token {q} sees {seen[q].nonzero().flatten().tolist()}"


@pytest.mark.parametrize("name", ALL)
def test_who_sees_whom(name):
    check_who_sees_whom(ALL[name])


def inputs_of(kind: Kind, row: Tokens, rows: int = 2) -> dict[str, torch.Tensor]:
    """The arguments of a call that describe the row, for some rows alike."""
    inputs = {}
    if not all(row.real):
        inputs["attention_mask"] = torch.tensor(row.real).expand(rows, -1)
    if len(set(row.documents)) > 1:
        inputs["document_ids"] = torch.tensor(row.documents).expand(rows, -1)
    if any(row.is_global) and "first" not in kind.name:
        inputs["global_tokens"] = torch.tensor(row.is_global).expand(rows, -1)
    return inputs


def check_weights(kind: Kind) -> None:
    """The attention weights that a hook sees give the same answers; each row of them sums to one, or to zero."""
    model = kind.case().model()
    weights: list[torch.Tensor] = []
    for row in rows_of(kind):
        weights.clear()
        taps = [module for name, module in model.named_modules() if name.endswith("kernel.weights")]
        text = ids(len(row), rows=2, seed=4)
        with torch.no_grad():
            quiet = model(text, **inputs_of(kind, row))
            hooks = [tap.register_forward_hook(lambda *a: weights.append(a[2])) for tap in taps]
            loud = model(text, **inputs_of(kind, row))
        for hook in hooks:
            hook.remove()
        same(loud, quiet, "hooked")
        assert len(weights) == len(taps)
        for each in weights:
            assert each.shape == (2, HEADS, len(row), len(row))
            sums = each.sum(-1)
            if kind.name == "longt5":  # the rest is for the summaries
                assert (sums < 1).all()
            else:
                assert ((sums - 1).abs() < 1e-9).logical_or(sums == 0).all()


@pytest.mark.parametrize("name", KINDS)
def test_the_weights_are_those_of_the_sparse_form(name):
    check_weights(KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_recomputed_is_kept_in_training(name):
    """Dropout and random choices are the same when the backward pass computes a layer again."""
    kind = KINDS[name]
    model = copy.deepcopy(kind.case().model()).train()
    for module in model.modules():
        if hasattr(module, "kernel"):
            module.kernel.dropout = 0.2
    kept = []
    for on in (False, True):
        model.gradient_checkpointing(on)
        torch.manual_seed(5)
        row = rows_of(kind)[-1]
        out = model(ids(len(row), rows=2, seed=4), **inputs_of(kind, row))
        kept.append((out.detach(), grads(model, pull(out))))
    assert torch.equal(kept[0][0], kept[1][0])
    for path, grad in kept[0][1].items():
        same(kept[1][1][path], grad, path)


# --------------------------------------------------------------------------- what moves with the row, and what does not


@pytest.mark.parametrize("name", ALL)
def test_long_rows_of_a_batch_are_alone(name):
    """Answers and gradients, at a length at which blocks and chunks are sparse."""
    model, text = ALL[name].case().model(), ids(29, rows=3, seed=7)
    out = model(text)
    whole = grads(model, pull(out))
    weights = torch.sin(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))
    parts = []
    for n in range(3):
        alone = model(text[n : n + 1])
        same(alone, out[n : n + 1], f"row {n}")
        parts.append(grads(model, (alone * weights[n : n + 1]).sum()))
    for path, grad in whole.items():
        same(sum(part[path] for part in parts), grad, path)


def moved_by(name: str, padding: int) -> float:
    """How much padding on the right changes the answers of a row of 29 tokens."""
    model, text = ALL[name].case().model(), ids(29, seed=7)
    padded = torch.cat((text, ids(padding, seed=8)), 1)
    mask = torch.arange(29 + padding)[None] < 29
    with torch.no_grad():
        return float((model(padded, attention_mask=mask)[:, :29] - model(text)).abs().max())


@pytest.mark.parametrize(
    ("name", "within", "beyond"),
    [("bigbird", 1, 2), ("bigbird, as published", 1, 2), ("chunks, ring", 3, 4), ("lsh", 3, 4)],
)
def test_padding_beyond_a_whole_block_moves_the_answers(name, within, beyond):
    """The last block and the ring of chunks are those of the padded row: the table of laws says no, and it is so."""
    assert moved_by(name, within) < 1e-9
    assert moved_by(name, beyond) > 1e-3


REFUSED = {
    "packed_is_alone": ("bigbird", "chunks", "lsh", "longt5", "performer", "linformer"),
    "padded_left_is_unpadded": ("bigbird", "chunks", "lsh", "longt5", "linformer"),
    "cached_is_whole": ("chunks", "lsh, causal"),
}


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, names in REFUSED.items() for name in names])
def test_what_the_table_rules_out_is_refused(law, name):
    with pytest.raises(BadInput, match="cannot be used with"):
        LAWS[law](ALL[name].case())


def without_positions(name: str) -> torch.nn.Module:
    spec = ALL[name].case(layers=1).spec
    return cases.built(swap(spec, hw.Embeddings, lambda embed: replace(embed, position=hw.NoPosition())))


def check_permutation(name: str) -> None:
    """Without positions, one layer gives tokens in another order the same answers; of a decoder, the last token."""
    model, text = without_positions(name), ids(29, rows=2, seed=7)
    order = torch.randperm(28, generator=torch.Generator().manual_seed(0))
    order = torch.cat((order, torch.tensor([28])))
    with torch.no_grad():
        plain, permuted = model(text), model(text[:, order])
    first = 28 if model.spec.decoder is not None else 0
    same(permuted[:, first:], plain[:, order[first:]], "in another order")


@pytest.mark.parametrize(
    "name", ["linear", "linear, two-way", "performer", "performer, two-way", "lsh, one chunk", "lsh, causal"]
)
def test_order_is_known_by_positions_only(name):
    check_permutation(name)


@pytest.mark.parametrize("name", ["linformer", "bigbird", "longformer", "longt5", "chunks"])
def test_order_is_also_known_by_what_is_near(name):
    with pytest.raises(AssertionError, match="in another order"):
        check_permutation(name)


# ------------------------------------------------------------------------------------------------------ planted faults


def leak_by_one(patch):
    band = longformer.Band
    patch.setattr(longformer, "Band", lambda back, ahead: band(back, ahead + 1))


def window_too_short(patch):
    band = longformer.Band
    patch.setattr(longformer, "Band", lambda back, ahead: band(back - 1, ahead))


def global_keys_missing(patch):
    patch.setattr(longformer, "_global_keys", lambda inputs, globals_, dtype: None)


def global_rows_missing(patch):
    patch.setattr(longformer.GlobalIndex, "rows_of", lambda self, out, order: None)


def global_padding_is_seen(patch):
    build = longformer.GlobalIndex.build
    patch.setattr(
        longformer.GlobalIndex,
        "build",
        staticmethod(lambda chosen, inputs: build(chosen, replace(inputs, attention_mask=None))),
    )


def holes_are_counted(patch):
    patch.setattr(
        longformer, "_real_tokens_first", lambda inputs: torch.arange(inputs.ids.shape[1]).expand_as(inputs.ids)
    )


def global_tokens_count_twice(patch):
    banded = functional.banded_attention

    def without_mask(*args, key_mask=None, **kwargs):
        return banded(*args, key_mask=None, **kwargs)

    patch.setattr(functional, "banded_attention", without_mask)


def leak_by_one_block(patch):
    band = bigbird.Band
    patch.setattr(bigbird, "Band", lambda back, ahead, **more: band(back, ahead + 1, **more))


def wrong_random_block(patch):
    choose = bigbird.draw_blocks
    patch.setattr(
        bigbird, "draw_blocks", lambda heads, blocks, count, seed, layer: choose(heads, blocks, count, 9, layer)
    )


def last_block_is_not_global(patch):
    end_keys = bigbird.BigBirdLayer._end_keys

    def first_only(self, k, key_mask):
        keys = end_keys(self, k, key_mask)
        size = self.spec.block_size
        return replace(keys, index=keys.index[:, :size], bias=keys.bias[..., :size])

    patch.setattr(bigbird.BigBirdLayer, "_end_keys", first_only)


def tokens_after_the_last_block_are_dropped(patch):
    blocks_of = transient_global.summary_blocks

    def dropped(x, key_mask, size):
        blocks, visible = blocks_of(x, key_mask, size)
        index = torch.arange(x.shape[1])
        return torch.where(index // size > blocks, -1, blocks), visible

    patch.setattr(transient_global, "summary_blocks", dropped)


def summaries_of_padding_are_seen(patch):
    blocks_of = transient_global.summary_blocks
    patch.setattr(transient_global, "summary_blocks", lambda x, key_mask, size: blocks_of(x, None, size))


def ring_wraps_by_one(patch):
    ring = chunked_attention._ring
    patch.setattr(chunked_attention, "_ring", lambda x, before, after, dim: ring(x, before, after, dim).roll(1, dim))


def ring_is_cut(patch):
    """The first chunk sees nothing before it."""

    def cut(x, before, after, dim):
        ring = RING(x, before, after, dim)
        return ring.index_fill(dim, torch.arange(before), 0)

    patch.setattr(chunked_attention, "_ring", cut)


def linear_leaks_by_one(patch):
    patch.setattr(
        linear_attention, "linear_attention", lambda q, k, v, *rest: LINEAR(q, k.roll(-1, 2), v.roll(-1, 2), *rest)
    )


def linear_sums_padding(patch):
    patch.setattr(
        linear_attention,
        "linear_attention",
        lambda q, k, v, causal, state, keep, *documents: LINEAR(q, k, v, causal, state, None, *documents),
    )


def linear_joins_documents(patch):
    patch.setattr(linear_attention, "linear_attention", lambda *args: LINEAR(*args[:6]))


def state_is_lost(patch):
    patch.setattr(cache.LayerCache, "state", property(lambda self: None))


def maximum_of_later_keys(patch):
    """As published: c is the maximum over all keys."""

    def of_all(*args):
        w, top = EXPONENTS(*args)
        return w, top.amax(-1, keepdim=True).expand_as(top)

    patch.setattr(favor, "key_exponents", of_all)


def constants_are_not_summed(patch):
    """ε Σ v of earlier keys is forgotten."""

    def forgetful(*args):
        out, state = CHUNKS(*args)
        return out, state._replace(values=torch.zeros_like(state.values))

    patch.setattr(favor, "causal_chunks", forgetful)


LINEAR = linear_attention.linear_attention
EXPONENTS = favor.key_exponents
CHUNKS = favor.causal_chunks
SEEN_IN_SUMS = [
    (linear_leaks_by_one, "linear", "hidden_changes_nothing"),
    (linear_sums_padding, "linear", "padded_left_is_unpadded"),
    (linear_joins_documents, "linear", "packed_is_alone"),
    (state_is_lost, "linear", "cached_is_whole"),
    (state_is_lost, "performer", "cached_is_whole"),
    (maximum_of_later_keys, "performer", "hidden_changes_nothing"),
    (constants_are_not_summed, "performer", "cached_is_whole"),
]


@pytest.mark.parametrize(("plant", "name", "law"), SEEN_IN_SUMS, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_sum_is_seen(plant, name, law, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        LAWS[law](SUMS[name].case())


def test_a_leak_by_one_in_sums_is_seen(monkeypatch):
    linear_leaks_by_one(monkeypatch)
    with pytest.raises(AssertionError):
        check_who_sees_whom(SUMS["linear"])


RING = chunked_attention._ring
SEEN_BY_SIGHT = [leak_by_one, window_too_short, global_keys_missing, global_rows_missing, holes_are_counted]
SEEN_IN_BIGBIRD = [leak_by_one_block, wrong_random_block, last_block_is_not_global]
SEEN_BY_LAWS = [
    (leak_by_one, "hooked_is_fused"),
    (global_tokens_count_twice, "hooked_is_fused"),
    (global_keys_missing, "hooked_is_fused"),
    (holes_are_counted, "padded_anywhere_is_unpadded"),
]


@pytest.mark.parametrize("plant", SEEN_BY_SIGHT, ids=lambda plant: plant.__name__)
def test_a_wrong_longformer_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_who_sees_whom(KINDS["longformer"])


@pytest.mark.parametrize("plant", SEEN_IN_BIGBIRD, ids=lambda plant: plant.__name__)
def test_a_wrong_bigbird_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_who_sees_whom(KINDS["bigbird"])
    if plant is not wrong_random_block:  # which is wrong in both forms
        with pytest.raises(AssertionError):
            check_weights(KINDS["bigbird"])


SEEN_IN_LONGT5 = [tokens_after_the_last_block_are_dropped, summaries_of_padding_are_seen]


@pytest.mark.parametrize("plant", SEEN_IN_LONGT5, ids=lambda plant: plant.__name__)
def test_a_wrong_summary_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_who_sees_whom(KINDS["longt5"])


@pytest.mark.parametrize("plant", [ring_wraps_by_one, ring_is_cut], ids=lambda plant: plant.__name__)
def test_a_wrong_ring_is_seen(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_who_sees_whom(KINDS["chunks, ring"])


@given(blocks=st.integers(8, 40), count=st.integers(1, 3), seed=st.integers(0, 99), layer=st.integers(0, 30))
@settings(max_examples=30, deadline=None)
def test_random_blocks_are_new_and_distinct(blocks, count, seed, layer):
    chosen = bigbird.draw_blocks(2, blocks, count, seed, layer)
    assert chosen.shape == (2, blocks - 2, count)
    for head, rows in enumerate(chosen.tolist()):
        for number, row in enumerate(rows, start=1):
            near = {number - 1, number, number + 1, 0, blocks - 1}
            assert len(set(row)) == count and not set(row) & near and all(0 < n < blocks - 1 for n in row), head
    assert torch.equal(chosen, bigbird.draw_blocks(2, blocks, count, seed, layer))


def test_random_blocks_differ_by_head_and_layer():
    first, second = bigbird.draw_blocks(2, 40, 3, 0, 0)
    assert not torch.equal(first, second)
    assert not torch.equal(first, bigbird.draw_blocks(2, 40, 3, 0, 1)[0])


@pytest.mark.parametrize(("plant", "law"), SEEN_BY_LAWS, ids=lambda value: getattr(value, "__name__", value))
def test_the_law_sees(plant, law, monkeypatch):
    plant(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            LAWS[law](KINDS["longformer, first token"].case())
    finally:
        cases.built.cache_clear()


@pytest.mark.parametrize("name", ["longformer", "bigbird", "lsh", "chunks", "longt5"])
def test_inspect_sees_the_weights(name):
    """The pictures of who sees whom read the weights of layers that attend by themselves."""
    model = KINDS[name].case().model()
    maps: list[torch.Tensor] = []
    inputs = SimpleNamespace(model=model, hidden_states=lambda: model(ids(29)))
    capture_weights(inputs, attention_sites(model), lambda site, first, weights: maps.append(weights))
    assert [tuple(weights.shape) for weights in maps] == [(HEADS, 29, 29)] * 2
    assert not any(tap._forward_hooks for name, tap in model.named_modules() if name.endswith("kernel.weights"))
