"""Translation in Headwater: the weights of a folder, in float32 or packed."""

import os
import sys

import torch
from translate_work import BEAM, TOKENS, serve

import headwater
from headwater.generation.api import TextModel
from headwater.generation.beam import Beam
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.quantization.layers import quantize

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = headwater.load(sys.argv[1]).model
if sys.argv[2] != "float32":
    quantize(model, sys.argv[2])
voice = TextModel(model, decoder_start_id=1)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    return [list(one.ids) for one in headwater.generate(voice, sentences, strategy=Beam(BEAM), max_tokens=TOKENS)]


def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """Token by token for all sentences, by the step that is timed."""
    slots = BatchKVCache(model, range(len(sources)))
    encode_sources(model, slots, sources)
    columns = zip(*targets, strict=True)
    before, found = [1] * len(sources), []
    for column in columns:
        scores = forward_last(model, slots, [[token] for token in before]).log_softmax(-1)
        found.append([float(row[token]) for row, token in zip(scores, column, strict=True)])
        before = list(column)
    return [list(row) for row in zip(*found, strict=True)]


serve(translate, score)
