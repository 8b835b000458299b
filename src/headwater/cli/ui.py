"""The command headwater ui [MODEL or RUN …]: serves the web page of models and runs on this machine."""

from __future__ import annotations

import argparse
import webbrowser

from headwater.cli import kernels
from headwater.cli.parser import CommandParser
from headwater.i18n import _


def add_arguments(parser: CommandParser) -> None:
    help_text = _("models, runs, or folders of runs; none: the folder runs and the models installed here")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=help_text)
    help_text = _("the address to listen on [127.0.0.1]; one that other machines can reach requires --token")
    parser.add_argument("--host", default="127.0.0.1", help=help_text)
    parser.add_argument("--port", type=int, default=8017, help=_("the port [8017]; 0: a free one"))
    help_text = _("require a token, which a one-time link sets")
    parser.add_argument("--token", action="store_true", help=help_text)
    parser.add_argument("--open", action="store_true", help=_("open the browser too"))


def run(args: argparse.Namespace) -> None:
    from headwater.errors import BadSetting
    from headwater.serving.model_store import ModelStore, discover_models
    from headwater.serving.server import serve

    if not 0 <= args.port <= 65535:
        raise BadSetting(_("--port must be from 0 to 65535, got {port}; 8017 is usual", port=args.port))
    kernels.warn_missing()
    store = ModelStore(discover_models(args.models))
    print(_("found: ") + (", ".join(name for name, model in store.entries.items() if model.path) or _("nothing yet")))
    is_opened = not args.open

    def announce(link: str) -> None:
        """Print the address, and open it in the browser once if --open was given."""
        nonlocal is_opened
        once = _("  (valid once)") if args.token else ""
        print(_("the page: {link}{once}", link=link, once=once), flush=True)
        if not is_opened:
            is_opened = webbrowser.open(link) or True

    print(_("Ctrl-C stops the server"))
    serve(store, args.host, args.port, args.token, announce)
