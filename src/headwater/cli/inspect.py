"""headwater inspect MODEL "text": see a model read: attention, heads, lens, surprise, gradients; with pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.cli import inputs, kernels
from headwater.cli.language import language, say
from headwater.cli.terminal import harmless
from headwater.errors import BadInput, BadSetting


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    told = say(
        "a folder, a run, a .gguf file or a known name (headwater models)",
        "模型文件夹、训练目录、.gguf 文件或已知名称（见 headwater models）",
    )
    add("model", metavar="MODEL", help=told)
    told = say(
        "what it shall read, or a file with it; for a translator, the source",
        "要读的文本，或存有文本的文件；翻译模型则为原文",
    )
    add("text", help=told)
    told = say("the text is a text, even if it looks like a file name", "当作文本，即使看起来像文件名")
    add("--as-text", action="store_true", help=told)
    told = say(
        "what it shall write, where it has a decoder beside an encoder (else it writes)",
        "要写出的文本（模型兼有编码器和解码器时）；不给则由模型自己写",
    )
    add("--to", metavar="TEXT", help=told)
    told = say(
        "looks, with commas: next, losses, heads, alignment, attention, lens, attribution, gradients, ablation, "
        "positions, costs (all but ablation)",
        "要看什么，用逗号分隔：next、losses、heads、alignment、attention、lens、attribution、gradients、ablation、positions、costs"
        "（默认除 ablation 外全部）",
    )
    add("--what", metavar="LOOK,…", help=told)
    add("--layer", type=int, metavar="N", help=say("this layer alone, from 0", "只看这一层，从 0 数起"))
    add("--head", type=int, metavar="N", help=say("this head alone, from 0", "只看这个头，从 0 数起"))
    told = say(
        "encoder.self_attn, decoder.self_attn or decoder.cross_attn",
        "哪一种注意力：encoder.self_attn、decoder.self_attn 或 decoder.cross_attn",
    )
    add("--kind", metavar="KIND", help=told)
    told = say("write a report, pictures and data into this folder", "把报告、图片和数据写到这个文件夹")
    add("--out", metavar="DIR", help=told)
    add("--svg", action="store_true", help=say("pictures as SVG", "图片用 SVG"))
    add("--json", action="store_true", help=say("print everything as JSON", "以 JSON 输出全部结果"))


def run(args: argparse.Namespace) -> None:
    if args.head is not None and args.layer is None:
        raise BadSetting("inspect: --head needs --layer, got it alone; say which layer, from 0")
    from headwater.inspection.gathering import inspect

    what = [name.strip() for name in args.what.split(",")] if args.what else None
    model = opened(args.model)
    if model.tokenizer is None:
        raise BadInput(f"{args.model}: it has no tokenizer, so it reads no text; use headwater.inspect with token ids")
    text = inputs.prompt_of(args.text, args.as_text)
    kernels.note_missing()
    found = inspect(model, text, args.to, what=what, layer=args.layer, head=args.head, kind=args.kind)
    written = found.write(args.out, language(), "svg" if args.svg else "png") if args.out else []
    if args.json:
        print(json.dumps(found.to_plain(), ensure_ascii=False, allow_nan=False))
        return
    print(harmless("\n".join(summary(found))))
    for line in told(args.out, written):
        print(line)


def opened(name: str) -> Any:
    """A model of any kind, a run that was trained here among them."""
    from headwater.families.loading import find_model, load
    from headwater.weights.native import is_native

    path = find_model(name)
    if path.is_dir() and is_native(path):
        from headwater.training.use import load_run

        return load_run(path)
    return load(name)


def summary(found: Any) -> list[str]:
    size = f"{len(found.reading.source or found.reading.tokens)} {say('tokens read', '个词元')}"
    lines = [f"{found.name}{say(': ', '：')}{size}", ""]
    if found.reading.source:
        written = "".join(token.text for token in found.reading.follows if token.part == 1)
        lines += [f"{say('written: ', '写出：')}{written.strip()}", ""]
    made = found.lines() or [line for result in found.results.values() for line in result.lines()]
    lines += [say(line) for line in made]
    left = {name: why for name, why in found.missing.items() if "left out" in why}
    return lines + [f"{name}{say(': ', '：')}{say(why)}" for name, why in left.items()]


def told(folder: str | None, written: list[Path]) -> list[str]:
    if folder is None:
        return ["", say("--out DIR writes a report with pictures", "--out DIR 可写出带图的报告")]
    rest = len(written) - 1
    return [
        "",
        say(f"written: {written[0]} and {rest} more files beside it", f"已写出 {written[0]}，另有 {rest} 个文件"),
    ]
