"""headwater check: does a model keep the laws? If not: which module, which places, how much; and exit code 8."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.language import language, say
from headwater.errors import BadFile, BadSetting, CheckFailed, Fault, NotFound, nearest

if TYPE_CHECKING:
    from torch import nn

    from headwater.inspection.report import Report


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = say(
        "a preset, a model (folder, run, .gguf, known name), a spec file, or file.py:name of an nn.Module "
        "or of what makes one (the file is run)",
        "预设名、模型（目录、run、.gguf、已知名字）、描述文件，或 file.py:NAME（nn.Module 或构造它的类、函数；"
        "文件会被运行）",
    )
    sides = say("where rows may be padded (both)", "在哪边填充（both）")
    add("model", metavar="MODEL", help=model)
    add("--vocab", type=int, metavar="N", help=say("the number of tokens", "词表大小"))
    add("--length", type=int, metavar="L", help=say("tokens a row", "每行词元数"))
    add("--probes", type=int, default=4, metavar="N", help=say("places to change in a row (4)", "每行改动几处（4）"))
    add("--seed", type=int, default=0, metavar="N", help=say("for tokens and first weights (0)", "随机种子（0）"))
    add("--only", metavar="LAW,…", help=say("these laws alone", "只查这些规则"))
    add("--pad", choices=("left", "right", "both"), default="both", help=sides)
    add("--two-way", action="store_true", help=say("a place may see later ones", "允许看到后面的位置"))
    add("--json", action="store_true", help=say("the report as JSON", "以 JSON 输出"))


def run(args: argparse.Namespace) -> int:
    from headwater.inspection.check import LAWS, SIDES, check

    report = check(
        found(args.model, args.vocab, args.seed),
        vocab=args.vocab,
        causal=False if args.two_way else None,
        length=args.length,
        probes=args.probes,
        seed=args.seed,
        sides=SIDES if args.pad == "both" else [args.pad],
        only=[law.strip() for law in args.only.split(",")] if args.only else LAWS,
    )
    if args.json:
        print(json.dumps(report.plain(), indent=2, ensure_ascii=False))
    else:
        show(report)
    return 0 if report.ok else CheckFailed.exit_code


def found(name: str, vocab: int | None, seed: int) -> nn.Module:
    """The model a user names. Presets too large for any probe on this machine are refused before they are built."""
    from headwater.families.known import KNOWN
    from headwater.families.loading import load
    from headwater.inspection.counts import skeleton, total
    from headwater.inspection.machine import memory
    from headwater.inspection.resolve import resolve

    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return from_file(Path(file), attribute)
    if name.endswith(".py"):
        raise BadSetting(f"{name}: say which model of the file is meant, got none; {name}:NAME")
    if name in KNOWN or Path(name).is_dir() or name.endswith(".gguf"):
        return load(name).model
    spec = resolve(name, vocab)
    needed, free = 8 * total(skeleton(spec)) / 1e9, memory()[1]  # fp32 weights, and their gradients for one law
    if free is not None and needed > free:
        raise BadSetting(f"{name}: it needs {needed:.1f} GB to be checked, {free:.1f} are free; try a smaller one")
    return spec.build(seed=seed)


def from_file(path: Path, attribute: str) -> nn.Module:
    """Run a user's own file and take the model from it: an nn.Module, or a class or function that makes one."""
    from torch import nn

    if not path.is_file():
        raise NotFound(f"{path}: there is no such file; correct the path")
    module: Any = None
    loader = importlib.util.spec_from_file_location(path.stem, path)
    try:
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        loader.loader.exec_module(module)
        value = getattr(module, attribute)
        made = value if isinstance(value, nn.Module) else value()
    except Fault:
        raise
    except AttributeError as error:
        if module is None or hasattr(module, attribute):
            raise BadFile(f"{path}: it raised AttributeError: {error}; run it with python to see where") from error
        names = [n for n in vars(module) if not n.startswith("_")]
        raise NotFound(f"{path}: it has no {attribute!r}; {nearest(attribute, names)}") from None
    except Exception as error:  # the file is the user's, and so is the mistake
        raise BadFile(f"{path}: it raised {type(error).__name__}: {error}; run it with python to see where") from error
    if not isinstance(made, nn.Module):
        raise BadSetting(f"{path}:{attribute} must be or make an nn.Module, got {type(made).__name__}; name another")
    return made


COLOURS = {"✓": "green", "✗": "red", "!": "yellow", "-": "dim"}


def show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in report.lines(max(60, min(console.width, 100)), language()):
        colour = COLOURS.get(line[:1])
        console.print(line[:1] if colour else line, style=colour, end="" if colour else "\n", markup=False)
        if colour:
            console.print(line[1:], style="dim" if colour == "dim" else None, markup=False)
    console.print(say(f"{report.seconds} s", f"用时 {report.seconds} 秒"), style="dim")
