"""The command headwater search photos/ "a red car": images of a folder, found by a text or an image; duplicates."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headwater.cli import kernels
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.i18n import _

RUNS = Path("runs/image-text")


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("folder", help=_("a folder of images; the folders in it are searched too"))
    parser.add_argument("queries", nargs="*", metavar="QUERY", help=_("texts, or image files"))
    help_text = _("a CLIP or SigLIP folder, or a run [the newest of runs/image-text]")
    parser.add_argument("--model", metavar="MODEL", help=help_text)
    parser.add_argument("--count", "-n", type=int, default=10, help=_("images to show for each query [10]"))
    help_text = _("list pairs of images that are nearly the same: a cosine of at least this [0.95]")
    parser.add_argument("--duplicates", nargs="?", type=float, const=0.95, metavar="COSINE", help=help_text)
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.image_index import build_index, query_vector
    from headwater.families.matching import load_matcher

    _check(args)
    matcher = load_matcher(args.model or newest_run())
    kernels.warn_missing()
    index = build_index(args.folder, matcher, _progress)
    for problem in index.problems:
        print(escape_for_terminal(problem), file=sys.stderr)
    for query in args.queries:
        hits = index.search(query_vector(query, matcher), args.count)
        if args.json:
            images = [{"path": str(hit.path), "cosine": round(hit.cosine, 4)} for hit in hits]
            print(json.dumps({"query": query, "images": images}, ensure_ascii=False))
            continue
        print(escape_for_terminal(query))
        for hit in hits:
            print(escape_for_terminal(f"  {hit.cosine:7.4f}  {hit.path}"))
    if args.duplicates is not None:
        for pair in index.duplicates(args.duplicates):
            if args.json:
                paths = [str(pair.first), str(pair.second)]
                print(json.dumps({"duplicates": paths, "cosine": round(pair.cosine, 4)}, ensure_ascii=False))
            else:
                print(escape_for_terminal(f"{pair.cosine:.4f}  {pair.first}  {pair.second}"))


def _check(args: argparse.Namespace) -> None:
    if not Path(args.folder).is_dir():
        raise NotFound(_("search: {folder} must be a folder of images", folder=args.folder))
    if not args.queries and args.duplicates is None:
        raise BadInput(_('search: it needs a text or an image, or --duplicates; headwater search photos/ "a red car"'))
    if args.count < 1:
        raise BadSetting(_("--count must be at least 1, got {count}", count=args.count))
    if args.duplicates is not None and not -1 <= args.duplicates <= 1:
        raise BadSetting(_("--duplicates must be a cosine from -1 to 1, got {value:g}", value=args.duplicates))


def newest_run() -> Path:
    """The newest run of images and captions."""
    runs = [path for path in RUNS.glob("*") if (path / "model" / "config.json").is_file()]
    if not runs:
        raise BadInput(_("search: no model is trained here yet; give --model, or headwater train pairs.csv first"))
    return max(runs, key=lambda path: (path / "model" / "config.json").stat().st_mtime)


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:,}/{total:,}", end="" if done < total else "\n", file=sys.stderr, flush=True)
