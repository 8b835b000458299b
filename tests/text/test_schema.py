"""A hostile tokenizer.json: values that are unknown, unbounded or unsafe never reach the library."""

from __future__ import annotations

import copy
import json
import time

import pytest

from headwater.errors import BadFile
from headwater.text.backend import build_backend, call_backend
from headwater.text.loaders.sentencepiece_model import parse_sentencepiece
from headwater.text.patterns import GPT2_PATTERN, KNOWN_PATTERNS, LLAMA3_PATTERN, QWEN2_PATTERN, check_pattern
from headwater.text.schema import COMPONENT_SCHEMAS, validate_spec
from headwater.text.spec import added_token, bpe_model, byte_level, template_processing, tokenizer_spec
from headwater.text.tokenizer import Tokenizer

VALID = tokenizer_spec(
    bpe_model({"a": 0, "b": 1, "ab": 2, "<s>": 3}, [["a", "b"]]),
    normalizer=[{"type": "NFC"}],
    pre_tokenizer=[byte_level()],
    decoder=[byte_level()],
    post_processor=template_processing("<s> $A", "<s> $A $B", {"<s>": 3}),
    added_tokens=[added_token("<s>", 3)],
)


def changed(change):
    spec = copy.deepcopy(VALID)
    change(spec)
    return spec


def test_a_valid_tokenizer_is_accepted():
    assert build_backend(VALID, "x").encode("ab").ids == [3, 2]
    older = changed(lambda s: s["model"].pop("type"))
    older["model"]["merges"] = ["a b"]
    assert build_backend(older, "x").encode("ab").ids == [3, 2]


def test_padding_and_truncation_of_the_file_are_dropped():
    spec = changed(
        lambda s: s.update(
            padding={
                "strategy": {"Fixed": 10**12},
                "direction": "Right",
                "pad_id": 0,
                "pad_token": "a",
                "pad_type_id": 0,
                "pad_to_multiple_of": None,
            },
            truncation={"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        )
    )
    assert build_backend(spec, "x").encode("ab").ids == [3, 2]


HOSTILE = {
    "no model": (lambda s: s.pop("model"), "must have a model"),
    "model a text": (lambda s: s.update(model="x"), "must have a model"),
    "unknown key": (lambda s: s.update(code="x"), "'code' is not known"),
    "unknown type": (lambda s: s["model"].update(type="Neural"), "model of type 'Neural' is not known"),
    "type a list": (lambda s: s["model"].update(type=["BPE"]), "is not known"),
    "unknown setting": (lambda s: s["model"].update(run=1), "'run' = '1' is not known"),
    "dropout": (lambda s: s["model"].update(dropout=0.5), "dropout"),
    "empty vocabulary": (lambda s: s["model"].update(vocab={}, merges=[]), "the vocabulary must hold"),
    "ids shared": (lambda s: s["model"]["vocab"].update(b=0), "the vocabulary must hold"),
    "id negative": (lambda s: s["model"]["vocab"].update(b=-1), "the vocabulary must hold"),
    "id huge": (lambda s: s["model"]["vocab"].update(b=2**40), "the vocabulary must hold"),
    "id true": (lambda s: s["model"]["vocab"].update(b=True), "the vocabulary must hold"),
    "vocab a list": (lambda s: s["model"].update(vocab=[1]), "the vocabulary must hold"),
    "merge of strangers": (lambda s: s["model"].update(merges=[["x", "y"]]), "must join two pieces"),
    "merge of three": (lambda s: s["model"].update(merges=[["a", "b", "a"]]), "must join two pieces"),
    "merges a number": (lambda s: s["model"].update(merges=3), "merges must be a list"),
    "long words": (
        lambda s: s.update(
            model={
                "type": "WordPiece",
                "unk_token": "a",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 10**12,
                "vocab": {"a": 0},
            }
        ),
        "max_input_chars_per_word",
    ),
    "unigram unk": (lambda s: s.update(model={"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}), "unk_id"),
    "unigram score": (
        lambda s: s.update(model={"type": "Unigram", "unk_id": 0, "vocab": [["a", "b"]]}),
        "the vocabulary must hold",
    ),
    "added twice": (lambda s: s["added_tokens"].append(added_token("<s>", 3)), "share an id"),
    "added empty": (lambda s: s["added_tokens"].append(added_token("", 4)), "an added token must have"),
    "added without flags": (lambda s: s["added_tokens"].append({"id": 4, "content": "x"}), "an added token must have"),
    "added far away": (lambda s: s["added_tokens"].append(added_token("x", 1_000_000)), "must have the id 1000000"),
    "added against the vocabulary": (lambda s: s["added_tokens"].append(added_token("b", 7)), "must have the id 7"),
    "regex bomb": (
        lambda s: s.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        ),
        "repeats a group",
    ),
    "empty pattern": (
        lambda s: s.update(
            pre_tokenizer={"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
        ),
        "not known or not allowed",
    ),
    "bad regex": (
        lambda s: s.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "[a"}, "behavior": "Isolated", "invert": False}
        ),
        "the tokenizer refuses",
    ),
    "deep sequence": (
        lambda s: s.update(normalizer=json.loads('{"type": "Sequence", "normalizers": [' * 12 + "]}" * 12)),
        "at most 6 deep",
    ),
    "wide sequence": (
        lambda s: s.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}),
        "at most 64",
    ),
    "template stranger": (lambda s: s["post_processor"]["special_tokens"].pop("<s>"), "without saying which token"),
    "template ids": (lambda s: s["post_processor"]["special_tokens"]["<s>"].update(ids=[1, 2]), "special_tokens"),
    "template long": (
        lambda s: s["post_processor"].update(single=[{"Sequence": {"id": "A", "type_id": 0}}] * 65),
        "single",
    ),
    "charsmap": (
        lambda s: s.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "////"}),
        "precompiled_charsmap",
    ),
    "strip much": (lambda s: s.update(decoder={"type": "Strip", "content": "a", "start": 10**9, "stop": 0}), "start"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line(kind):
    change, words = HOSTILE[kind]
    begin = time.perf_counter()
    with pytest.raises(BadFile) as caught:
        Tokenizer(changed(change), where="tokenizer.json")
    assert time.perf_counter() - begin < 0.05
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_panics_of_the_library_become_faults():
    class PanicException(BaseException):
        pass

    def panics():
        raise PanicException("index out of bounds")

    with pytest.raises(BadFile, match="crashed: 'index out of bounds'"):
        call_backend(panics, "x")
    with pytest.raises(KeyboardInterrupt):
        call_backend(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "x")


@pytest.mark.parametrize(
    "pattern", [*sorted(KNOWN_PATTERNS), r"\d{1,3}(?", r"[一-龥]+", r"\p{N}", r"(?i:'s|'t)|\s+", r"\s+$", r"[^\s]*"]
)
def test_harmless_patterns_pass(pattern):
    check_pattern(pattern, "x")


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "(a|a)*", "(a*)*b", r"(a)\1+", "(?:x+x+)+y", "a" * 301, r"a*a*a*a*a*b", "(ab){2,}", r"(\w+\s?){5}"],
)
def test_patterns_that_may_explode_are_refused(pattern):
    with pytest.raises(BadFile):
        check_pattern(pattern, "x")


def test_the_known_patterns_are_quick_on_bad_text():
    for pattern in (GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN):
        spec = changed(
            lambda s, p=pattern: s.update(
                pre_tokenizer={"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
            )
        )
        engine = build_backend(spec, "x")
        for text in (" " * 20_000 + "x", "\n " * 5_000, "a'" * 5_000, "x" * 20_000):
            begin = time.perf_counter()
            engine.encode(text)
            assert time.perf_counter() - begin < 2


def test_every_known_component_can_be_built():
    """The schema names only types that the library has."""
    import tokenizers

    for slot, module in {
        "normalizer": tokenizers.normalizers,
        "pre_tokenizer": tokenizers.pre_tokenizers,
        "decoder": tokenizers.decoders,
        "post_processor": tokenizers.processors,
        "model": tokenizers.models,
    }.items():
        for kind in COMPONENT_SCHEMAS[slot]:
            assert hasattr(module, kind), (slot, kind)
    assert validate_spec(VALID, "x")["padding"] is None


@pytest.mark.parametrize(
    "raw",
    [
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x08\x01",
        b"\xff" * 20,
        b"\x0a\x02\x0a\x05",
        b"\x0a\x04\x0a\x02\xff\xff",
        b"\x0b",
        b"\x12\x02\x18\x07",
        b"\x0a\x03\x0a\x01a\x12\x02\x18\x03",
        b"\x0a\x08\x0a\x01a\x15\x00\x00\x80\x7f",
        b"\x0a\x03\x0a\x01a\x0a\x03\x0a\x01a",
        b"\x0a\x03\x0a\x01a\x12\x03\xc0\x02\x05",
    ],
)
def test_broken_sentencepiece_models_are_refused(raw):
    with pytest.raises(BadFile) as caught:
        parse_sentencepiece(raw)
    assert "\n" not in str(caught.value)
