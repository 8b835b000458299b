"""Time from process start to the first logits, import included: Headwater and transformers on the same folders.

    python benchmarks/load.py [--rounds 5] [--threads 2]

A LLaMA of the size of SmolLM2-135M with random weights (float32 and bfloat16), and MiniLM if it is installed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from correctness import end_if_wrong
from side_by_side import Contender, compare, finish

from headwater.errors import Unavailable
from headwater.families import FAMILIES
from headwater.families.hf_folder import transform_sizes
from headwater.families.hub import find_installed
from headwater.weights.hf_config import HFConfig
from headwater.weights.safetensors import write_safetensors

SMOLLM2 = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


def random_folder(folder: Path, dtype: torch.dtype) -> Path:
    folder.mkdir()
    family = FAMILIES["llama"]
    spec = family.read_spec(HFConfig(dict(SMOLLM2)), "language")
    names = family.body_names + family.head_names["language"]
    tensors = names.export(dict(spec.build(seed=0).named_parameters()), **transform_sizes(spec))
    write_safetensors(folder / "model.safetensors", {name: tensors[name].detach().to(dtype) for name in tensors})
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {
            "llama_float32": random_folder(Path(scratch) / "float32", torch.float32),
            "llama_bfloat16": random_folder(Path(scratch) / "bfloat16", torch.bfloat16),
        }
        try:
            folders["minilm"] = find_installed("minilm")
        except Unavailable as reason:
            print(f"minilm is skipped: {reason}")
        for name, folder in folders.items():
            contenders = [
                Contender(library, "load_fresh.py", (f"load_{library}.py", str(folder)))
                for library in ("headwater", "transformers")
            ]
            print(f"\n{name}\n")
            report = compare(contenders, args.rounds, args.threads)
            ours, theirs = (float(report["facts"][library]["output"]) for library in ("headwater", "transformers"))
            if abs(ours - theirs) > 0.02 * abs(theirs):
                report["wrong"] = {"headwater": f"its largest logit is {ours}, that of transformers {theirs}"}
            finish(report, "headwater", f"load_{name}")
            end_if_wrong(report, "headwater")


if __name__ == "__main__":
    main()
