"""What fewer bits cost: the perplexity of SmolLM2-135M on a fixed text, float32 (its file widened), int8 and int4.

    python benchmarks/bits.py [--text FILE] [--tokens 8192]

The text is the beginning of wikitext-2's test part where ../shared/data has it. Bars: int8 within 1 %, int4 within 5 %.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from pathlib import Path

import torch
from side_by_side import HERE
from torch import nn
from torch.nn import functional as F

import headwater
from headwater.fast.packed import Packed, PackedTable, pack, put

TEXT = HERE.parent.parent / "shared" / "data" / "wikitext2_valid_test" / "test.txt.gz"
WINDOW = 512
BARS = {"int8": 0.01, "int4": 0.05}


def widen(model: nn.Module) -> None:
    """Every packed layer as a plain one."""
    tables: dict[int, nn.Parameter] = {}
    for path, module in [(path, m) for path, m in model.named_modules() if isinstance(m, Packed)]:
        weight = tables.setdefault(module.blocks.data_ptr(), nn.Parameter(module.weight))
        if isinstance(module, PackedTable):
            plain: nn.Module = nn.Embedding(*weight.shape, device="meta")
        else:
            plain = nn.Linear(module.columns, module.rows, bias=module.bias is not None, device="meta")
            plain.bias = module.bias
        plain.weight = weight
        put(model, path, plain)


@torch.inference_mode()
def perplexity(model: nn.Module, ids: torch.Tensor) -> float:
    """In windows that know nothing of one another."""
    total, count = 0.0, 0
    for window in ids.split(WINDOW):
        if len(window) > 1:
            total += F.cross_entropy(model(window[None])[0, :-1], window[1:], reduction="sum").item()
            count += len(window) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    if not args.text.exists():
        raise SystemExit(f"{args.text} is not there; give a text: --text FILE")
    opened = gzip.open if args.text.suffix == ".gz" else open
    with opened(args.text, "rt", encoding="utf-8") as file:
        text = file.read(8 * args.tokens)
    found, size = {}, {}
    for bits in ("float32", *BARS):
        loaded = headwater.load("smollm2")
        widen(loaded.model)
        if bits != "float32":
            pack(loaded.model, bits)
        ids = torch.tensor(loaded.tokenizer.encode(text)[: args.tokens])
        found[bits] = perplexity(loaded.model, ids)
        held = {t.data_ptr(): t.numel() * t.element_size() for t in loaded.model.state_dict().values()}
        size[bits] = sum(held.values()) / 1e6
    lines = ["| weights | MB | perplexity | change | bar |", "|---|---|---|---|---|"]
    for bits, value in found.items():
        bar = f"≤ {BARS[bits]:.0%}" if bits in BARS else ""
        lines.append(f"| {bits} | {size[bits]:.0f} | {value:.3f} | {value / found['float32'] - 1:+.2%} | {bar} |")
    told = "\n".join([*lines, f"\n{len(ids)} tokens of {args.text.name}, in windows of {WINDOW}."])
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "bits.md").write_text(told + "\n")
    (HERE / "results" / "bits.json").write_text(json.dumps({"tokens": len(ids), **found}, indent=1))
    print(told)


if __name__ == "__main__":
    main()
