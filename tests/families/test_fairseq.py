"""fairseq's Transformer: equal to the public implementation of the post-norm form; its dictionaries and codes."""

from __future__ import annotations

import argparse
import json
import warnings

import pytest
import torch
from tiny_models import FAIRSEQ, VOCAB, ids

import headwater
from headwater.core import SinusoidalHalves
from headwater.errors import BadFile, BadSetting, NotFound
from headwater.families.convert import convert
from headwater.families.fairseq import FairseqSinusoidal, fairseq_args_to_config
from headwater.parts import from_dict, swap, to_dict
from headwater.text.loaders import marian
from headwater.text.tokenizer import Tokenizer
from headwater.weights.safetensors import write_safetensors

pytestmark = pytest.mark.usefixtures("forked_pickles")

ARGS = FAIRSEQ | {"arch": "transformer", "share_all_embeddings": False, "encoder_normalize_before": False}
ARGS.pop("vocab_size")


@pytest.fixture(scope="module")
def public():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as T

    torch.manual_seed(0)
    sizes = {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    }  # fmt: skip
    config = T.FSMTConfig(src_vocab_size=VOCAB, tgt_vocab_size=VOCAB, max_position_embeddings=64, **sizes)
    model = T.FSMTForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def folder_of(public, folder, drop=()):
    """The public model's weights under fairseq's names."""
    folder.mkdir()
    tensors = {name.removeprefix("model."): tensor for name, tensor in public.state_dict().items()}
    tensors = {
        name: t.contiguous() for name, t in tensors.items() if "embed_positions" not in name and name not in drop
    }
    write_safetensors(folder / "model.safetensors", tensors)
    config = fairseq_args_to_config(ARGS, "args") | {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def distance(model, public):
    source, rows = ids(9, 1), ids(11)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[1, 6:] = False
    source[~keep] = 1
    with torch.no_grad():
        theirs = public(input_ids=source, attention_mask=keep.long(), decoder_input_ids=rows, use_cache=False).logits
        return (model(rows, source=source, source_attention_mask=keep) - theirs).abs().max().item()


def test_post_norm_equals_the_public_implementation(public, tmp_path):
    loaded = headwater.load(folder_of(public, tmp_path / "m"))
    assert loaded.config["model_type"] == "fairseq"
    assert distance(loaded.model, public) < 2e-5


@pytest.mark.parametrize("wrong", [FairseqSinusoidal(offset=0), FairseqSinusoidal(offset=1), SinusoidalHalves()])
def test_wrong_positions_would_be_seen(wrong, public, tmp_path):
    loaded = headwater.load(folder_of(public, tmp_path / "m"))
    spec = swap(loaded.spec, FairseqSinusoidal, lambda part: wrong)
    model = spec.build(seed=0).eval()
    model.load_state_dict(loaded.model.state_dict())
    assert distance(model, public) > 1e-3


def test_the_part_converts_to_json_and_back():
    assert from_dict(to_dict(FairseqSinusoidal(offset=5))) == FairseqSinusoidal(offset=5)


def test_settings_that_change_the_maths_are_refused():
    for name, value in (("adaptive_softmax_cutoff", "1000,2000"), ("no_cross_attention", True)):
        with pytest.raises(BadFile, match=f"fairseq's {name} = .* is not supported"):
            fairseq_args_to_config(ARGS | {name: value}, "args")
    with pytest.raises(BadFile, match="the same width and norm position"):
        fairseq_args_to_config(ARGS | {"decoder_normalize_before": True}, "args")
    with pytest.raises(BadFile, match="the same width"):
        fairseq_args_to_config(ARGS | {"encoder_embed_dim": 32}, "args")
    assert fairseq_args_to_config(ARGS | {"encoder_normalize_before": True, "decoder_normalize_before": True}, "")[
        "model_type"
    ] == ("fairseq_prenorm")


# ---------------------------------------------------------------------------------------------------------- tokenizers

SOURCE = "the 10\nlo@@ 9\nw 8\nw@@ 8\ner 7\nl@@ 5\no@@ 4\ne@@ 4\nr 4\nt@@ 3\nh@@ 3\ne 3\nmadeupword0000 0\n"
CODES = "#version: 0.2\nt h\nth e</w>\nl o\ne r</w>\n"


def reference_bpe(word: str, merges: list[list[str]]) -> list[str]:
    """subword-nmt from its description: merge the best pair until there is none."""
    pieces = [*word[:-1], word[-1] + "</w>"]
    while True:
        ranked = [
            (merges.index([a, b]), i)
            for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if [a, b] in merges
        ]
        if not ranked:
            return pieces
        _, i = min(ranked)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def test_dictionary_and_codes():
    vocab, merges = marian.parse_dictionary(SOURCE, "dict"), marian.parse_bpe_codes(CODES, "codes")
    assert [vocab[w] for w in ("<s>", "<pad>", "</s>", "<unk>", "the</w>", "lo")] == [0, 1, 2, 3, 4, 5]
    assert len(vocab) == 17
    assert marian.missing_pieces(vocab, merges) == ["th"]  # an intermediate piece of `the` that the dictionary lacks
    full_vocab = dict(vocab, th=17)
    tokenizer = Tokenizer(marian.fairseq_spec(full_vocab, merges), marian.FAIRSEQ_SPECIAL_TOKENS)
    for text in ("the lower", "the the", "low lo thx", "tower  the", "q"):
        pieces = [piece for word in text.split() for piece in reference_bpe(word, merges)]
        assert tokenizer.encode(text) == [*(full_vocab.get(piece, 3) for piece in pieces), 2], text
    assert tokenizer.decode(tokenizer.encode("the lower")) == "the lower"
    assert tokenizer.piece(4) == "the "


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (marian.parse_dictionary, "a 1\na 2\n", "must be a new piece and its count, got 'a 2'"),
        (marian.parse_dictionary, "a b\n", "must be a new piece"),
        (marian.parse_dictionary, "lonely\n", "must be a new piece"),
        (marian.parse_bpe_codes, "a b\n", "codes of version 0.2"),
        (marian.parse_bpe_codes, "#version: 0.1\na b\n", "codes of version 0.2"),
        (marian.parse_bpe_codes, "#version: 0.2\na b c\n", "two pieces per line"),
    ],
)
def test_bad_dictionaries_and_codes(read, text, words):
    with pytest.raises(BadFile, match=words):
        read(text, "file")


# ------------------------------------------------------------------------------------------------------------ convert


def checkpoint(folder, public, **args):
    """A checkpoint as fairseq saves it: arguments, weights and optimizer state."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "data").mkdir()
    tensors = {name.removeprefix("model."): tensor for name, tensor in public.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "embed_positions" not in name}
    tensors |= {"encoder.version": torch.ones(1), "encoder.embed_positions._float_tensor": torch.ones(1)}
    settings = argparse.Namespace(**{**ARGS, "source_lang": "aa", "target_lang": "bb", **args})
    torch.save(
        {"args": settings, "model": tensors, "extra": {"epoch": 3}}, folder / "checkpoints" / "checkpoint_best.pt"
    )
    words = "".join(f"w{n} 1\n" for n in range(VOCAB - 4))
    (folder / "data" / "dict.aa.txt").write_text(words)
    (folder / "data" / "dict.bb.txt").write_text(words)
    return folder


def test_a_checkpoint_becomes_a_folder(public, tmp_path):
    done = convert(checkpoint(tmp_path / "old", public), tmp_path / "new")
    assert done.loaded.config["model_type"] == "fairseq"
    assert distance(done.loaded.model, public) < 2e-5
    assert done.loaded.tokenizer.decode([4, 5, 2]) == "w0 w1"
    assert done.loaded.decoder_start_id == 2
    assert done.loaded.eos_ids == (2,)


def test_what_is_missing_is_named(public, tmp_path):
    old = checkpoint(tmp_path / "old", public)
    (old / "data" / "dict.bb.txt").write_text("a 1\n")
    with pytest.raises(BadFile, match="there must be dictionaries of 47 and 47 pieces, found: aa 47, bb 5"):
        convert(old, tmp_path / "new")
    for path in (old / "data").iterdir():
        path.unlink()
    with pytest.raises(NotFound, match=r"dict.\*.txt must be in it or in data/; name their folder with --vocabulary"):
        convert(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    with pytest.raises(BadSetting, match="no tensor matches --drop 'decoder.embed.tokens'"):
        convert(old, tmp_path / "new", drop=["decoder.embed.tokens"])
