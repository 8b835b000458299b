"""Tokenizers of every file format give the same ids as sentencepiece and transformers."""

from __future__ import annotations

import json
import os

import pytest

from headwater.errors import BadFile, Fault, NotFound
from headwater.text.load import load_target_tokenizer, load_tokenizer
from headwater.text.loaders import sentencepiece_model as spm
from headwater.text.loaders.sentencepiece import MBART50_LANGUAGES, plain_spec
from headwater.text.tokenizer import Tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")


def folder(path, **files):
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        name = name.replace("__", ".")
        content = json.dumps(content) if isinstance(content, (dict, list)) else content
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def assert_same_ids(ours, theirs, texts, **how):
    wrong = [
        (t, ours.encode(t), theirs(t, **how)["input_ids"])
        for t in texts
        if ours.encode(t) != theirs(t, **how)["input_ids"]
    ]
    assert not wrong, wrong[:3]


SPM = [
    ("unigram", dict(vocab_size=200)),
    ("unigram", dict(vocab_size=400, byte_fallback=True, pad_id=3)),
    ("unigram", dict(vocab_size=200, add_dummy_prefix=False)),
    ("bpe", dict(vocab_size=300)),
    (
        "bpe",
        dict(vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False),
    ),
    ("bpe", dict(vocab_size=300, normalization_rule_name="nmt_nfkc_cf")),
]


@pytest.mark.parametrize(("kind", "how"), SPM, ids=str)
def test_sentencepiece_models_tokenize_as_sentencepiece_does(train_spm, texts, kind, how):
    raw, reference = train_spm(kind, **how)
    ours = Tokenizer(*plain_spec(spm.parse_sentencepiece(raw), {}))
    wrong = [(t, ours.encode(t), reference.encode(t)) for t in texts if ours.encode(t) != reference.encode(t)]
    assert not wrong, wrong[:3]
    known = [t for t in texts if reference.unk_id() not in reference.encode(t)]
    assert len(known) > 20
    assert all(ours.decode(ours.encode(t)) == reference.decode(reference.encode(t)) for t in known)
    assert ours.special_id("unk") == reference.unk_id()
    assert (ours.bos_id, ours.eos_id) == (reference.bos_id(), reference.eos_id())


def test_a_planted_fault_in_the_scores_is_seen(train_spm, texts):
    raw, reference = train_spm("unigram", vocab_size=200)
    model = spm.parse_sentencepiece(raw)
    model.pieces = [p._replace(score=0.0) for p in model.pieces]
    ours = Tokenizer(*plain_spec(model, {}))
    assert any(ours.encode(t) != reference.encode(t) for t in texts)


def test_llama(train_spm, texts, tmp_path):
    raw, reference = train_spm(
        "bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    ours = load_tokenizer(folder(tmp_path / "m", tokenizer__model=raw, config__json={"model_type": "llama"}))
    assert all(ours.encode(t) == [1, *reference.encode(t)] for t in texts)
    assert all(ours.decode(ours.encode(t)) == t for t in texts if "▁" not in t)
    assert ours.special_tokens_map["bos"] == "<s>"
    assert ours.encode("a", add_special_tokens=False) == reference.encode("a")
    both = load_tokenizer(
        folder(tmp_path / "m", tokenizer_config__json={"add_eos_token": True, "tokenizer_class": "LlamaTokenizer"})
    )
    assert both.encode("a") == [1, *reference.encode("a"), 2]


def test_t5(train_spm, texts, tmp_path):
    raw, reference = train_spm("unigram", vocab_size=200, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = load_tokenizer(folder(tmp_path / "m", spiece__model=raw, config__json={"model_type": "t5"}))
    assert all(ours.encode(t) == [*reference.encode(t), 1] for t in texts)
    assert len(ours) == 300
    assert ours.token_to_id("<extra_id_0>") == 299
    assert ours.token_to_id("<extra_id_99>") == 200
    model = spm.parse_sentencepiece(raw)
    extra = [(f"<extra_id_{n}>", 0.0) for n in reversed(range(100))]
    theirs = transformers.T5Tokenizer(
        vocab=[(p.text, p.score) for p in model.pieces] + extra, _spm_precompiled_charsmap=model.charsmap
    )
    tidy = [t for t in texts if t and t == t.strip() and "  " not in t and "▁" not in t]
    assert_same_ids(ours, theirs, [t for t in tidy if t.isascii() and "\n" not in t])
    assert ours.encode("ka <extra_id_0> ri", parse_special=True) == theirs("ka <extra_id_0> ri")["input_ids"]
    assert (ours.pad_id, ours.eos_id, ours.bos_id) == (0, 1, None)


def test_albert(train_spm, texts, tmp_path):
    raw, reference = train_spm(
        "unigram", vocab_size=200, pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, control_symbols="[CLS],[SEP],[MASK]"
    )
    ours = load_tokenizer(
        folder(tmp_path / "m", spiece__model=raw, tokenizer_config__json={"tokenizer_class": "AlbertTokenizer"})
    )
    cls, sep = reference.piece_to_id("[CLS]"), reference.piece_to_id("[SEP]")
    assert ours.encode("the river") == [cls, *reference.encode("the river"), sep]
    assert ours.encode("THE Cafè") == [cls, *reference.encode("the cafe"), sep]
    aligned = ours.encode_with_offsets("the river", "ka ri")
    assert aligned.token_types[0] == 0
    assert aligned.token_types[-1] == 1
    assert aligned.ids == [cls, *reference.encode("the river"), sep, *reference.encode("ka ri"), sep]
    kept = load_tokenizer(
        folder(
            tmp_path / "m",
            tokenizer_config__json={"tokenizer_class": "AlbertTokenizer", "do_lower_case": False, "keep_accents": True},
        )
    )
    assert kept.encode("the Café", add_special_tokens=False) == reference.encode("the Café")


def test_fairseq_ids_are_shifted(train_spm, texts, tmp_path):
    raw, reference = train_spm("unigram", vocab_size=200)
    size = 200 + 1  # one more than the pieces, because <pad> is inserted

    def shifted(text):
        return [3 if n == 0 else n + 1 for n in reference.encode(text)]

    xlmr = load_tokenizer(
        folder(tmp_path / "x", sentencepiece__bpe__model=raw, config__json={"model_type": "xlm-roberta"})
    )
    assert all(xlmr.encode(t) == [0, *shifted(t), 2] for t in texts)
    assert xlmr.mask_id == size
    mbart = load_tokenizer(
        folder(
            tmp_path / "b",
            sentencepiece__bpe__model=raw,
            tokenizer_config__json={"tokenizer_class": "MBartTokenizer", "src_lang": "ro_RO"},
        )
    )
    assert all(mbart.encode(t) == [*shifted(t), 2, mbart.token_to_id("ro_RO")] for t in texts)
    assert (mbart.token_to_id("ar_AR"), mbart.token_to_id("zh_CN"), mbart.mask_id) == (size, size + 24, size + 25)
    fifty = load_tokenizer(
        folder(
            tmp_path / "c",
            sentencepiece__bpe__model=raw,
            tokenizer_config__json={"tokenizer_class": "MBart50Tokenizer", "src_lang": "de_DE"},
        )
    )
    assert all(fifty.encode(t) == [fifty.token_to_id("de_DE"), *shifted(t), 2] for t in texts)
    assert (fifty.token_to_id("sl_SI"), fifty.mask_id) == (size + 51, size + 52)
    from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES

    assert list(FAIRSEQ_LANGUAGE_CODES) == MBART50_LANGUAGES
    with pytest.raises(BadFile, match="52 languages"):
        load_tokenizer(
            folder(tmp_path / "c", tokenizer_config__json={"tokenizer_class": "MBart50Tokenizer", "src_lang": "xx"})
        )


def test_marian_keeps_two_languages_in_one_vocabulary(train_spm, texts, lines, tmp_path):
    source, reader = train_spm("unigram", vocab_size=200)
    target, writer = train_spm("unigram", vocab_size=300)
    names = dict.fromkeys(["</s>", "<unk>"])
    for model in (reader, writer):
        names |= dict.fromkeys(model.id_to_piece(n) for n in range(3, model.get_piece_size()))
    vocab = {piece: n for n, piece in enumerate([*names, "<pad>"])}
    path = folder(
        tmp_path / "m",
        source__spm=source,
        target__spm=target,
        vocab__json=vocab,
        tokenizer_config__json={"tokenizer_class": "MarianTokenizer", "source_lang": "a", "target_lang": "b"},
    )
    ours, other = load_tokenizer(path), load_target_tokenizer(path)
    theirs = transformers.MarianTokenizer.from_pretrained(path)
    assert_same_ids(ours, theirs, lines[:100])
    for text in lines[:100]:
        assert other.encode(text) == theirs(text_target=text)["input_ids"]
        assert other.decode(other.encode(text)) == theirs.decode(other.encode(text), skip_special_tokens=True)
    assert (ours.eos_id, ours.special_id("unk"), ours.pad_id) == (0, 1, len(vocab) - 1)
    with pytest.raises(BadFile, match="without a gap"):
        load_tokenizer(folder(path, vocab__json={**vocab, "late": 10_000}))


@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"tokenize_chinese_chars": False}, {"strip_accents": False}], ids=str
)
def test_wordpiece(wordpieces, texts, tmp_path, config):
    path = folder(tmp_path / "m", vocab__txt="\n".join(wordpieces) + "\n", tokenizer_config__json=config)
    ours = load_tokenizer(path)
    theirs = transformers.BertTokenizer.from_pretrained(path, **config)
    assert_same_ids(ours, theirs, texts)
    pair = ours.encode_with_offsets("the river", "Ka ri")
    expected = theirs("the river", "Ka ri")
    assert (pair.ids, pair.token_types) == (expected["input_ids"], expected["token_type_ids"])
    assert ours.encode("the [MASK] river", parse_special=True) == theirs("the [MASK] river")["input_ids"]
    assert ours.mask_id not in ours.encode("the [MASK] river")
    assert (ours.special_id("cls"), ours.special_id("sep"), ours.pad_id) == (
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.pad_token_id,
    )


@pytest.mark.parametrize(
    ("style", "prefix"),
    [("GPT2", False), ("GPT2", True), ("Roberta", False), ("Roberta", True), ("Bart", False), ("Qwen2", False)],
)
def test_byte_bpe(byte_bpe, texts, tmp_path, style, prefix):
    vocab, merges = byte_bpe
    path = folder(
        tmp_path / "m",
        vocab__json=vocab,
        merges__txt=merges,
        tokenizer_config__json={"tokenizer_class": f"{style}Tokenizer", "add_prefix_space": prefix},
    )
    ours = load_tokenizer(path)
    theirs = getattr(transformers, f"{style}Tokenizer").from_pretrained(path, add_prefix_space=prefix)
    assert_same_ids(ours, theirs, texts)
    theirs.add_tokens([transformers.AddedToken("<mask>", lstrip=True, special=True)])  # as in the published files
    if style in ("Roberta", "Bart"):
        assert ours.encode_with_offsets("the river", "ka").ids == theirs("the river", "ka")["input_ids"]
        assert ours.encode("the <mask> river", parse_special=True) == theirs("the <mask> river")["input_ids"]
    if not prefix and style != "Qwen2":
        assert all(ours.decode_bytes(ours.encode(t, add_special_tokens=False)) == t.encode() for t in texts)


def test_transformers_loads_saved_tokenizers(byte_bpe, wordpieces, train_spm, texts, tmp_path):
    vocab, merges = byte_bpe
    raw, _ = train_spm("unigram", vocab_size=400, byte_fallback=True, pad_id=3)
    folders = {
        "bpe": folder(tmp_path / "a", vocab__json=vocab, merges__txt=merges, config__json={"model_type": "roberta"}),
        "pieces": folder(tmp_path / "b", vocab__txt="\n".join(wordpieces)),
        "spm": folder(tmp_path / "c", tokenizer__model=raw, config__json={"model_type": "llama"}),
    }
    for name, path in folders.items():
        ours = load_tokenizer(path)
        ours.chat_template = "{{ messages[0].content }}"
        out = tmp_path / f"saved-{name}"
        out.mkdir()
        ours.save(out)
        again = load_tokenizer(out)
        assert again.hash == ours.hash
        assert again.special_tokens_map == ours.special_tokens_map
        assert again.chat_template == ours.chat_template
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(out)
        assert_same_ids(again, theirs, texts)
        assert theirs.chat_template == ours.chat_template
        assert theirs.pad_token_id == ours.pad_id


def test_special_tokens_and_templates_in_several_forms(wordpieces, tmp_path):
    path = folder(
        tmp_path / "m",
        vocab__txt="\n".join(wordpieces),
        special_tokens_map__json={"pad_token": {"content": "[PAD]"}, "bos_token": "[CLS]"},
        tokenizer_config__json={
            "chat_template": [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
        },
    )
    ours = load_tokenizer(path)
    assert ours.bos_id == ours.special_id("cls")
    assert ours.chat_template == "y"
    assert load_tokenizer(folder(path, chat_template__jinja="z")).chat_template == "z"


def test_missing_and_broken_files_are_reported(tmp_path, byte_bpe, wordpieces):
    vocab, merges = byte_bpe
    (tmp_path / "none").mkdir()
    with pytest.raises(NotFound, match="has no tokenizer"):
        load_tokenizer(tmp_path / "none")
    for n, (files, words) in enumerate(
        [
            ({"tokenizer__json": "{}"}, "must have a model"),
            ({"tokenizer__json": "[]"}, "JSON object"),
            ({"vocab__txt": "a\nb"}, "unk token '\\[UNK\\]' must be in the vocabulary"),
            ({"vocab__txt": b"\xff\xfe"}, "not UTF-8"),
            ({"merges__txt": merges}, "vocab.json does not exist"),
            ({"merges__txt": merges, "vocab__json": {"a": "b"}}, "integer"),
            ({"merges__txt": "x yz\n", "vocab__json": vocab}, "must join two pieces"),
            ({"merges__txt": merges, "vocab__json": {"a": 1}, "config__json": {"model_type": "roberta"}}, "sep token"),
            ({"tokenizer__model": b"\x0a\xff\xff"}, "cut short"),
            ({"tokenizer__model": b""}, "not a sentencepiece model"),
        ]
    ):
        with pytest.raises(Fault, match=words) as caught:
            load_tokenizer(folder(tmp_path / str(n), **files))
        assert "\n" not in str(caught.value)
