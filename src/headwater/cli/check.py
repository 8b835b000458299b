"""The command headwater check: tests a model against the laws; names module and positions; exit code 8 on failure."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import BadFile, BadSetting, CheckFailed, Fault, NotFound, nearest
from headwater.i18n import _, language

if TYPE_CHECKING:
    from torch import nn

    from headwater.checker.verdicts import CheckReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = _(
        "a preset, a model (folder, run, .gguf, known name), a spec file, or file.py:NAME, an nn.Module "
        "or what builds one (the file is executed)"
    )
    sides = _("where rows may be padded (both)")
    add("model", metavar="MODEL", help=model)
    add("--vocab", type=int, metavar="N", help=_("vocabulary size"))
    add("--length", type=int, metavar="L", help=_("tokens per row"))
    add("--probes", type=int, default=4, metavar="N", help=_("positions to change in a row (4)"))
    add("--seed", type=int, default=0, metavar="N", help=_("random seed for tokens and initial weights (0)"))
    add("--only", metavar="LAW,…", help=_("only these laws"))
    add("--pad", choices=("left", "right", "both"), default="both", help=sides)
    add("--bidirectional", action="store_true", help=_("a position may see later ones"))
    add("--json", action="store_true", help=_("the report as JSON"))


def run(args: argparse.Namespace) -> int:
    from headwater.checker.api import PADDING_SIDES, check

    reports = [
        check(
            model,
            vocab=args.vocab,
            causal=False if args.bidirectional else None,
            length=args.length,
            num_probes=args.probes,
            seed=args.seed,
            padding_sides=PADDING_SIDES if args.pad == "both" else [args.pad],
            laws=[law.strip() for law in args.only.split(",")] if args.only else None,
        )
        for model in towers(resolve_model(args.model, args.vocab, args.seed))
    ]
    for report in reports:
        if args.json:
            print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False))
        else:
            print_report(report)
    return 0 if all(report.ok for report in reports) else CheckFailed.exit_code


def towers(model: nn.Module) -> list[nn.Module]:
    """The text and the image tower of a matcher, or the model itself."""
    from headwater.variants.towers import TwoTowers

    return [model.text, model.image] if isinstance(model, TwoTowers) else [model]


def resolve_model(name: str, vocab: int | None, seed: int) -> nn.Module:
    """Load or build the model of a name; raises BadSetting if a preset does not fit into memory."""
    from headwater.doctor.environment import memory_gb
    from headwater.families.hub import HUB
    from headwater.families.load import load
    from headwater.inspection.costs import meta_model, num_parameters
    from headwater.inspection.inputs import resolve_spec

    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return load_from_file(Path(file), attribute)
    if name.endswith(".py"):
        raise BadSetting(_("{name}: name the model in the file, got none; {name}:NAME", name=name))
    if name in HUB or Path(name).is_dir() or name.endswith(".gguf"):
        return load(name).model
    spec = resolve_spec(name, vocab)
    needed = 8 * num_parameters(meta_model(spec)) / 1e9  # GB of fp32 weights, and of their gradients for one law
    free_gb = memory_gb()[1]
    if free_gb is not None and needed > free_gb:
        raise BadSetting(
            _(
                "{name}: checking it needs {needed:.1f} GB of memory, {free:.1f} are free; try a smaller one",
                name=name,
                needed=needed,
                free=free_gb,
            )
        )
    return spec.build(seed=seed)


def load_from_file(path: Path, attribute: str) -> nn.Module:
    """Execute a Python file and get a model from it: an nn.Module, or a class or function that builds one."""
    from torch import nn

    if not path.is_file():
        raise NotFound(_("{path}: there is no such file; correct the path", path=path))

    # execute the file; any exception becomes one line
    module: Any = None
    loader = importlib.util.spec_from_file_location(path.stem, path)
    try:
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        loader.loader.exec_module(module)
        value = getattr(module, attribute)
        model = value if isinstance(value, nn.Module) else value()
    except Fault:
        raise
    except AttributeError as error:
        if module is None or hasattr(module, attribute):
            raise BadFile(
                _("{path}: it raised AttributeError: {error}; run it with python to see where", path=path, error=error)
            ) from error
        names = [n for n in vars(module) if not n.startswith("_")]
        raise NotFound(
            _(
                "{path}: it has no {attribute!r}; {nearest}",
                path=path,
                attribute=attribute,
                nearest=nearest(attribute, names),
            )
        ) from None
    except Exception as error:  # any error of the user's file
        raise BadFile(
            _(
                "{path}: it raised {name}: {error}; run it with python to see where",
                path=path,
                name=type(error).__name__,
                error=error,
            )
        ) from error

    if not isinstance(model, nn.Module):
        raise BadSetting(
            _(
                "{path}:{attribute} must be an nn.Module or build one, got {name}; name another",
                path=path,
                attribute=attribute,
                name=type(model).__name__,
            )
        )
    return model


COLORS = {"✓": "green", "✗": "red", "!": "yellow", "-": "dim"}


def print_report(report: CheckReport) -> None:
    """Print the verdicts with colored marks."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line in report.lines(max(60, min(console.width, 100)), language()):
        color = COLORS.get(line[:1])
        if color:  # the mark of a verdict in its color, then the rest of the line
            console.print(line[:1], style=color, end="", markup=False)
            console.print(line[1:], style="dim" if color == "dim" else None, markup=False)
        else:
            console.print(line, markup=False)
    console.print(str(_("{seconds} s", seconds=report.seconds)), style="dim")
