"""The command headwater show: the module tree of a model with shapes, parameters and costs, without allocating it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from headwater.errors import BadSetting
from headwater.i18n import _

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.inspection.attention_costs import AttentionCost
    from headwater.inspection.costs import ModelCosts, ModuleNode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = _("a preset (none: list them all) or a spec file")
    length = _("tokens per row (1024, or the number of positions); compares every attention at that length")
    add("model", metavar="MODEL", nargs="?", help=model)
    add("--vocab", type=int, metavar="N", help=_("vocabulary size"))
    add("--batch", type=int, default=1, metavar="B", help=_("batch size (1)"))
    add("--length", type=int, metavar="L", help=length)
    add("--dtype", default="fp32", metavar="fp32|bf16|fp16", help=_("data type (fp32)"))
    add("--depth", type=int, metavar="N", help=_("levels of the tree (all)"))
    add("--json", action="store_true", help=_("the same as JSON"))


def run(args: argparse.Namespace) -> int:
    from headwater.inspection.attention_costs import compare_attentions
    from headwater.inspection.costs import ELEMENT_SIZES, count, meta_model
    from headwater.inspection.inputs import resolve_spec

    if args.model is None:
        return print_presets(args.json)
    if args.depth is not None and args.depth < 0:
        raise BadSetting(_("--depth must be at least 0, got {depth}; 0 shows only the totals", depth=args.depth))
    spec = resolve_spec(args.model, args.vocab)
    costs = count(spec, args.batch, args.length, args.dtype)
    attentions = compare_attentions(meta_model(spec), args.length) if args.length else []
    if args.json:
        compared = {"attentions": [asdict(each) for each in attentions]} if attentions else {}
        print(json.dumps({"model": args.model, **costs.to_dict(), **compared}, indent=2, ensure_ascii=False))
        return 0
    print_tree(args.model, costs, args.depth)
    if attentions:
        print_attentions(attentions, args.length, ELEMENT_SIZES[args.dtype])
    return 0


def print_presets(as_json: bool) -> int:
    """Print all presets with their numbers of parameters."""
    from headwater.families.presets import PRESETS, preset
    from headwater.inspection.costs import meta_model, num_parameters

    sizes = {name: num_parameters(meta_model(preset(name))) for name in PRESETS}
    if as_json:
        print(json.dumps(sizes, indent=2))
        return 0
    for name, size in sizes.items():
        print(f"{name:<14}{size:>19,}")
    return 0


# -------------------------------------------------------------------------------------------------------- in a terminal


def print_tree(name: str, costs: ModelCosts, depth: int | None) -> None:
    """Print the module tree with parameters and shapes, then the totals."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(str(_("module")), no_wrap=True)
    table.add_column(str(_("parameters")), justify="right", no_wrap=True)
    table.add_column(str(_("shape, or formula of one")), overflow="fold")
    for branch, node in tree_lines(costs.tree, depth):
        repeated = f" [bold]×{node.repeats}[/bold]" if node.repeats > 1 else ""
        table.add_row(
            f"[dim]{branch}[/dim]{node.name if branch else name}{repeated}",
            format_parameters(node),
            format_detail(node),
        )
    console.print(table)
    console.print(f"[dim]{format_symbols(costs)}[/dim]\n")
    print_totals(console, costs)


def tree_lines(
    node: ModuleNode, depth: int | None, indent: str = "", branch: str = "", level: int = 0
) -> Iterator[tuple[str, ModuleNode]]:
    """Each node of the tree with its indentation and branch lines."""
    yield indent + branch, node
    if depth is not None and level >= depth:
        return
    inner = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield from tree_lines(child, depth, inner, "└─ " if last else "├─ ", level + 1)


def format_parameters(node: ModuleNode) -> str:
    return f"{node.parameters:,}" if node.parameters or not node.tied_to else ""


def format_detail(node: ModuleNode) -> str:
    shapes = " + ".join("×".join(map(str, shape)) for shape in node.shapes)
    shared = f"= {node.tied_to}" if node.tied_to else ""
    return "  ".join(str(text) for text in (shapes or node.formula, shared) if text)


def format_symbols(costs: ModelCosts) -> str:
    return " · ".join(f"{name} {'/'.join(f'{size:,}' for size in sizes)}" for name, sizes in costs.symbols.items())


GROUPS = {
    "embeddings": _("embeddings"),
    "encoder": _("encoder"),
    "decoder": _("decoder"),
    "output": _("output"),
    "other": _("other"),
}
MEMORY = {
    "weights": _("weights"),
    "gradients": _("gradients"),
    "optimizer": _("optimizer (AdamW)"),
    "activations": _("activations (estimate)"),
    "kv_cache": _("KV cache"),
}


def print_totals(console: Console, costs: ModelCosts) -> None:
    """Print the totals: parameters by group, memory and FLOPs."""
    from rich.table import Table

    settings = costs.settings
    total = costs.parameters
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    grid.add_row(f"[bold]{_('parameters')}[/bold]", f"[bold]{total:,}[/bold]", "")
    for name, number in costs.groups.items():
        grid.add_row("  " + str(GROUPS[name]), f"{number:,}", f"{number / max(total, 1):.1%}")
    where = _(
        "batch {batch}, length {length}, {dtype}",
        batch=settings["batch"],
        length=settings["length"],
        dtype=settings["dtype"],
    )
    grid.add_row(f"[bold]{_('memory')}[/bold]", "", str(where))
    for name, number in costs.bytes.items():
        grid.add_row("  " + str(MEMORY[name]), format_size(number), "")
    grid.add_row(f"[bold]{_('operations')}[/bold]", "", str(_("floating point, per token")))
    for name, words in {"forward": _("forward"), "training": _("training")}.items():
        grid.add_row("  " + str(words), format_size(costs.flops[name], "FLOP"), "")
    console.print(grid)


def print_attentions(attentions: list[AttentionCost], length: int, element_size: int) -> None:
    """Print what each attention would cost in one layer at this length."""
    from rich.console import Console
    from rich.table import Table

    title = _("one layer of another attention at length {length} (--attention)", length=f"{length:,}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left")
    table.add_column(str(_("attention")), no_wrap=True)
    table.add_column(str(_("keys per query")), no_wrap=True)
    for column in ("", _("forward"), _("KV cache")):
        table.add_column(str(column), justify="right", no_wrap=True)
    for each in attentions:
        if each.keys is None or each.flops is None:
            table.add_row(each.name, each.formula, "", str(_("not here")), "")
            continue
        kept = format_size(each.cached * element_size) if each.cached is not None else str(_("no cache"))
        table.add_row(each.name, each.formula, f"{each.keys:,}", format_size(each.flops, "FLOP"), kept)
    console = Console(highlight=False)
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def format_size(number: float, unit: str = "B") -> str:
    """1234567 -> 1.23 MB"""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:,.3g} P{unit}"
