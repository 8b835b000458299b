"""headwater show: a model as a tree with shapes, parameters and formulas, and what it costs. Nothing is allocated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.cli.language import say
from headwater.errors import BadSetting

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.inspection.costs import Count
    from headwater.inspection.counts import Node


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = say("a preset (none: they are listed) or a file with a spec", "预设名（不写则列出全部）或模型描述文件")
    length = say("tokens a row (1024, or as many as it has places)", "每行长度（1024，或位置表的上限）")
    add("model", metavar="MODEL", nargs="?", help=model)
    add("--vocab", type=int, metavar="N", help=say("another vocabulary", "改用别的词表大小"))
    add("--batch", type=int, default=1, metavar="B", help=say("rows at a time (1)", "批大小（1）"))
    add("--length", type=int, metavar="L", help=length)
    add("--dtype", default="fp32", metavar="fp32|bf16|fp16", help=say("numbers (fp32)", "数值类型（fp32）"))
    add("--depth", type=int, metavar="N", help=say("levels of the tree (all)", "树的层数（全部）"))
    add("--json", action="store_true", help=say("the same as JSON", "以 JSON 输出"))


def run(args: argparse.Namespace) -> int:
    from headwater.inspection.costs import count
    from headwater.inspection.resolve import resolve

    if args.model is None:
        return listing(args.json)
    if args.depth is not None and args.depth < 0:
        raise BadSetting(f"--depth must be at least 0, got {args.depth}; 0 shows the totals alone")
    spec = resolve(args.model, args.vocab)
    counted = count(spec, args.batch, args.length, args.dtype)
    if args.json:
        print(json.dumps({"model": args.model, **counted.plain()}, indent=2, ensure_ascii=False))
    else:
        show(args.model, counted, args.depth)
    return 0


def listing(as_json: bool) -> int:
    """All presets with their sizes."""
    from headwater.core.presets import PRESETS, preset
    from headwater.inspection.counts import skeleton, total

    sizes = {name: total(skeleton(preset(name))) for name in PRESETS}
    if as_json:
        print(json.dumps(sizes, indent=2))
        return 0
    for name, size in sizes.items():
        print(f"{name:<14}{size:>19,}")
    return 0


# -------------------------------------------------------------------------------------------------------- in a terminal


def show(name: str, counted: Count, depth: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(say("part", "部件"), no_wrap=True)
    table.add_column(say("parameters", "参数量"), justify="right", no_wrap=True)
    table.add_column(say("shape, or formula for one", "形状，或单个的公式"), overflow="fold")
    for branch, node in branches(counted.tree, depth):
        repeated = f" [bold]×{node.times}[/bold]" if node.times > 1 else ""
        table.add_row(f"[dim]{branch}[/dim]{node.name if branch else name}{repeated}", parameters(node), detail(node))
    console.print(table)
    console.print(f"[dim]{letters(counted)}[/dim]\n")
    sums(console, counted)


def branches(
    node: Node, depth: int | None, lead: str = "", mark: str = "", level: int = 0
) -> Iterator[tuple[str, Node]]:
    """Each node with the lines that lead to it."""
    yield lead + mark, node
    if depth is not None and level >= depth:
        return
    inner = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[mark]
    for at, child in enumerate(node.children):
        last = at == len(node.children) - 1
        yield from branches(child, depth, inner, "└─ " if last else "├─ ", level + 1)


def parameters(node: Node) -> str:
    return f"{node.parameters:,}" if node.parameters or not node.same_as else ""


def detail(node: Node) -> str:
    shapes = " + ".join("×".join(map(str, shape)) for shape in node.shapes)
    shared = f"= {node.same_as}" if node.same_as else ""
    return "  ".join(text for text in (shapes or node.formula, shared) if text)


def letters(counted: Count) -> str:
    return " · ".join(f"{name} {'/'.join(f'{size:,}' for size in sizes)}" for name, sizes in counted.letters.items())


GROUPS = {
    "embeddings": ("embeddings", "嵌入"),
    "encoder": ("encoder", "编码器"),
    "decoder": ("decoder", "解码器"),
    "output": ("output", "输出"),
    "other": ("other", "其他"),
}
MEMORY = {
    "weights": ("weights", "权重"),
    "gradients": ("gradients", "梯度"),
    "optimiser": ("optimiser (AdamW)", "优化器（AdamW）"),
    "activations": ("activations (estimate)", "激活值（估计）"),
    "kv cache": ("KV cache", "KV 缓存"),
}


def sums(console: Console, counted: Count) -> None:
    from rich.table import Table

    at, total = counted.at, counted.parameters
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    grid.add_row(f"[bold]{say('parameters', '参数量')}[/bold]", f"[bold]{total:,}[/bold]", "")
    for name, number in counted.groups.items():
        grid.add_row("  " + say(*GROUPS[name]), f"{number:,}", f"{number / max(total, 1):.1%}")
    where = say(
        f"batch {at['batch']}, length {at['length']}, {at['dtype']}",
        f"批 {at['batch']}，长 {at['length']}，{at['dtype']}",
    )
    grid.add_row(f"[bold]{say('memory', '内存')}[/bold]", "", where)
    for name, number in counted.bytes.items():
        grid.add_row("  " + say(*MEMORY[name]), size(number), "")
    grid.add_row(
        f"[bold]{say('operations', '运算量')}[/bold]", "", say("floating point, per token", "每个词元的浮点运算")
    )
    for name, words in {"forward": ("forward", "前向"), "training": ("training", "训练")}.items():
        grid.add_row("  " + say(*words), size(counted.flops[name], "FLOP"), "")
    console.print(grid)


def size(number: float, unit: str = "B") -> str:
    """1234567 -> 1.23 MB"""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.3g} P{unit}"
