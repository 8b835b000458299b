"""Name maps: load and export are inverses, every tensor is accounted for, and tensors are read lazily."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadFile, BadSetting
from headwater.weights.name_map import format_names, name_map
from headwater.weights.safetensors import SafetensorsFile, write_safetensors
from headwater.weights.transforms import rope_halves_to_interleaved, rope_interleaved_to_halves

GPT2 = name_map("""
    [transformer.]wte                  decoder.embed.tokens
    [transformer.]h.{i}.ln_1           decoder.layers.{i}.self_attn_norm
    [transformer.]h.{i}.attn.c_attn    decoder.layers.{i}.self_attn.{q,k,v} : transpose, split
    [transformer.]h.{i}.attn.c_proj    decoder.layers.{i}.self_attn.out : transpose
    [transformer.]h.{i}.attn.bias      -        # the causal mask, a buffer of old files
    lm_head                            head.out
    final_logits_bias                  head.out.bias : squeeze
    ln_1.gamma = ln_1.weight
    ln_1.beta = ln_1.bias
""")


def gpt2_ours(layers=2, width=4):
    named = {"decoder.embed.tokens.weight": torch.randn(7, width), "head.out.bias": torch.randn(7)}
    for n in range(layers):
        for part in ("q", "k", "v", "out"):
            named[f"decoder.layers.{n}.self_attn.{part}.weight"] = torch.randn(width, width)
            named[f"decoder.layers.{n}.self_attn.{part}.bias"] = torch.randn(width)
        named[f"decoder.layers.{n}.self_attn_norm.weight"] = torch.randn(width)
        named[f"decoder.layers.{n}.self_attn_norm.bias"] = torch.randn(width)
    return named


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in b)


def test_export_and_load_through_a_file(tmp_path):
    ours = gpt2_ours()
    theirs = GPT2.export(ours)
    assert set(theirs) >= {"transformer.wte.weight", "transformer.h.1.attn.c_attn.weight", "final_logits_bias"}
    assert theirs["transformer.h.0.attn.c_attn.weight"].shape == (4, 12)
    assert theirs["final_logits_bias"].shape == (1, 7)
    write_safetensors(tmp_path / "a", theirs)
    file = SafetensorsFile(tmp_path / "a")
    assert all(file.meta_tensor(n).shape == theirs.meta_tensor(n).shape for n in theirs)
    read = GPT2.load(file, ours, tied={"head.out.weight": "decoder.embed.tokens.weight"})
    assert equal(read, ours)
    assert all(read.meta_tensor(n).shape == ours[n].shape for n in ours)


def test_a_split_is_by_rows_of_the_transposed_matrix():
    fused = torch.arange(12.0).view(2, 6)
    rows = name_map("c_attn  a.{q,k,v} : transpose, split")
    read = rows.load({"c_attn.weight": fused}, {f"a.{p}.weight": torch.empty(2, 2) for p in "qkv"})
    assert torch.equal(read["a.k.weight"], fused[:, 2:4].t())
    assert not torch.equal(read["a.k.weight"], fused[:, 2:4]), "planted fault: without the transposition"
    assert read["a.k.weight"].data_ptr() == fused[:, 2:].data_ptr(), "a view, not a copy"


def test_suffix_aliases_ignored_buffers_and_optional_prefixes():
    ours = gpt2_ours(1)
    theirs = {name.removeprefix("transformer."): t for name, t in GPT2.export(ours).items()}
    theirs["h.0.ln_1.gamma"], theirs["h.0.ln_1.beta"] = theirs.pop("h.0.ln_1.weight"), theirs.pop("h.0.ln_1.bias")
    theirs["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    assert equal(GPT2.load(theirs, ours), ours)


def test_tied_weights_are_decided_by_the_file():
    ours, tied = gpt2_ours(1), {"head.out.weight": "decoder.embed.tokens.weight"}
    theirs = dict(GPT2.export(ours))
    theirs["lm_head.weight"] = theirs["transformer.wte.weight"].clone()
    assert equal(GPT2.load(theirs, ours, tied=tied), ours)
    only_head = {n: t for n, t in theirs.items() if "wte" not in n}
    assert equal(GPT2.load(only_head, ours, tied=tied), ours)
    theirs["lm_head.weight"][0, 0] += 1
    with pytest.raises(BadFile, match=r"'transformer.wte.weight' and 'lm_head.weight' both mean .* but differ"):
        GPT2.load(theirs, ours, tied=tied)


def test_missing_unknown_and_misshapen_tensors_are_listed_in_one_line():
    ours = gpt2_ours(3)
    theirs = dict(GPT2.export(ours))
    for n in range(3):
        del theirs[f"transformer.h.{n}.ln_1.weight"], theirs[f"transformer.h.{n}.ln_1.bias"]
    theirs |= {"extra.1": torch.ones(1), "transformer.wte.weight": torch.ones(7, 5)}
    theirs["transformer.h.0.attn.c_attn.bias"] = torch.ones(11)
    with pytest.raises(BadFile) as caught:
        GPT2.load(theirs, ours)
    message = str(caught.value)
    assert "\n" not in message
    assert "6 missing: 'decoder.layers.0.self_attn_norm.weight'" in message and "and 2 more" in message
    assert "1 not known: 'extra.1'" in message
    assert "gives decoder.embed.tokens.weight [7, 5], must be [7, 4]" in message
    assert "4 of the wrong shape or kind" in message
    with pytest.raises(BadFile, match="is int64, must be float32"):
        GPT2.load({**GPT2.export(ours), "transformer.wte.weight": torch.ones(7, 4).long()}, ours)


def test_a_file_may_contain_an_unused_head():
    ours = gpt2_ours(1)
    theirs = {**GPT2.export(ours), "lm_head.weight": torch.ones(7, 4)}
    with pytest.raises(BadFile, match=r"1 not known: 'lm_head.weight'"):
        GPT2.load(theirs, ours)
    assert equal(GPT2.load(theirs, ours, ignored_prefixes=("head.",)), ours)


def test_export_accounts_for_every_tensor():
    ours = gpt2_ours(1)
    with pytest.raises(BadFile, match=r"1 tensors have no public name \('strange'\)"):
        GPT2.export({**ours, "strange": torch.ones(1)})
    del ours["decoder.layers.0.self_attn.k.bias"]
    with pytest.raises(BadFile, match=r"1 pieces are missing \('decoder.layers.0.self_attn.k.bias'\)"):
        GPT2.export(ours)


def test_an_index_is_a_complete_part_of_a_name():
    rows = name_map("a.{i}.b.{j}.w1  x.{j}.{i}.w1\n a.0.c  first")
    got = rows.load(
        {"a.3.b.12.w1": torch.ones(1), "a.0.c.bias": torch.zeros(2)},
        {"x.12.3.w1": torch.empty(1), "first.bias": torch.empty(2)},
    )
    assert got["x.12.3.w1"].item() == 1
    for wrong in ("a.03.b.1.w1", "a.3.b.w1", "a.-1.b.1.w1", "a.1.c", "a.٣.b.1.w1", "a.9999999.b.1.w1"):
        assert rows.match_checkpoint(wrong) is None
    assert rows.match_checkpoint("a.0.c") is not None


def test_name_maps_are_added_and_need_their_sizes():
    body, head = name_map("a  x"), name_map("fused  {q,k} : split by heads\n q_proj  z : deinterleave by kv_heads")
    both = body + head
    with pytest.raises(BadSetting, match=r"needs the sizes \['heads', 'kv_heads'\]"):
        both.export({})
    assert set(both.export({"x.weight": torch.ones(1)}, heads=2, kv_heads=1)) == {"a.weight"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("only_one", "must be `checkpoint_name  parameter_name`"),
        ("a.{i}  b", "same placeholders"),
        ("a  b.{i}", "same placeholders"),
        ("a  b : transpozed", "did you mean 'transpose'"),
        ("a  b : deinterleave over heads", "has no transform"),
    ],
)
def test_a_wrong_line_is_refused(line, words):
    with pytest.raises(BadSetting, match=words):
        name_map(line)


def test_rope_rows_follow_their_formula():
    heads, width = 3, 8
    rows = torch.arange(heads * width)
    halves = rope_interleaved_to_halves(rows, heads)
    for h in range(heads):
        for j in range(width // 2):
            for s in (0, 1):
                assert halves[h * width + s * width // 2 + j] == h * width + 2 * j + s
    assert torch.equal(rope_halves_to_interleaved(halves, heads), rows)


TRANSFORMS = {
    "": 1,
    "transpose": 1,
    "squeeze": 1,
    "deinterleave by heads": 1,
    "split": 3,
    "transpose, split": 3,
    "split by heads": 3,
    "transpose, deinterleave by heads": 1,
    "split, deinterleave by heads": 2,
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(TRANSFORMS)), st.integers(1, 3), st.booleans()), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_load_is_the_inverse_of_export(rows, heads, seed):
    make = torch.Generator().manual_seed(seed)
    lines, ours = [], {}
    for n, (change, layers, bias) in enumerate(rows):
        count = TRANSFORMS[change]
        lines.append(f"[model.]m{n}.{{i}}  {' '.join(f'o{n}.{{i}}.p{p}' for p in range(count))} : {change}")
        for layer in range(layers):
            for p in range(count):
                ours[f"o{n}.{layer}.p{p}.weight"] = torch.randn(4 * heads, 5, generator=make)
                if bias:
                    ours[f"o{n}.{layer}.p{p}.bias"] = torch.randn(4 * heads, generator=make)
    names = name_map("\n".join(lines))
    theirs = names.export(ours, heads=heads)
    assert all(theirs.meta_tensor(n).shape == theirs[n].shape for n in theirs)
    assert equal(names.load(theirs, ours, heads=heads), ours)
    bare = {name.removeprefix("model."): t for name, t in theirs.items()}
    read = names.load(bare, ours, heads=heads)
    assert equal(read, ours)
    assert equal(names.export(read, heads=heads), theirs)


def test_tensors_are_read_lazily():
    class Counting(dict):
        num_reads = 0

        def __getitem__(self, name):
            self.num_reads += 1
            return super().__getitem__(name)

    ours = gpt2_ours()
    file = Counting(GPT2.export(ours))
    read = GPT2.load(file, ours)
    reads_before = file.num_reads
    assert torch.equal(read["head.out.bias"], ours["head.out.bias"])
    assert file.num_reads == reads_before + 1


def test_a_hundred_thousand_names_are_matched_quickly():
    import time

    rows = name_map("\n".join(f"model.layers.{{i}}.part{n}  decoder.layers.{{i}}.ours{n}" for n in range(40)))
    begin = time.process_time()
    assert all(rows.match_checkpoint(f"model.layers.{n // 40}.part{n % 40}.weight") for n in range(100_000))
    assert time.process_time() - begin < 3


def test_long_lists_are_shortened():
    assert format_names(map(str, range(6))) == "'0', '1', '2', '3' and 2 more"
