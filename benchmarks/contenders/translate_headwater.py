"""Translation in Headwater: the weights of a folder, in float32 or quantized."""

import os
import sys

import torch
from translate_workload import BEAM, TOKENS, serve

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
text_model = TextModel(model, decoder_start_id=1)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    return [list(one.ids) for one in headwater.generate(text_model, sentences, strategy=Beam(BEAM), max_tokens=TOKENS)]


def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the targets, token by token for all sentences, by the timed step."""
    cache = BatchKVCache(model, range(len(sources)))
    encode_sources(model, cache, sources)
    columns = zip(*targets, strict=True)
    last_tokens, logprobs = [1] * len(sources), []
    for column in columns:
        step_logprobs = forward_last(model, cache, [[token] for token in last_tokens]).log_softmax(-1)
        logprobs.append([float(row[token]) for row, token in zip(step_logprobs, column, strict=True)])
        last_tokens = list(column)
    return [list(row) for row in zip(*logprobs, strict=True)]


serve(translate, score)
