"""RXNMapper: an ALBERT that reads chemical reactions, converted from its old pickle."""

from __future__ import annotations

import re

import pytest
import torch

import headwater
from headwater.errors import NotFound

REACTIONS = [
    "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F",
    "C1COCCO1.CC(C)(C)OC(=O)CONC(=O)NCc1cccc2ccccc12.Cl>>O=C(O)CONC(=O)NCc1cccc2ccccc12",
]
PIECE = re.compile(r"\[[^\]]+\]|Br|Cl|%\d\d|>>|.")
LAYER, HEAD = 10, 5  # whose attention the package reads its atom mapping from


@pytest.fixture(scope="module")
def folder(files, command, tmp_path_factory):
    files("rxnmapper")
    new = tmp_path_factory.mktemp("rxnmapper") / "new"
    said = command("convert", "rxnmapper", new)
    assert "albert with the head 'language', 32 tensors" in said
    assert "no tokenizer was written" in said  # SMILES are not words: cut as WordPiece they would be mostly [UNK]
    return new


@pytest.fixture(scope="module")
def rows(files):
    vocab = {word: n for n, word in enumerate((files("rxnmapper") / "vocab.txt").read_text().split("\n"))}
    result = [[vocab[piece] for piece in ("[CLS]", *PIECE.findall(text), "[SEP]")] for text in REACTIONS]
    longest = max(map(len, result))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in result])
    keep = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in result])
    return ids, keep


@pytest.fixture(scope="module")
def public(files, unpickled):
    import transformers as T

    config = T.AlbertConfig.from_pretrained(files("rxnmapper"))
    model = T.AlbertForMaskedLM._from_config(config, attn_implementation="eager").eval()
    left = model.load_state_dict(unpickled(files("rxnmapper") / "pytorch_model.bin"), strict=False)
    assert not [name for name in left.missing_keys if "position_ids" not in name]
    return model


def test_logits_are_the_public_models(folder, rows, public):
    ids, keep = rows
    model = headwater.load(folder).model
    with torch.no_grad():
        theirs = public(ids, attention_mask=keep.long()).logits
        assert (model(ids, attention_mask=keep) - theirs)[keep].abs().max() < 2e-5 * theirs[keep].abs().max()


def test_the_attention_that_maps_atoms(folder, rows, public):
    """Layers share their weights, so the same tap is received once for each of the twelve."""
    ids, keep = rows
    model, captured = headwater.load(folder).model, []
    tap = model.get_submodule("encoder.layers.0.self_attn.kernel.weights")
    handle = tap.register_forward_hook(lambda module, given, out: captured.append(out))
    with torch.no_grad():
        model(ids, attention_mask=keep)
        theirs = public.albert(ids, attention_mask=keep.long(), output_attentions=True).attentions
    handle.remove()
    assert len(captured) == len(theirs) == 12
    for row, real in enumerate(keep.sum(1).tolist()):
        ours, other = (w[LAYER][row, HEAD, :real, :real] for w in (captured, theirs))
        assert (ours - other).abs().max() < 1e-5


def test_a_pickle_is_named_and_not_loaded(files):
    files("rxnmapper")
    with pytest.raises(NotFound, match="never loaded.*headwater convert"):
        headwater.load("rxnmapper")
