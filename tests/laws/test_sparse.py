"""The laws of the sparse attentions: each kind keeps those of its list, and planted faults are seen."""

from __future__ import annotations

import combinations as cases
import pytest
import torch
from law_kit import LAWS
from law_tools import ids, pull
from sparse_kinds import KINDS, Kind, Tokens

from headwater.core import functional
from headwater.variants import longformer

TRIALS = [(law, name) for name, kind in KINDS.items() for law in kind.laws]


@pytest.mark.parametrize(("law", "name"), TRIALS)
def test_law(law, name):
    LAWS[law](KINDS[name].case())


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
    real = torch.tensor(row.real)
    kwargs = {}
    if not all(row.real):
        kwargs["attention_mask"] = real.expand(length, -1)
    if len(set(row.documents)) > 1:
        kwargs["document_ids"] = torch.tensor(row.documents).expand(length, -1)
    if any(row.is_global) and "first" not in kind.name:
        kwargs["global_tokens"] = torch.tensor(row.is_global).expand(length, -1)
    embedded = {}

    def listen(module, args, out):
        embedded["x"] = out.detach().requires_grad_()
        return embedded["x"]

    hook = model.output_stack.embed.register_forward_hook(listen)
    out = model(ids(length, seed=1).expand(length, -1), **kwargs)
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


@pytest.mark.parametrize("name", KINDS)
def test_who_sees_whom(name):
    check_who_sees_whom(KINDS[name])


# ------------------------------------------------------------------------------------------------------ planted faults


def leak_by_one(patch):
    band = longformer.Band
    patch.setattr(longformer, "Band", lambda back, ahead: band(back, ahead + 1))


def window_too_short(patch):
    band = longformer.Band
    patch.setattr(longformer, "Band", lambda back, ahead: band(back - 1, ahead))


def global_keys_missing(patch):
    patch.setattr(longformer.LongformerLayer, "_leading_keys", lambda self, k, v, inputs, globals_: None)


def global_rows_missing(patch):
    patch.setattr(longformer.GlobalIndex, "scatter", lambda self, x, values: x)


def global_padding_is_seen(patch):
    build = longformer.GlobalIndex.build
    patch.setattr(
        longformer.GlobalIndex,
        "build",
        staticmethod(lambda chosen, inputs: build(chosen, longformer.replace(inputs, attention_mask=None))),
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


SEEN_BY_SIGHT = [leak_by_one, window_too_short, global_keys_missing, global_rows_missing, holes_are_counted]
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


@pytest.mark.parametrize(("plant", "law"), SEEN_BY_LAWS, ids=lambda value: getattr(value, "__name__", value))
def test_the_law_sees(plant, law, monkeypatch):
    plant(monkeypatch)
    try:
        with pytest.raises(AssertionError):
            LAWS[law](KINDS["longformer, first token"].case())
    finally:
        cases.built.cache_clear()
