"""config.json: what is asked is checked, what nobody asks is refused, what asks for code is refused by name."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadFile
from headwater.weights.harmless import HARMLESS, HARMLESS_WHEN
from headwater.weights.rope import Rope, read_rope
from headwater.weights.settings import Settings


def test_settings_are_asked_for_with_aliases_and_defaults():
    c = Settings(
        {"n_embd": 8, "layer_norm_epsilon": 1, "n_inner": None, "activation_function": "gelu_new", "bias": True}
    )
    assert c.size("hidden_size", "n_embd") == 8
    assert c.number("layer_norm_epsilon") == 1.0
    assert isinstance(c.number("layer_norm_epsilon"), float)
    assert c.size("n_inner", default=32) == 32
    assert c.maybe("size", "head_dim") is None
    assert c.maybe("size", "n_embd") == 8
    assert c.word("activation_function", known=("gelu_new", "relu")) == "gelu_new"
    assert c.flag("bias") is True
    c.done()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda c: c.size("absent"), "absent is missing; it must be a whole number"),
        (lambda c: c.size("zero"), "zero must be a whole number, 1 to 2147483647, got '0'"),
        (lambda c: c.size("true"), "got 'True'"),
        (lambda c: c.size("half"), "got '0.5'"),
        (lambda c: c.size("huge"), "got '1000000000000'"),
        (lambda c: c.size("word"), "got 'relu'"),
        (lambda c: c.layers("many"), "1 to 10000"),
        (lambda c: c.number("true"), "must be a number"),
        (lambda c: c.number("word"), "must be a number"),
        (lambda c: c.flag("zero"), "true or false"),
        (lambda c: c.word("zero"), "must be a text"),
        (lambda c: c.word("word", known=("rely", "silu")), "did you mean 'rely'"),
        (lambda c: c.items("word", int), "a list of int"),
        (lambda c: c.ids("half"), "an id or a list"),
        (lambda c: c.ids("bad_ids"), "must be token ids"),
        (lambda c: c.part("word"), "a table of settings"),
        (lambda c: c.size("one", "two"), "one = '1' and two = '2' mean the same"),
    ],
)
def test_a_wrong_value_is_told(ask, words):
    c = Settings(
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
        ask(c)
    assert words in str(caught.value)


def test_ids_come_in_three_shapes():
    c = Settings({"eos_token_id": [1, 2], "bos_token_id": 5})
    assert (c.ids("eos_token_id"), c.ids("bos_token_id"), c.ids("pad_token_id")) == ([1, 2], [5], [])


def test_a_key_nobody_reads_is_refused_by_name():
    c = Settings({"hidden_size": 8, "hiden_act": "gelu", "use_cache": True, "clip_qkv": 8})
    c.size("hidden_size")
    with pytest.raises(BadFile, match=r"settings nobody reads.*'hiden_act' = 'gelu', 'clip_qkv' = '8'"):
        c.done()
    inner = Settings({"text_config": {"width": 3}})
    inner.part("text_config")
    with pytest.raises(BadFile, match="text_config: settings nobody reads.*width"):
        inner.done()


def test_some_keys_are_harmless_only_with_their_usual_value():
    Settings({"is_decoder": False, "pruned_heads": {}, "chunk_size_feed_forward": 0}).done()
    for key, value in [
        ("is_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"bits": 4}),
        ("position_embedding_type", "relative_key"),
        ("scale_attn_weights", False),
    ]:
        with pytest.raises(BadFile, match=key):
            Settings({key: value}).done()
    assert not HARMLESS & set(HARMLESS_WHEN)


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
        Settings(values)


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
        Settings.read(tmp_path / "config.json")
    assert time.perf_counter() - begin < 0.05
    assert "\n" not in str(caught.value)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_both_generations_of_rotary_settings_are_one():
    old = Settings({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    older = Settings({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    new = Settings({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    both = Settings({"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    want = Rope(5e5, kind="llama3", numbers=tuple((k, float(v)) for k, v in LLAMA3.items()))
    for c in (old, older, new, both):
        assert read_rope(c) == want
        c.done()
    assert read_rope(Settings({})) == Rope(10_000.0)
    assert read_rope(Settings({"rope_scaling": None, "rotary_pct": 0.25}), theta=1.0) == Rope(1.0, 0.25)
    neox = Settings({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}})
    assert read_rope(neox) == Rope(10_000.0, 0.25)


def test_rotary_mistakes_are_told():
    for scaling, words in [
        ({"type": "lama3"}, "did you mean 'llama3'"),
        ({"type": "linear"}, "factor is missing"),
        ({"type": "linear", "factor": -1}, "must be a number"),
    ]:
        with pytest.raises(BadFile, match=words):
            read_rope(Settings({"rope_scaling": scaling}))
    c = Settings({"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}})
    read_rope(c)
    with pytest.raises(BadFile, match="odd"):
        c.done()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["hidden_size", "n_head", "act", "rope_scaling", "eos"]), json_values))
def test_any_value_is_read_or_refused_never_a_crash(values):
    c = Settings(json.loads(json.dumps(values)))
    for ask in (
        lambda: c.size("hidden_size"),
        lambda: c.number("n_head"),
        lambda: c.word("act", known=("a", "b")),
        lambda: read_rope(c),
        lambda: c.ids("eos"),
        c.done,
    ):
        try:
            ask()
        except BadFile as fault:
            assert "\n" not in str(fault)


def test_what_transformers_writes_leaves_only_settings_a_family_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig().save_pretrained(tmp_path)
    c = Settings.read(tmp_path / "config.json")
    read_rope(c)
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
        c.size(name)
    c.word("hidden_act"), c.flag("attention_bias"), c.flag("mlp_bias"), c.number("rms_norm_eps")
    c.done()
