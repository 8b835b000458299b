"""A hostile tokenizer.json whose rules make a text longer is refused when it is loaded, before any rule runs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import textwrap
import time
import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.text.test_schema import changed

from headwater.errors import BadFile
from headwater.text.backend import build_backend, call_backend
from headwater.text.growth_limits import (
    MAX_GROWTH,
    MAX_SPECIAL_TOKENS,
    charsmap_keys,
    growth_rules,
    max_normalized_length,
)
from headwater.text.loaders.sentencepiece_model import parse_sentencepiece
from headwater.text.patterns import EDGE_SPACES, MULTIPLE_SPACES, never_matches_empty
from headwater.text.spec import added_token, template_processing


def sequence(slot, inner, parts):
    return changed(lambda s: s.update({slot: {"type": "Sequence", inner: parts}}))


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def refused(spec):
    begin = time.perf_counter()
    with pytest.raises(BadFile) as caught:
        build_backend(spec, "tokenizer.json")
    assert time.perf_counter() - begin < 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("count", [2, 6, 7, 12, 64])
def test_a_chain_of_short_replacements_is_refused(count):
    message = refused(sequence("normalizer", "normalizers", [replace("a", "a" * 10)] * count))
    assert message == (
        "tokenizer.json: the rules of normalizer and pre_tokenizer may make a text at most 16 times as long, up to "
        "Replace 'aaaaaaaaaa' they make it 100 times as long; shorten what they write"
    )


def test_the_refusal_takes_no_memory():
    """In a process with a limit of 200 MB above the memory that Python and the libraries have mapped."""
    code = """
        import json, resource, sys
        from headwater.text.backend import BadFile, build_backend
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
        try:
            build_backend(json.load(sys.stdin), "x")
        except BadFile as refusal:
            print(refusal)
    """
    spec = json.dumps(sequence("normalizer", "normalizers", [replace("a", "a" * 10)] * 12))
    run = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(run, input=spec, capture_output=True, text=True, check=True, timeout=120)
    assert "at most 16 times as long" in result.stdout


A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [A], "pair": [A, B], "special_tokens": {}}
MANY = {"<s>": {"id": "<s>", "ids": [3] * 64, "tokens": ["<s>"] * 64}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GROWING = {
    "prepend": sequence("normalizer", "normalizers", [{"type": "Prepend", "prepend": "aa"}] * 3),
    "a long prefix": changed(lambda s: s.update(normalizer={"type": "Prepend", "prepend": "a" * 2000})),
    "an empty match": sequence("normalizer", "normalizers", [replace("x*", "aaaa", "Regex")] * 2),
    "a pattern at the ends": sequence("normalizer", "normalizers", [replace("^|$", "a" * 8, "Regex")]),
    "compatibility characters": sequence("normalizer", "normalizers", [replace("a", "\ufdfa"), {"type": "NFKC"}]),
    "bytes again and again": sequence("pre_tokenizer", "pretokenizers", [BYTES] * 64),
    "bytes and rules": changed(lambda s: s.update(normalizer=replace("a", "aaaaa"), pre_tokenizer=BYTES)),
    "chinese": sequence("normalizer", "normalizers", [{"type": "BertNormalizer"}, replace(" ", "字")] * 3),
    "a text repeated": changed(lambda s: s.update(post_processor={**TEMPLATE, "single": [A] * 17})),
    "templates in a row": sequence("post_processor", "processors", [{**TEMPLATE, "single": [A] * 3}] * 3),
    "a pair repeated": changed(lambda s: s.update(post_processor={**TEMPLATE, "pair": [B] * 17})),
    "a decoder": sequence("decoder", "decoders", [replace("a", "aaaaa")] * 2),
    "empty decoder suffix": sequence("decoder", "decoders", [{"type": "BPEDecoder", "suffix": ""}] * 3),
    "decoder spaces": sequence("decoder", "decoders", [{"type": "WordPiece", "prefix": "##", "cleanup": False}] * 5),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_every_rule_that_grows_is_counted(name):
    assert "times as long" in refused(GROWING[name])


def test_many_special_tokens_around_a_text_are_refused():
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    post = {**TEMPLATE, "single": [special, special, A], "special_tokens": MANY}
    message = refused(changed(lambda s: s.update(post_processor=post)))
    assert (
        message == f"tokenizer.json: post_processor may add at most {MAX_SPECIAL_TOKENS} tokens to a text, it adds 128"
    )


# ------------------------------------------------------------------------------------------------- character maps


def darts(entries):
    """A double-array trie of single bytes, as sentencepiece writes it: {byte: text}."""
    units = np.zeros(512, "<u4")
    units[0] = 256 << 10
    texts, where = b"", {}
    for text in dict.fromkeys(entries.values()):
        where[text], texts = len(texts), texts + text.encode() + b"\0"
    for at, (byte, text) in enumerate(entries.items()):
        value = 16 + at  # index of the value of this key: below the children of the root
        units[256 ^ byte] = byte | 1 << 8 | ((256 ^ byte ^ value) << 10)
        units[value] = where[text] | 1 << 31
    return base64.b64encode(len(units.tobytes()).to_bytes(4, "little") + units.tobytes() + texts).decode()


def precompiled(charsmap):
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


def test_a_character_map_that_writes_much_is_refused():
    kind = changed(lambda s: s.update(normalizer=precompiled(darts({ord("a"): "b", ord("b"): "ab"}))))
    assert build_backend(kind, "x").normalizer.normalize_str("ab") == "bab"  # the library accepts the map
    message = refused(changed(lambda s: s.update(normalizer=precompiled(darts({ord("a"): "a" * 17})))))
    assert "up to Precompiled they make it 17 times as long" in message
    refused(changed(lambda s: s.update(normalizer=precompiled(darts({ord("a"): "a" * 4000})))))
    refused(sequence("normalizer", "normalizers", [precompiled(darts({ord("a"): "aa"}))] * 5))


def test_a_trie_without_end_is_refused_quickly():
    loops = np.array([label | 1 << 8 for label in range(256)], "<u4").tobytes()  # every node leads to every other
    raw = len(loops).to_bytes(4, "little") + loops + b"a\0"
    refused(changed(lambda s: s.update(normalizer=precompiled(base64.b64encode(raw).decode()))))


@pytest.mark.parametrize("name", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_the_maps_of_sentencepiece_do_not_grow(train_spm, name):
    """All keys are enumerated; keys and values are those of Unicode normalization."""
    raw = parse_sentencepiece(train_spm("bpe", vocab_size=300, normalization_rule_name=name)[0]).charsmap
    size = int.from_bytes(raw[:4], "little")
    keys = dict(charsmap_keys(np.frombuffer(raw, "<u4", size // 4, 4)))
    assert len(keys) > 5000 and "ﬁ".encode() in keys
    rule = precompiled(base64.b64encode(raw).decode())
    assert [result.growth for result in growth_rules(rule, "normalizer")] == [1.0]
    albert = [replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, rule]
    build_backend(sequence("normalizer", "normalizers", albert), "x")


# ------------------------------------------------------------------------------------------------------- the bound


def test_unicode_normalization_never_increases_the_length():
    forms = ("NFC", "NFD", "NFKC", "NFKD")
    for number in (*range(0xD800), *range(0xE000, 0x30000)):
        character = chr(number)
        result = {character.lower(), *(unicodedata.normalize(form, character) for form in forms)} - {character}
        assert all(max_normalized_length(text) <= max_normalized_length(character) for text in result), hex(number)


@pytest.mark.parametrize("pattern", [MULTIPLE_SPACES, EDGE_SPACES, r"\s+", "[a-z]", r"\p{L}{2}", "a.b|c+", r"x\|"])
def test_patterns_that_match_at_least_one_character(pattern):
    assert never_matches_empty(pattern)


@pytest.mark.parametrize(
    "pattern", ["", "a*", "a?", "a|", "^", "a+*", "a{2}{0}", "a{,3}", r"\b", "[[a]b]*", "(a)?", "$|a"]
)
def test_patterns_that_may_match_the_empty_text(pattern):
    assert not never_matches_empty(pattern)


TEXTS = st.builds(lambda text, times: text * times, st.text("abx \ufdfaﬁé字İ½", max_size=3), st.integers(1, 9))
PATTERNS = st.sampled_from(["a", "x*", "^", "$", "[ab]+", r"\s", "b?", "(a)|", "aa", "x+|b", r"\b", "(?=a)"])
NORMALIZERS = st.one_of(
    st.builds(replace, TEXTS.filter(bool), TEXTS),
    st.builds(lambda p, c: replace(p, c, "Regex"), PATTERNS, TEXTS),
    st.builds(lambda text: {"type": "Prepend", "prepend": text}, TEXTS.filter(bool)),
    st.sampled_from([{"type": n} for n in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "ByteLevel")]),
    st.builds(lambda n: {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": n,
                         "strip_accents": None, "lowercase": True}, st.booleans()),
    st.builds(lambda text: precompiled(darts({ord("a"): text, ord("b"): "x"})), TEXTS),
)  # fmt: skip
PRE = st.one_of(
    st.builds(lambda p: {**BYTES, "add_prefix_space": p}, st.booleans()),
    st.builds(lambda p: {"type": "Metaspace", "replacement": "▁", "prepend_scheme": p, "split": True},
              st.sampled_from(["first", "never", "always"])),
    st.just({"type": "WhitespaceSplit"}),
    st.just({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": False}),
)  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    st.lists(NORMALIZERS, max_size=4),
    st.lists(PRE, max_size=2),
    st.text(st.sampled_from("abx \ufdfaﬁé字İ½c"), min_size=1),
)
def test_accepted_rules_stay_within_the_bound(normalizers, pre, text):
    spec = sequence("normalizer", "normalizers", normalizers)
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre}
    normalised, pieces = attempt(lambda: split(build_backend({**spec, "post_processor": None}, "x"), text))
    assert max(len(normalised), sum(len(piece) for piece, _ in pieces)) <= MAX_GROWTH * max_normalized_length(text)


def split(engine, text):
    normalised = engine.normalizer.normalize_str(text)
    return normalised, engine.pre_tokenizer.pre_tokenize_str(normalised) if normalised else []


def attempt(work):
    """Skip the example if the tokenizer is refused or the library fails."""
    try:
        return call_backend(work, "x")
    except BadFile:
        assume(False)


DECODERS = st.one_of(
    st.builds(replace, TEXTS.filter(bool), TEXTS),
    st.builds(lambda p, c: replace(p, c, "Regex"), PATTERNS, TEXTS),
    st.builds(lambda s: {"type": "BPEDecoder", "suffix": s}, st.sampled_from(["", "a"])),
    st.just({"type": "WordPiece", "prefix": "a", "cleanup": True}),
    st.sampled_from([{"type": "Fuse"}, {"type": "ByteFallback"}, BYTES]),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(DECODERS, max_size=4), st.lists(st.text("ab x", min_size=1, max_size=4), min_size=1, max_size=5))
def test_accepted_decoders_stay_within_the_bound(decoders, tokens):
    spec = sequence("decoder", "decoders", decoders)
    result = attempt(lambda: build_backend(spec, "x").decoder.decode(tokens))
    assert len(result) <= MAX_GROWTH * (sum(map(len, tokens)) + len(tokens))


def test_a_prefix_before_each_segment_between_added_tokens_is_within_the_bound():
    spec = changed(lambda s: s.update(normalizer={"type": "Prepend", "prepend": "b" * 15}, pre_tokenizer=None))
    spec |= {"added_tokens": [added_token("<s>", 3)], "post_processor": template_processing("$A", "$A $B", {})}
    engine = build_backend(spec, "x")
    engine.encode_special_tokens = False
    text = "a<s>" * 50
    assert len(engine.encode(text).ids) == 50 * 17 <= MAX_GROWTH * len(text)
