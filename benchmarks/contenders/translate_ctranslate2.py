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
from translate_workload import BEAM, TOKENS, serve

model_folder, kind = Path(sys.argv[1]), sys.argv[2]
config = json.loads((model_folder / "config.json").read_text())
weights = load_file(model_folder / "model.safetensors")
D_MODEL, VOCAB = config["d_model"], config["vocab_size"]


def linear(spec, *names: str) -> None:
    """Several linear layers of one input are concatenated."""
    spec.weight = np.concatenate([weights[f"{name}.weight"] for name in names])
    spec.bias = np.concatenate([weights[f"{name}.bias"] for name in names])


def norm(spec, name: str) -> None:
    spec.gamma, spec.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def sinusoids(length: int = 512) -> np.ndarray:
    """Marian's sinusoidal positions: sines in the first half, cosines in the second."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, D_MODEL, 2) / D_MODEL)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def fill(stack, side: str) -> None:
    stack.position_encodings.encodings = sinusoids()
    for index, layer in enumerate(stack.layer):
        prefix = f"model.{side}.layers.{index}"
        linear(layer.self_attention.linear[0], *(f"{prefix}.self_attn.{part}_proj" for part in "qkv"))
        linear(layer.self_attention.linear[1], f"{prefix}.self_attn.out_proj")
        norm(layer.self_attention.layer_norm, f"{prefix}.self_attn_layer_norm")
        if hasattr(layer, "attention"):
            linear(layer.attention.linear[0], f"{prefix}.encoder_attn.q_proj")
            linear(layer.attention.linear[1], *(f"{prefix}.encoder_attn.{part}_proj" for part in "kv"))
            linear(layer.attention.linear[2], f"{prefix}.encoder_attn.out_proj")
            norm(layer.attention.layer_norm, f"{prefix}.encoder_attn_layer_norm")
        linear(layer.ffn.linear_0, f"{prefix}.fc1")
        linear(layer.ffn.linear_1, f"{prefix}.fc2")
        norm(layer.ffn.layer_norm, f"{prefix}.final_layer_norm")


sizes = (config["encoder_layers"], config["decoder_layers"])
spec = TransformerSpec.from_config(sizes, config["encoder_attention_heads"], pre_norm=False)
fill(spec.encoder, "encoder")
fill(spec.decoder, "decoder")
for part in (spec.encoder.embeddings[0], spec.decoder.embeddings, spec.decoder.projection):
    part.weight = weights["model.shared.weight"]
spec.decoder.projection.bias = weights["final_logits_bias"][0]
vocabulary = ["<unk>", "<s>", "</s>", *map(str, range(3, VOCAB))]
spec.register_source_vocabulary(vocabulary)
spec.register_target_vocabulary(vocabulary)
spec.validate()
spec.optimize(quantization=kind)
with tempfile.TemporaryDirectory() as folder:
    spec.save(folder)
    threads = int(os.environ["OMP_NUM_THREADS"])
    model = ctranslate2.Translator(folder, compute_type=kind, inter_threads=1, intra_threads=threads)


def translate(sentences: list[list[int]]) -> list[list[int]]:
    source_tokens = [[vocabulary[i] for i in one] for one in sentences]
    fixed_length = {"min_decoding_length": TOKENS, "max_decoding_length": TOKENS}
    results = model.translate_batch(source_tokens, beam_size=BEAM, **fixed_length)
    return [[int(word) if word.isdigit() else vocabulary.index(word) for word in one.hypotheses[0]] for one in results]


def score(sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
    source_tokens, target_tokens = ([[vocabulary[i] for i in one] for one in side] for side in (sources, targets))
    return [one.log_probs[:TOKENS] for one in model.score_batch(source_tokens, target_tokens)]


serve(translate, score)
