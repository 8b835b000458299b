"""AntiBERTy: a BERT that reads antibodies, with heads of its own that no family has."""

from __future__ import annotations

import pytest
import torch

import headwater
from headwater.errors import BadFile
from headwater.families.convert import convert

HEAVY = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTI"
    "TRDMSTSTAYMELSSLRSEDTAVYYCAAPYCSSISCNDGFDIWGQGTMVTVS"
)
LIGHT = (
    "DVVMTQTPFSLPVSLGDQASISCRSSQSLVHSNGNTYLHWYLQKPGQSPKLLIYKVSNRFSGVPDRFSGSGSGTDFTLKISRVEAEDLGVYFCSQSTHVPYTFGGGTKLEIK"
)
OWN = ("cls.species.*", "cls.chain.*", "cls.graft.*")


@pytest.fixture(scope="module")
def converted(files, tmp_path_factory):
    folder = files("antiberty")
    return convert(folder, tmp_path_factory.mktemp("antiberty") / "new", vocabulary=folder.parent, drop=OWN)


def test_custom_tensors_are_named_and_dropped_only_on_request(files, tmp_path, converted):
    with pytest.raises(BadFile) as caught:
        convert(files("antiberty"), tmp_path / "new")
    assert "6 tensors belong to no part of bert: 'cls.chain.bias'" in str(caught.value)
    assert "--drop 'cls.species.*'" in str(caught.value)
    assert not (tmp_path / "new").exists()
    assert sorted({name.split(".")[1] for name in converted.dropped}) == ["chain", "graft", "species"]


def test_logits_are_the_public_models(files, unpickled, converted):
    import transformers as T

    model = T.BertForMaskedLM(T.BertConfig.from_pretrained(files("antiberty"))).eval()
    left = model.load_state_dict(unpickled(files("antiberty") / "pytorch_model.bin"), strict=False)
    assert not left.missing_keys
    texts = [" ".join(HEAVY), " ".join(LIGHT)]
    given = converted.loaded.tokenizer.encode_padded(texts)
    assert given.attention_mask.sum(1).tolist() == [len(HEAVY) + 2, len(LIGHT) + 2]
    with torch.no_grad():
        theirs = model(given.ids, attention_mask=given.attention_mask.long()).logits
        ours = converted.loaded.model(given.ids, attention_mask=given.attention_mask)
    assert (ours - theirs)[given.attention_mask].abs().max() < 5e-5  # logits go up to 20


def test_it_knows_antibodies(converted):
    """Each residue hidden in turn: far more are found again than the one in twenty of chance."""
    loaded = headwater.load(converted.folder)
    ids = torch.tensor([loaded.tokenizer.encode(" ".join(HEAVY))])
    places = torch.arange(1, ids.shape[1] - 1)[::4]
    hidden = ids.repeat(len(places), 1)
    hidden[torch.arange(len(places)), places] = loaded.tokenizer.mask_id
    with torch.no_grad():
        guess = loaded.model(hidden)[torch.arange(len(places)), places].argmax(-1)
    assert (guess == ids[0, places]).float().mean() > 0.6
