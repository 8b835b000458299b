"""config.json: values are checked, unread keys are refused, keys that ask for code are refused by name."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadFile
from headwater.weights.hf_config import IGNORED_KEYS, IGNORED_VALUES, HFConfig, RopeConfig, read_rope_config


def test_settings_have_aliases_and_defaults():
    c = HFConfig(
        {"n_embd": 8, "layer_norm_epsilon": 1, "n_inner": None, "activation_function": "gelu_new", "bias": True}
    )
    assert c.get_int("hidden_size", "n_embd") == 8
    assert c.get_float("layer_norm_epsilon") == 1.0
    assert isinstance(c.get_float("layer_norm_epsilon"), float)
    assert c.get_int("n_inner", default=32) == 32
    assert c.get_optional("get_int", "head_dim") is None
    assert c.get_optional("get_int", "n_embd") == 8
    assert c.get_str("activation_function", choices=("gelu_new", "relu")) == "gelu_new"
    assert c.get_bool("bias") is True
    c.refuse_unread()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda c: c.get_int("absent"), "absent is missing; it must be an integer"),
        (lambda c: c.get_int("zero"), "zero must be an integer, 1 to 2147483647, got '0'"),
        (lambda c: c.get_int("true"), "got 'True'"),
        (lambda c: c.get_int("half"), "got '0.5'"),
        (lambda c: c.get_int("huge"), "got '1000000000000'"),
        (lambda c: c.get_int("word"), "got 'relu'"),
        (lambda c: c.get_num_layers("many"), "1 to 10000"),
        (lambda c: c.get_float("true"), "must be a number"),
        (lambda c: c.get_float("word"), "must be a number"),
        (lambda c: c.get_bool("zero"), "true or false"),
        (lambda c: c.get_str("zero"), "must be a text"),
        (lambda c: c.get_str("word", choices=("rely", "silu")), "did you mean 'rely'"),
        (lambda c: c.get_list("word", int), "a list of int"),
        (lambda c: c.section("word"), "a JSON object"),
        (lambda c: c.get_int("one", "two"), "one = '1' and two = '2' mean the same"),
    ],
)
def test_a_wrong_value_is_reported(read, words):
    c = HFConfig(
        {
            "zero": 0,
            "true": True,
            "half": 0.5,
            "huge": 10**12,
            "word": "relu",
            "many": 10_001,
            "one": 1,
            "two": 2,
            "bad_ids": [1, -1],
        }
    )
    with pytest.raises(BadFile) as caught:
        read(c)
    assert words in str(caught.value)


def test_an_unread_key_is_refused_by_name():
    c = HFConfig({"hidden_size": 8, "hiden_act": "gelu", "use_cache": True, "clip_qkv": 8})
    c.get_int("hidden_size")
    with pytest.raises(BadFile, match=r"unknown settings.*'hiden_act' = 'gelu', 'clip_qkv' = '8'"):
        c.refuse_unread()
    inner = HFConfig({"text_config": {"width": 3}})
    inner.section("text_config")
    with pytest.raises(BadFile, match="text_config: unknown settings.*width"):
        inner.refuse_unread()


def test_some_keys_are_ignored_only_with_their_default_value():
    HFConfig({"is_decoder": False, "pruned_heads": {}, "chunk_size_feed_forward": 0}).refuse_unread()
    for key, value in [
        ("is_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"bits": 4}),
        ("position_embedding_type", "relative_key"),
        ("scale_attn_weights", False),
    ]:
        with pytest.raises(BadFile, match=key):
            HFConfig({key: value}).refuse_unread()
    assert not IGNORED_KEYS & set(IGNORED_VALUES)


@pytest.mark.parametrize(
    "values",
    [
        {"auto_map": {"AutoModel": "evil--repo--modeling.Evil"}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"text_config": {"auto_map": {}}},
        {"a": [{"b": {"trust_remote_code": True}}]},
    ],
)
def test_a_config_that_asks_for_code_is_refused(values):
    with pytest.raises(BadFile, match="asks to run code"):
        HFConfig(values)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": 1, "a": 2}', "written twice"),
        (b'{"a": NaN}', "finite"),
        (b'{"a": 1e999}', "finite"),
        (b"[]", "JSON object"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper than 32"),
        (b"[" * 200_000, "nested deeper"),
        (b'{"a":' * 200_000, "nested deeper"),
        (b"{" + b" " * (5 << 20) + b"}", "at most 4,194,304"),
        (b"\xff\xfe", "Unicode"),
        (b'{"a": %s}' % (b"9" * 5000), "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": "\\udc80"}', "Unicode"),
    ],
)
def test_bad_files_are_refused_quickly(tmp_path, raw, words):
    (tmp_path / "config.json").write_bytes(raw)
    begin = time.perf_counter()
    with pytest.raises(BadFile, match=words) as caught:
        HFConfig.from_json_file(tmp_path / "config.json")
    assert time.perf_counter() - begin < 0.05
    assert "\n" not in str(caught.value)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_both_forms_of_rope_parameters_are_equal():
    old = HFConfig({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    older = HFConfig({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = HFConfig({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    both = HFConfig({"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    expected = RopeConfig(5e5, rope_type="llama3", parameters=tuple((k, float(v)) for k, v in LLAMA3.items()))
    for c in (old, older, new, both):
        assert read_rope_config(c) == expected
        c.refuse_unread()
    assert read_rope_config(HFConfig({})) == RopeConfig(10_000.0)
    assert read_rope_config(HFConfig({"rope_scaling": None, "rotary_pct": 0.25}), theta=1.0) == RopeConfig(1.0, 0.25)
    neox = HFConfig({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}})
    assert read_rope_config(neox) == RopeConfig(10_000.0, 0.25)


def test_invalid_rope_parameters_are_reported():
    for scaling, words in [
        ({"type": "lama3"}, "did you mean 'llama3'"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": -1}, "must be a number"),
    ]:
        with pytest.raises(BadFile, match=words):
            read_rope_config(HFConfig({"rope_scaling": scaling}))
    c = HFConfig({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}})
    read_rope_config(c)
    with pytest.raises(BadFile, match="odd"):
        c.refuse_unread()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["hidden_size", "n_head", "act", "rope_scaling", "eos"]), json_values))
def test_any_value_is_read_or_refused_never_a_crash(values):
    c = HFConfig(json.loads(json.dumps(values)))
    for read in (
        lambda: c.get_int("hidden_size"),
        lambda: c.get_float("n_head"),
        lambda: c.get_str("act", choices=("a", "b")),
        lambda: read_rope_config(c),
        c.refuse_unread,
    ):
        try:
            read()
        except BadFile as fault:
            assert "\n" not in str(fault)


def test_a_config_of_transformers_has_only_keys_that_a_family_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig().save_pretrained(tmp_path)
    c = HFConfig.from_json_file(tmp_path / "config.json")
    read_rope_config(c)
    for name in (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ):
        c.get_int(name)
    c.get_str("hidden_act"), c.get_bool("attention_bias"), c.get_bool("mlp_bias"), c.get_float("rms_norm_eps")
    c.refuse_unread()
