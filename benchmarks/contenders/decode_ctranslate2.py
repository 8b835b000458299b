"""SmolLM2 in CTranslate2: the same weights widened to float32, read from a public folder; float32 or int8."""

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
from decode_work import NEW, prompt, rates, serve
from safetensors.numpy import load_file

given, kind = Path(sys.argv[1]), sys.argv[2]
config = json.loads((given / "config.json").read_text())
weights = {name: array for file in given.glob("*.safetensors") for name, array in load_file(file).items()}


def spec() -> TransformerDecoderModelSpec:
    made = TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"], config["num_attention_heads"], activation=Activation.SWISH, ffn_glu=True,
        rms_norm=True, rotary_dim=0, rotary_interleave=False, rotary_base=config.get("rope_theta", 10_000.0),
        num_heads_kv=config["num_key_value_heads"],
    )  # fmt: skip
    stack = made.decoder
    stack.scale_embeddings = False
    stack.embeddings.weight = stack.projection.weight = weights["model.embed_tokens.weight"]
    stack.layer_norm.gamma = weights["model.norm.weight"]
    for index, layer in enumerate(stack.layer):
        fill(layer, {name.removeprefix(f"model.layers.{index}."): array for name, array in weights.items()})
    words = [str(i) for i in range(config["vocab_size"])]
    made.config.bos_token = made.config.eos_token = made.config.unk_token = words[0]
    made.register_vocabulary(words)
    made.validate()
    made.optimize(quantization=kind)
    return made


def fill(layer, own: dict[str, np.ndarray]) -> None:
    attention, ffn = layer.self_attention, layer.ffn
    attention.layer_norm.gamma = own["input_layernorm.weight"]
    attention.linear[0].weight = np.concatenate([own[f"self_attn.{part}_proj.weight"] for part in "qkv"])
    attention.linear[1].weight = own["self_attn.o_proj.weight"]
    ffn.layer_norm.gamma = own["post_attention_layernorm.weight"]
    ffn.linear_0.weight = own["mlp.gate_proj.weight"]
    ffn.linear_0_noact.weight = own["mlp.up_proj.weight"]
    ffn.linear_1.weight = own["mlp.down_proj.weight"]


threads = int(os.environ["OMP_NUM_THREADS"])
with tempfile.TemporaryDirectory() as folder:
    spec().save(folder)
    model = ctranslate2.Generator(folder, compute_type=kind, inter_threads=1, intra_threads=threads)
words = [str(i) for i in prompt()]


def write(tokens: int) -> tuple[list[int], float]:
    begun = time.perf_counter()
    pinned = {"min_length": tokens, "max_length": tokens, "include_prompt_in_result": False}
    (found,) = model.generate_batch([words], sampling_topk=1, **pinned)
    return found.sequences_ids[0], time.perf_counter() - begun


def once() -> tuple[list[int], dict[str, float]]:
    (_, first), (tokens, whole) = write(1), write(NEW)
    return tokens, rates(first, whole - first)


(scored,) = model.score_batch([words])
serve(once, {"reading": list(scored.log_probs)})
