"""Translation in CTranslate2: the weights of a folder (Marian's names), float32 or int8."""

import json
import os
import sys
import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec
from safetensors.numpy import load_file
from translate_work import BEAM, TOKENS, serve

given, kind = Path(sys.argv[1]), sys.argv[2]
config = json.loads((given / "config.json").read_text())
weights = load_file(given / "model.safetensors")
D_MODEL, VOCAB = config["d_model"], config["vocab_size"]


def linear(spec, *names: str) -> None:
    """Several layers that read the same become one."""
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def norm(spec, name: str) -> None:
    spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def waves(length: int = 512) -> np.ndarray:
    """Marian's positions: sines in the first half, cosines in the second."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, D_MODEL, 2) / D_MODEL)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def fill(stack, side: str) -> None:
    stack.position_encodings.encodings = waves()
    for index, layer in enumerate(stack.layer):
        own = f"model.{side}.layers.{index}"
        linear(layer.self_attention.linear[0], *(f"{own}.self_attn.{part}_proj" for part in "qkv"))
        linear(layer.self_attention.linear[1], f"{own}.self_attn.out_proj")
        norm(layer.self_attention.layer_norm, f"{own}.self_attn_layer_norm")
        if hasattr(layer, "attention"):
            linear(layer.attention.linear[0], f"{own}.encoder_attn.q_proj")
            linear(layer.attention.linear[1], *(f"{own}.encoder_attn.{part}_proj" for part in "kv"))
            linear(layer.attention.linear[2], f"{own}.encoder_attn.out_proj")
            norm(layer.attention.layer_norm, f"{own}.encoder_attn_layer_norm")
        linear(layer.ffn.linear_0, f"{own}.fc1")
        linear(layer.ffn.linear_1, f"{own}.fc2")
        norm(layer.ffn.layer_norm, f"{own}.final_layer_norm")


sizes = (config["encoder_layers"], config["decoder_layers"])
spec = TransformerSpec.from_config(sizes, config["encoder_attention_heads"], pre_norm=False)
fill(spec.encoder, "encoder")
fill(spec.decoder, "decoder")
for part in (spec.encoder.embeddings[0], spec.decoder.embeddings, spec.decoder.projection):
    part.weight = weights["model.shared.weight"]
spec.decoder.projection.bias = weights["final_logits_bias"][0]
words = ["<unk>", "<s>", "</s>", *map(str, range(3, VOCAB))]
spec.register_source_vocabulary(words)
spec.register_target_vocabulary(words)
spec.validate()
spec.optimize(quantization=kind)
with tempfile.TemporaryDirectory() as folder:
    spec.save(folder)
    threads = int(os.environ["OMP_NUM_THREADS"])
    model = ctranslate2.Translator(folder, compute_type=kind, inter_threads=1, intra_threads=threads)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    given = [[words[i] for i in one] for one in sentences]
    pinned = {"min_decoding_length": TOKENS, "max_decoding_length": TOKENS}
    found = model.translate_batch(given, beam_size=BEAM, **pinned)
    return [[int(word) if word.isdigit() else words.index(word) for word in one.hypotheses[0]] for one in found]


def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    given, wanted = ([[words[i] for i in one] for one in side] for side in (sources, targets))
    return [one.log_probs[:TOKENS] for one in model.score_batch(given, wanted)]


serve(translate, score)
