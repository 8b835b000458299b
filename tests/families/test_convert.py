"""`headwater convert` on small legacy folders: no tensor is lost, no file overwritten, none left after an error."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tiny_models import forward, make, tensors

import headwater
from headwater.cli import main
from headwater.errors import BadFile, NotFound
from headwater.families.convert import convert

pytestmark = pytest.mark.usefixtures("forked_pickles")


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A folder as old versions of transformers wrote it: config.json, a pickle and vocab.txt."""
    folder = make(tmp_path_factory.mktemp("old") / "bert", "bert")
    torch.save(tensors(folder), folder / "pytorch_model.bin")
    os.rename(folder / "model.safetensors", folder.parent / "kept.safetensors")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "##er", "##s", "river", "sea"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def test_a_pickle_becomes_safetensors(old, tmp_path, capsys):
    assert main(["convert", str(old), str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    assert "bert with the head 'language'" in output
    assert "loaded again and compared: equal" in output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    weights = torch.load(old / "pytorch_model.bin", weights_only=True)
    new = tensors(tmp_path / "new")
    assert weights.keys() == new.keys()
    assert all(torch.equal(weights[name], new[name]) for name in weights)
    loaded = headwater.load(tmp_path / "new")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("rivers")) == "rivers"
    assert forward(loaded.model).isfinite().all()


def test_nothing_is_overwritten_without_force(old, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "mine.txt").write_text("keep me")
    with pytest.raises(BadFile, match="must be a new or empty folder, it exists already.*--force"):
        convert(old, new)
    convert(old, new, force=True)
    assert (new / "mine.txt").read_text() == "keep me"
    assert (new / "model.safetensors").exists()


def test_a_single_file_uses_the_config_beside_it(old, tmp_path):
    done = convert(old / "pytorch_model.bin", tmp_path / "new")
    assert done.loaded.config["model_type"] == "bert"


@pytest.mark.parametrize(
    ("spoil", "fault", "words"),
    [
        (lambda f: (f / "config.json").unlink(), NotFound, "must hold a config.json with a pickle"),
        (lambda f: (f / "pytorch_model.bin").unlink(), NotFound, "must hold a pickle such as pytorch_model.bin"),
        (lambda f: (f / "pytorch_model.bin").write_bytes(b"abc"), BadFile, "not converted"),
        (lambda f: change(f, model_type="bertt"), BadFile, "did you mean 'bert'"),
        (lambda f: change(f, auto_map={}), BadFile, "asks to run code"),
        (lambda f: change(f, hidden_size=24), BadFile, "do not fit this model"),
    ],
    ids=["no config", "no pickle", "no pickle at all", "unknown family", "code", "another width"],
)
def test_a_failed_conversion_leaves_no_files(old, tmp_path, spoil, fault, words):
    import shutil

    folder = tmp_path / "old"
    shutil.copytree(old, folder)
    spoil(folder)
    with pytest.raises(fault, match=words) as caught:
        convert(folder, tmp_path / "new")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def change(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_vocabulary_without_words_gets_no_tokenizer(old, tmp_path):
    """Pieces such as [nH+] or Cl( would be split into pieces that are not in the vocabulary."""
    folder = tmp_path / "text"
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[{a}{n}+]" for a in "CNOPS" for n in range(6))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    done = convert(old, tmp_path / "new", vocabulary=folder)
    assert done.tokenizer_note.startswith("vocab.txt is not a WordPiece vocabulary")
    assert done.loaded.tokenizer is None


def test_capitals_are_kept_where_the_vocabulary_has_them(old, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNP"]) + "\n"
    )
    done = convert(old, tmp_path / "new", vocabulary=folder)
    assert 1 not in done.loaded.tokenizer.encode("A C D E")


def test_a_wrong_tensor_is_seen(old, tmp_path, monkeypatch):
    """Planted fault: weights that change during the conversion."""
    from headwater.families import convert as module

    honest = module.save_weights
    monkeypatch.setattr(module, "save_weights", lambda to, weights: honest(to, {n: t + 1 for n, t in weights.items()}))
    with pytest.raises(BadFile, match="changed when it was written and read back; not converted"):
        convert(old, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
