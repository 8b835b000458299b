"""SmolLM2 in CTranslate2: the same weights dequantized to float32, from a public folder; float32 or int8."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerDecoderModelSpec
from ctranslate2.specs.common_spec import Activation
from decode_workload import NEW, prompt, rates, serve
from safetensors.numpy import load_file

model_folder, kind = Path(sys.argv[1]), sys.argv[2]
config = json.loads((model_folder / "config.json").read_text())
weights = {name: array for file in model_folder.glob("*.safetensors") for name, array in load_file(file).items()}


def spec() -> TransformerDecoderModelSpec:
    model_spec = TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"], config["num_attention_heads"], activation=Activation.SWISH, ffn_glu=True,
        rms_norm=True, rotary_dim=0, rotary_interleave=False, rotary_base=config.get("rope_theta", 10_000.0),
        num_heads_kv=config["num_key_value_heads"],
    )  # fmt: skip
    stack = model_spec.decoder
    stack.scale_embeddings = False
    stack.embeddings.weight = stack.projection.weight = weights["model.embed_tokens.weight"]
    stack.layer_norm.gamma = weights["model.norm.weight"]
    for index, layer in enumerate(stack.layer):
        fill(layer, {name.removeprefix(f"model.layers.{index}."): array for name, array in weights.items()})
    words = [str(i) for i in range(config["vocab_size"])]
    model_spec.config.bos_token = model_spec.config.eos_token = model_spec.config.unk_token = words[0]
    model_spec.register_vocabulary(words)
    model_spec.validate()
    model_spec.optimize(quantization=kind)
    return model_spec


def fill(layer, layer_weights: dict[str, np.ndarray]) -> None:
    attention, ffn = layer.self_attention, layer.ffn
    attention.layer_norm.gamma = layer_weights["input_layernorm.weight"]
    attention.linear[0].weight = np.concatenate([layer_weights[f"self_attn.{part}_proj.weight"] for part in "qkv"])
    attention.linear[1].weight = layer_weights["self_attn.o_proj.weight"]
    ffn.layer_norm.gamma = layer_weights["post_attention_layernorm.weight"]
    ffn.linear_0.weight = layer_weights["mlp.gate_proj.weight"]
    ffn.linear_0_noact.weight = layer_weights["mlp.up_proj.weight"]
    ffn.linear_1.weight = layer_weights["mlp.down_proj.weight"]


threads = int(os.environ["OMP_NUM_THREADS"])
with tempfile.TemporaryDirectory() as folder:
    spec().save(folder)
    model = ctranslate2.Generator(folder, compute_type=kind, inter_threads=1, intra_threads=threads)
words = [str(i) for i in prompt()]


def write(tokens: int) -> tuple[list[int], float]:
    start = time.perf_counter()
    fixed_length = {"min_length": tokens, "max_length": tokens, "include_prompt_in_result": False}
    (result,) = model.generate_batch([words], sampling_topk=1, **fixed_length)
    return result.sequences_ids[0], time.perf_counter() - start


def once() -> tuple[list[int], dict[str, float]]:
    (_, first), (tokens, total) = write(1), write(NEW)
    return tokens, rates(first, total - first)


(scores,) = model.score_batch([words])
serve(once, {"prefill": list(scores.log_probs)})
