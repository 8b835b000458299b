"""Bambara in Latin letters to N'Ko: the 2017 Transformer as fairseq trained it, converted from fairseq's pickle."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional as F

import headwater
from headwater.families.convert import convert
from headwater.generation.api import generate
from headwater.generation.beam import Beam
from headwater.text.tokenizer import PairTokenizer

HEADS = 8
NUMBER = re.compile(r"^\W*[\d߀-߉]+[.:]\s*")  # the reference numbers its verses with 1, the model with ߁


@pytest.fixture(scope="module")
def loaded(files, tmp_path_factory):
    return convert(files("detransliterator"), tmp_path_factory.mktemp("nko") / "new").loaded


@pytest.fixture(scope="module")
def lines(files):
    """The package's own test set: tonal Latin and N'Ko, line by line."""
    data = files("detransliterator").parent / "test_data"
    latin, nko = ((data / f"diane_parallel_002.{kind}").read_text("utf8").split("\n") for kind in ("emk-tonal", "nqo"))
    pairs = [(one.strip(' "').lower(), two.strip()) for one, two in zip(latin, nko, strict=True)]
    return [(NUMBER.sub("", one), NUMBER.sub("", two)) for one, two in pairs if 20 < len(one) < 80]


# ------------------------------------------------------------------- the same model again, written out from fairseq's


class Reference:
    """fairseq's pre-norm Transformer in plain tensor operations, on the tensors of the pickle itself."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        self.w = weights
        self.layers = 1 + max(int(name.split(".")[2]) for name in weights if ".layers." in name)

    def linear(self, x, name):
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)

    def embed(self, ids, side):
        table = self.w[f"{side}.embed_tokens.weight"]
        d = table.shape[1]
        rates = torch.exp(torch.arange(d // 2).float() * -(math.log(10000) / (d // 2 - 1)))
        places = torch.arange(len(ids)).float() + 2  # after <pad>, whose id is 1
        angles = places[:, None] * rates
        return table[ids] * math.sqrt(d) + torch.cat([angles.sin(), angles.cos()], 1)

    def attend(self, x, memory, name, causal):
        def split(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(0, 1)

        q, k, v = (split(self.linear(y, f"{name}.{p}_proj")) for y, p in ((x, "q"), (memory, "k"), (memory, "v")))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if causal:
            scores = scores + torch.full_like(scores, -math.inf).triu(1)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{name}.out_proj")

    def stack(self, x, side, memory=None):
        for i in range(self.layers):
            at = f"{side}.layers.{i}"
            y = self.norm(x, f"{at}.self_attn_layer_norm")
            x = x + self.attend(y, y, f"{at}.self_attn", memory is not None)
            if memory is not None:
                y = self.norm(x, f"{at}.encoder_attn_layer_norm")
                x = x + self.attend(y, memory, f"{at}.encoder_attn", False)
            y = self.norm(x, f"{at}.final_layer_norm")
            x = x + self.linear(self.linear(y, f"{at}.fc1").relu(), f"{at}.fc2")
        return self.norm(x, f"{side}.layer_norm")

    def __call__(self, source, target):
        memory = self.stack(self.embed(source, "encoder"), "encoder")
        return (
            self.stack(self.embed(target, "decoder"), "decoder", memory) @ self.w["decoder.output_projection.weight"].T
        )


def test_logits_are_those_of_the_pickle(files, unpickled, loaded, lines):
    checkpoint = files("detransliterator") / "checkpoints" / "checkpoint_best.pt"
    reference = Reference(unpickled(checkpoint)["model"])
    for latin, nko in lines[:8]:
        source = torch.tensor(loaded.tokenizer.encode(latin))
        target = torch.tensor([2, *loaded.tokenizer.target.encode(nko)])
        known = target[target < 832]
        source = torch.where(source < 776, source, 3)  # pieces the dictionary lacks are <unk> there
        with torch.no_grad():
            ours = loaded.model(known[None], source=source[None])[0]
            assert (ours - reference(source, known)).abs().max() < 2e-5


def test_pieces_the_dictionary_lacks_mean_unknown(loaded):
    table = loaded.model.encoder.embed.tokens.weight
    assert len(table) == len(loaded.tokenizer) == 779
    assert torch.equal(table[776:], table[3].expand(3, -1))


def test_it_reads_one_alphabet_and_writes_another(loaded):
    assert isinstance(loaded.tokenizer, PairTokenizer)
    said = headwater.load(loaded.path).tokenizer  # as it was saved
    assert said.encode("alá tɔɔ lá") == loaded.tokenizer.encode("alá tɔɔ lá")
    assert said.hash == loaded.tokenizer.hash


def test_its_own_test_set(loaded, lines):
    """Most lines come out to the letter; what differs are tones that the Latin text leaves open."""
    some = lines[::40][:60]
    answers = generate(loaded, [latin for latin, _ in some], max_tokens=160)
    letters = [_alike(answer.text, nko) for answer, (_, nko) in zip(answers, some, strict=True)]
    exact = sum(answer.text == nko for answer, (_, nko) in zip(answers, some, strict=True))
    assert sum(letters) / len(letters) > 0.97
    assert exact / len(some) > 0.5


@pytest.mark.slow
def test_beam_search_on_its_test_set(loaded, lines):
    some = lines[::40][:60]
    answers = generate(loaded, [latin for latin, _ in some], strategy=Beam(5), max_tokens=160)
    assert sum(_alike(answer.text, nko) for answer, (_, nko) in zip(answers, some, strict=True)) / len(some) > 0.97


def _alike(one: str, two: str) -> float:
    """1 - edit distance / length."""
    row = list(range(len(two) + 1))
    for i, a in enumerate(one, 1):
        row, before = [i], row
        for j, b in enumerate(two, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return 1 - row[-1] / max(len(one), len(two), 1)
