"""Translation in Headwater: the weights of a folder, in float32 or packed."""

import os
import sys

import torch
from translate_work import BEAM, TOKENS, serve

import headwater
from headwater.fast.packed import pack
from headwater.generation.ask import Voice
from headwater.generation.beam import Beam
from headwater.generation.reading import listen, read
from headwater.generation.slots import Slots

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = headwater.load(sys.argv[1]).model
if sys.argv[2] != "float32":
    pack(model, sys.argv[2])
voice = Voice(model, start=1)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    return [list(one.ids) for one in headwater.generate(voice, sentences, by=Beam(BEAM), max_tokens=TOKENS)]


def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """Token by token for all sentences, by the step that is timed."""
    slots = Slots(model, range(len(sources)))
    listen(model, slots, sources)
    columns = zip(*targets, strict=True)
    before, found = [1] * len(sources), []
    for column in columns:
        scores = read(model, slots, [[token] for token in before]).log_softmax(-1)
        found.append([float(row[token]) for row, token in zip(scores, column, strict=True)])
        before = list(column)
    return [list(row) for row in zip(*found, strict=True)]


serve(translate, score)
