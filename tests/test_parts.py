"""Parts: frozen values that are equal when they say the same, print as code, and refuse what makes no sense."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import core as hw
from headwater.errors import BadSetting, Fault
from headwater.parts import MAX_INT, REGISTRY, from_dict, must, part, swap, to_dict

BLOCK = hw.Block((hw.pre(hw.RMSNorm(), self_attn=hw.Attention(4)), hw.pre(hw.RMSNorm(), ffn=hw.FeedForward(8))))


def test_equal_parts_are_equal_and_hash_alike():
    assert hw.RMSNorm(1e-6) == hw.RMSNorm() and hash(hw.RMSNorm(1e-6)) == hash(hw.RMSNorm())
    assert hw.RMSNorm(1e-5) != hw.RMSNorm() and hw.RMSNorm() != hw.OffsetRMSNorm()
    assert hw.Attention(4) != hw.CrossAttention(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        hw.RMSNorm().eps = 1


def test_lists_become_tuples_and_whole_numbers_fractions():
    assert hw.Block([BLOCK.branches[0]]) == hw.Block((BLOCK.branches[0],))
    assert hw.Rotary(10000) == hw.Rotary(10000.0) and type(hw.Rotary(10000).theta) is float


def test_only_what_differs_from_the_defaults_is_printed():
    assert repr(hw.Attention(8)) == "Attention(heads=8)"
    assert repr(hw.Attention(8, mask=hw.SlidingWindow(4))) == "Attention(heads=8, mask=SlidingWindow(size=4))"
    assert repr((BLOCK,) * 3) == f"({BLOCK!r}, {BLOCK!r}, {BLOCK!r})"
    printed = repr(hw.Stack(8, hw.Embeddings(9), (BLOCK,) * 12))
    assert ") * 12" in printed and printed.count("RMSNorm") == 2
    assert all(len(line) <= 120 for line in printed.splitlines())


def test_a_run_of_equal_layers_is_written_once():
    stack = hw.Stack(8, hw.Embeddings(9), (BLOCK,) * 12)
    plain = to_dict(stack)
    assert plain["layers"] == {"times": 12, "of": to_dict(BLOCK)}
    assert from_dict(json.loads(json.dumps(plain))) == stack
    mixed = hw.Stack(8, hw.Embeddings(9), (BLOCK, BLOCK, hw.Block((BLOCK.branches[1],))))
    assert from_dict(to_dict(mixed)) == mixed


def test_swap_changes_every_part_of_one_kind():
    stack = hw.Stack(8, hw.Embeddings(9), (BLOCK,) * 2, hw.RMSNorm())
    changed = swap(stack, hw.RMSNorm, lambda norm: hw.LayerNorm(norm.eps))
    assert "RMSNorm" not in repr(changed) and repr(changed).count("LayerNorm(eps=1e-06)") == 3
    assert swap(stack, hw.LayerNorm, lambda norm: hw.NoNorm()) == stack
    both = hw.Block((hw.pre(hw.NoNorm(), cross_attn=hw.CrossAttention(2)),))
    assert swap(both, hw.Attention, lambda a: hw.Attention(8)) == both, "exactly that kind, not those derived from it"


def test_a_derived_part_keeps_the_checks_of_its_base():
    with pytest.raises(BadSetting, match="CrossAttention: dropout must be from 0 up to 1, got 1.5; 0.1 is usual"):
        hw.CrossAttention(2, dropout=1.5)
    with pytest.raises(BadSetting, match="CrossAttention: mask and position must be left out"):
        hw.CrossAttention(2, mask=hw.Causal())


def test_a_name_is_given_once():
    with pytest.raises(TypeError, match="a part called RMSNorm is already defined in headwater.core.norms"):

        @part
        class RMSNorm:
            pass


# --------------------------------------------------------------------------------------------- what is refused, by name

WRONG = {
    "a word for a number": (lambda: hw.Attention("8"), "Attention: heads must be an integer .*, got '8'"),
    "a fraction": (lambda: hw.Attention(8.0), "heads must be an integer .*, got 8.0"),
    "yes for a number": (lambda: hw.Attention(True), "heads must be an integer .*, got True"),
    "below zero": (lambda: hw.FeedForward(-1), "FeedForward: d_ff must be an integer from 0 .*, got -1"),
    "too large": (lambda: hw.Embeddings(2**31), "vocab must be an integer from 0 to 2.*31 - 1, got 2147483648"),
    "not a number": (lambda: hw.RMSNorm(float("nan")), "RMSNorm: eps must be a finite number, got nan"),
    "infinite": (lambda: hw.Rotary(float("inf")), "Rotary: theta must be a finite number, got inf"),
    "a number for yes": (lambda: hw.LayerNorm(bias=1), "LayerNorm: bias must be True or False, got 1"),
    "nothing": (lambda: hw.Attention(None), "heads must be an integer .*, got None"),
    "a number for a part": (lambda: hw.Model(decoder=3), "Model: decoder must be a Stack part or nothing, got 3"),
    "a class for a part": (lambda: hw.Attention(2, kernel=hw.Eager), "kernel must be a KernelSpec part, got 'class'"),
    "another part for a rule": (
        lambda: hw.Attention(2, mask=hw.NoNorm()),
        "mask must be a MaskRule part, got 'NoNorm'",
    ),
    "a layer for a branch": (lambda: hw.Block((hw.Attention(2),)), "branches must be Branch parts, got .'Attention',"),
    "a number for a tuple": (lambda: hw.Block(7), "Block: branches must be Branch parts, got 7"),
    "numbers for layers": (
        lambda: hw.Stack(8, hw.Embeddings(3), (1, 2)),
        "Stack: layers must be BlockSpec parts, got .1, 2.",
    ),
    "words for an order": (lambda: hw.Stack(8, hw.Embeddings(3), (), order=("a",)), "order must be integers"),
    "half a pair": (
        lambda: hw.Model(decoder=STACK, tied=(("a",),)),
        "Model: tied must be pairs of a string and a string",
    ),
    "no rule": (
        lambda: hw.Model(decoder=STACK, init=(("*", 1),)),
        "Model: init must be pairs of a string and an InitSpec part",
    ),
}
STACK = hw.Stack(8, hw.Embeddings(9), (BLOCK,))
MISPLACED = {
    "norm": lambda: hw.Branch("ffn", hw.FeedForward(3), norm=hw.Xavier()),
    "layer": lambda: hw.Branch("ffn", hw.RMSNorm()),
    "head": lambda: hw.Model(head=hw.RMSNorm(), decoder=STACK),
    "embed": lambda: hw.Stack(8, hw.Causal(), (BLOCK,)),
    "layers": lambda: hw.Stack(8, hw.Embeddings(3), (hw.FeedForward(3),)),
    "position": lambda: hw.Attention(2, position=hw.NoNorm()),
    "kernel": lambda: hw.Attention(2, kernel=hw.Causal()),
    "bridge": lambda: hw.Model(decoder=STACK, bridge=hw.Eager()),
    "transform": lambda: hw.LMHead(3, transform=hw.LayerNorm()),
    "pooling": lambda: hw.Pooler(hw.LMHead(3)),
    "init": lambda: hw.Model(decoder=STACK, init=(("*", hw.NoNorm()),)),
}


@pytest.mark.parametrize("slot", MISPLACED)
def test_a_part_in_the_wrong_place_is_refused_by_name(slot):
    with pytest.raises(BadSetting, match=f": {slot} must be .*part.*, got ") as caught:
        MISPLACED[slot]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused_in_one_line(name):
    make, words = WRONG[name]
    with pytest.raises(BadSetting, match=words) as caught:
        make()
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


FILES = {
    "a kind misspelt": ({"kind": "RMSNrom"}, "no part is called 'RMSNrom'; did you mean 'RMSNorm'"),
    "a field misspelt": ({"kind": "Attention", "haeds": 8}, "Attention has no field 'haeds'; did you mean 'heads'"),
    "no kind": ({"heads": 8}, "part: kind must be a string, got None; such as"),
    "a kind that is not a string": ({"kind": ["Attention"]}, "part: kind must be a string, got 'list'; such as"),
    "a field missing": ({"kind": "FeedForward"}, "FeedForward cannot be built: .*d_ff.*; give every field it needs"),
    "too often": ({"times": 10**9, "of": {"kind": "NoNorm"}}, "times: must be an integer from 0 to 10000, got 10"),
    "half as often": ({"times": 0.5, "of": {"kind": "NoNorm"}}, "times: must be an integer from 0 to 10000"),
    "yes times": ({"times": True, "of": {"kind": "NoNorm"}}, "times: must be an integer from 0 to 10000"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused_in_one_line(name):
    plain, words = FILES[name]
    with pytest.raises(BadSetting, match=words) as caught:
        from_dict(plain)
    assert "\n" not in str(caught.value)


def test_a_bomb_of_repeats_is_refused_at_once():
    """Ten thousand times ten thousand times … : nothing walks through all of it."""
    plain: Any = {"kind": "NoNorm"}
    for _ in range(6):
        plain = {"times": 10_000, "of": plain}
    with pytest.raises(BadSetting, match="^Stack: layers must be BlockSpec parts, got .'tuple', .{0,60}$"):
        from_dict({"kind": "Stack", "d_model": 8, "embed": {"kind": "Embeddings", "vocab": 9}, "layers": plain})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(sorted(REGISTRY)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "times", "of", "heads", "layers", "size"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_read_or_refused(value):
    try:
        from_dict(value)
    except Fault as fault:
        assert "\n" not in str(fault)


def fields_of_a_part(kind: str) -> st.SearchStrategy:
    names = [field.name for field in dataclasses.fields(REGISTRY[kind])]
    anything = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 5),
        st.sampled_from([2**31, 10**30, float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e308, "", "relu", "é\n"]),
        st.sampled_from([hw.NoNorm(), hw.Causal(), hw.Attention(2), hw.SDPA(), (), (1,), (("*", hw.Xavier()),)]),
        st.lists(st.integers(0, 3), max_size=2),
    )
    return st.dictionaries(st.sampled_from(names), anything) if names else st.just({})


CORE = sorted(name for name, kind in REGISTRY.items() if kind.__module__.startswith("headwater.core"))


@given(st.data(), st.sampled_from(CORE))
def test_any_field_is_taken_or_refused_in_one_line(data, kind):
    fields = data.draw(fields_of_a_part(kind))
    required = [f.name for f in dataclasses.fields(REGISTRY[kind]) if f.default is dataclasses.MISSING]
    if set(required) <= set(fields):
        try:
            made = REGISTRY[kind](**fields)
        except Fault as fault:
            assert "\n" not in str(fault) and "; " in str(fault)
            return
        assert from_dict(to_dict(made)) == made
        assert isinstance(hash(made), int)


def test_must_says_who_what_and_what_to_do():
    with pytest.raises(BadSetting, match="^window: size must be odd, got 4; use 5$"):
        must(False, "window", "size must be odd", 4, "use 5")
    must(True, "window", "size must be odd", 5, "")


def test_the_largest_size_is_taken():
    assert hw.Embeddings(MAX_INT).vocab == MAX_INT
