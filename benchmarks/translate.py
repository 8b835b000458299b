"""Translation with the base model of 2017, beam 4: Headwater compared with CTranslate2 and transformers.

    python benchmarks/translate.py [--threads 2] [--rounds 5] [--without transformers]

6 + 6 layers, d_model 512, vocabulary 32,000, 30 input and 30 output tokens; batches of 1 and of 32. All have the same
random weights, in a Marian folder; the number of equal translations is reported. make bench installs the peers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from correctness import EXACT, end_if_wrong, judge
from side_by_side import BENCH_PYTHON, Contender, compare, table, write

from headwater.families.hf_folder import transform_sizes
from headwater.families.registry import FAMILIES
from headwater.weights.hf_config import HFConfig
from headwater.weights.safetensors import write_safetensors as write_tensors

FIRST, REFERENCE = "headwater int8", "transformers float32"
D_MODEL, LAYERS, VOCAB = 512, 6, 32_000
SIDE = {"layers": LAYERS, "attention_heads": 8, "ffn_dim": 2048}
CONFIG = {
    "model_type": "marian", "architectures": ["MarianMTModel"], "vocab_size": VOCAB, "d_model": D_MODEL,
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIDE.items()},
    "scale_embedding": True, "activation_function": "relu", "max_position_embeddings": 512,
    "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def random_folder(folder: Path) -> Path:
    """A random model whose matrices have unit gain, so that its predictions are well separated."""
    family, generator = FAMILIES["marian"], torch.Generator().manual_seed(0)
    spec = family.read_spec(HFConfig(dict(CONFIG)), "language")
    model = spec.build(seed=0)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() == 2):
            weight.normal_(0, D_MODEL**-0.5, generator=generator)
    tensors = (family.body_names + family.head_names["language"]).export(
        dict(model.named_parameters()), **transform_sizes(spec)
    )
    write_tensors(folder / "model.safetensors", {name: tensors[name].detach() for name in tensors})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def agreement(report: dict, reference: str) -> str:
    """The number of translations that equal those of the reference."""
    translations = {name: facts["translations"] for name, facts in report["facts"].items()}
    if reference not in translations:
        return ""
    lines = [f"\n| translations as {reference} | the same |", "|---|---|"]
    for name, ours in translations.items():
        same = report["facts"][name]["same"] = sum(a == b for a, b in zip(ours, translations[reference], strict=True))
        lines.append(f"| {name} | {same} of {len(ours)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(random_folder(Path(scratch)))
        contenders = [
            Contender(FIRST, "translate_headwater.py", (folder, "int8")),
            Contender("headwater float32", "translate_headwater.py", (folder, "float32")),
            Contender("CTranslate2 int8", "translate_ctranslate2.py", (folder, "int8"), BENCH_PYTHON),
            Contender("CTranslate2 float32", "translate_ctranslate2.py", (folder, "float32"), BENCH_PYTHON),
            Contender(REFERENCE, "translate_transformers.py", (folder,)),
        ]
        selected = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        report = compare(selected, args.rounds, args.threads)
    distances = judge(report, REFERENCE, {name: EXACT for name in report["facts"] if "float32" in name})
    text = agreement(report, REFERENCE) + "\n" + distances
    write(report, table(report, FIRST) + "\n" + text, "translate")
    end_if_wrong(report, FIRST)


if __name__ == "__main__":
    main()
