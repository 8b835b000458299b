"""headwater ui [MODEL or RUN …]: a page that shows how your models think. Nothing leaves this machine."""

from __future__ import annotations

import argparse
import webbrowser

from headwater.cli import kernels
from headwater.cli.language import say
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    told = say(
        "models, runs, or folders of runs; none: the folder runs and the models installed here",
        "模型、训练目录或其上级目录；不给则看 runs 目录和已安装的模型",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=told)
    told = say(
        "the address to listen on [127.0.0.1]; any that others can reach needs --token",
        "监听地址 [127.0.0.1]；他人可达的地址必须加 --token",
    )
    parser.add_argument("--host", default="127.0.0.1", help=told)
    parser.add_argument(
        "--port",
        type=int,
        default=8017,
        help=say("the port [8017]; 0: a free one", "端口 [8017]；0 为任选一个空闲端口"),
    )
    told = say("ask for a token, which a one-time link brings", "要求令牌，由一次性链接带入")
    parser.add_argument("--token", action="store_true", help=told)
    parser.add_argument("--open", action="store_true", help=say("open the browser too", "同时打开浏览器"))


def run(args: argparse.Namespace) -> None:
    from headwater.errors import BadSetting
    from headwater.serving.shelf import Shelf, find
    from headwater.serving.starting import serve

    if not 0 <= args.port <= 65535:
        raise BadSetting(f"--port must be from 0 to 65535, got {args.port}; 8017 is usual")
    kernels.note_missing()
    shelf = Shelf(find(args.models))
    print(
        say("found: ", "找到：")
        + (", ".join(n for n, i in shelf.items.items() if i.path) or say("nothing yet", "暂无"))
    )
    opened = not args.open

    def announce(link: str) -> None:
        nonlocal opened
        once = say("  (good for one use)", "（只能用一次）") if args.token else ""
        print(say(f"the page: {link}{once}", f"页面地址：{link}{once}"), flush=True)
        if not opened:
            opened = webbrowser.open(link) or True

    print(say("Ctrl-C ends it", "按 Ctrl-C 结束"))
    serve(shelf, args.host, args.port, args.token, announce)
