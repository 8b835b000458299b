"""Translation in CTranslate2: a model of the same shape, with weights that have learnt nothing, float32 or int8."""

import os
import sys
import tempfile

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from translate_work import BEAM, D_FF, D_MODEL, HEADS, LAYERS, TOKENS, VOCAB, serve

draw = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return (draw.standard_normal(shape) * D_MODEL**-0.5).astype(np.float32)


def linear(spec, outputs: int, inputs: int) -> None:
    spec.weight, spec.bias = random(outputs, inputs), np.zeros(outputs, np.float32)


def norm(spec) -> None:
    spec.gamma, spec.beta = np.ones(D_MODEL, np.float32), np.zeros(D_MODEL, np.float32)


def fill(stack) -> None:
    for layer in stack.layer:
        linear(layer.self_attention.linear[0], 3 * D_MODEL, D_MODEL)
        linear(layer.self_attention.linear[1], D_MODEL, D_MODEL)
        norm(layer.self_attention.layer_norm)
        if hasattr(layer, "attention"):
            for part, outputs in zip(layer.attention.linear, (D_MODEL, 2 * D_MODEL, D_MODEL), strict=True):
                linear(part, outputs, D_MODEL)
            norm(layer.attention.layer_norm)
        linear(layer.ffn.linear_0, D_FF, D_MODEL)
        linear(layer.ffn.linear_1, D_MODEL, D_FF)
        norm(layer.ffn.layer_norm)


spec = TransformerSpec.from_config((LAYERS, LAYERS), HEADS, pre_norm=False)
fill(spec.encoder)
fill(spec.decoder)
table = random(VOCAB, D_MODEL)
for part in (spec.encoder.embeddings[0], spec.decoder.embeddings):
    part.weight = table
linear(spec.decoder.projection, VOCAB, D_MODEL)
spec.decoder.projection.weight = table
words = ["<unk>", "<s>", "</s>", *map(str, range(3, VOCAB))]
spec.register_source_vocabulary(words)
spec.register_target_vocabulary(words)
spec.validate()
spec.optimize(quantization=sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    spec.save(folder)
    threads = int(os.environ["OMP_NUM_THREADS"])
    model = ctranslate2.Translator(folder, compute_type=sys.argv[1], inter_threads=1, intra_threads=threads)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    given = [[words[i] for i in one] for one in sentences]
    pinned = {"min_decoding_length": TOKENS, "max_decoding_length": TOKENS}
    found = model.translate_batch(given, beam_size=BEAM, **pinned)
    return [[int(word) if word.isdigit() else 0 for word in one.hypotheses[0]] for one in found]


serve(translate)
