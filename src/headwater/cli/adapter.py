"""The command headwater adapter show|merge|export ADAPTER [NEW]: what an adapter is, whole models, other layouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.parser import CommandParser, escape_control
from headwater.errors import BadSetting, nearest
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.families.hf_folder import LoadedModel

ACTIONS = ("show", "merge", "export")


def add_arguments(parser: CommandParser) -> None:
    add = parser.add_argument
    action = _(
        "show: what it is; merge: write the base with the adapter in its weights; export: write the adapter alone"
    )
    add("action", metavar="show|merge|export", help=action)
    add("adapter", metavar="ADAPTER", help=_("a tuned run, a peft folder, or a .gguf file with a LoRA"))
    add("new", metavar="NEW", nargs="?", help=_("the folder or .gguf file to write"))
    add("--base", metavar="MODEL", help=_("the base, if the adapter does not name it"))
    layout = _("export: peft, adapters, gguf or headwater; merge: as of headwater convert [auto: by the name of NEW]")
    add("--layout", default="auto", metavar="LAYOUT", help=layout)


def run(args: argparse.Namespace) -> None:
    if args.action not in ACTIONS:
        raise BadSetting(
            _(
                "headwater adapter must be followed by show, merge or export, got {action!r}; {nearest}",
                action=args.action,
                nearest=nearest(args.action, ACTIONS),
            )
        )
    if args.action == "show":
        print(escape_control("\n".join(describe(Path(args.adapter)))))
        return
    if args.new is None:
        raise BadSetting(_("adapter {action}: it needs a folder or file to write; give NEW", action=args.action))
    {"merge": merge_adapter, "export": export_adapter}[args.action](args)


def describe(path: Path) -> list[str]:
    """An adapter in lines: kind, base, methods, tensors and weights. The base is not loaded."""
    from headwater.families.adapters import describe_adapter

    about = describe_adapter(path)
    names = {
        "layout": _("layout"),
        "base": _("base"),
        "methods": _("methods"),
        "tensors": _("tensors"),
        "weights": _("weights"),
    }
    width = max(len(str(name)) for name in names.values())
    return [f"{names[key]!s:<{width}}  {value}" for key, value in about.items()]


def merge_adapter(args: argparse.Namespace) -> None:
    """Write the base with the adapter merged into its weights."""
    from headwater.families.load import save_with_result
    from headwater.tuning import merge

    loaded = load_with_adapter(args)
    merged = merge(loaded.model)
    layout = "auto" if args.layout == "gguf" else args.layout
    result = save_with_result(loaded, args.new, layout)
    print(
        _(
            "{path}: {layers} layers have new weights; merging changed a logit by at most {change:.1e}",
            path=result.path,
            layers=len(merged.paths),
            change=merged.largest_change,
        )
    )


def export_adapter(args: argparse.Namespace) -> None:
    """Write the adapter alone in another layout."""
    from headwater.families.adapters import save_adapter

    layout = args.layout
    if layout == "auto":
        layout = "gguf" if str(args.new).endswith(".gguf") else "peft"
    path = save_adapter(load_with_adapter(args), args.new, layout=layout)
    print(_("{path}: written as {layout}", path=path, layout=layout))


def load_with_adapter(args: argparse.Namespace) -> LoadedModel:
    """The base of an adapter with the adapter beside its weights."""
    from headwater.families.adapters import load_adapter, load_with_base

    if args.base is None:
        return load_with_base(args.adapter)
    from headwater.families.load import load

    return load_adapter(load(args.base), args.adapter)
