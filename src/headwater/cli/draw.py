"""The command headwater draw RUN "text" …: pictures of texts, on a contact sheet that is rewritten while they grow."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import inputs, kernels
from headwater.cli.common import gc_paused
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _

if TYPE_CHECKING:
    from torch import Tensor

    from headwater.tasks.drawing import PictureModel

MAX_PICTURES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = _("the run of text-to-image, or a folder of DALL-E mini with its codec in codec/")
    parser.add_argument("model", metavar="RUN", help=help_text)
    help_text = _('texts such as "a red circle", or files with one text per line; default: the standard input')
    parser.add_argument("texts", nargs="*", metavar="TEXT", help=help_text)
    parser.add_argument("--out", default="drawing.png", metavar="PNG", help=_("the contact sheet [drawing.png]"))
    parser.add_argument("--n", type=int, default=4, metavar="N", help=_("pictures of each text [4]"))
    help_text = _("guidance: 1 is none, larger keeps closer to the text and varies less [3]")
    parser.add_argument("--scale", type=float, default=3.0, metavar="X", help=help_text)
    help_text = _("0 draws the most probable picture, 1 samples [1]")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help=help_text)
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help=_("only the K most probable codes"))
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=_("the same seed draws the same pictures"))
    help_text = _("rewrite the sheet after every N tokens, and keep all stages in PNG.stages.png")
    parser.add_argument("--every", type=int, default=0, metavar="N", help=help_text)
    help_text = _("sort the pictures of each text by a CLIP, the most similar first: a folder, or a run of pairs")
    parser.add_argument("--rerank", metavar="CLIP", help=help_text)
    help_text = _("with --rerank: keep the K best pictures of each text (0: all)")
    parser.add_argument("--keep", type=int, default=0, metavar="K", help=help_text)


def run(args: argparse.Namespace) -> None:
    texts = [text.strip() for text in _read_texts(args.texts) if text.strip()]
    _check(args, texts)
    with gc_paused():
        from headwater.families.matching import load_matcher
        from headwater.tasks.drawing import open_picture_model, rerank

        matcher = load_matcher(args.rerank) if args.rerank else None
        model = open_picture_model(args.model)
    kernels.warn_missing()
    out = Path(args.out)
    wanted = [text for text in texts for _copy in range(args.n)]
    pictures, stages = _draw(model, wanted, args, out)
    if args.every:
        _write_stages(stages, out.with_suffix(".stages.png"))
    if matcher is not None:
        pictures = rerank(matcher, texts, pictures, args.keep or args.n)
        _write_sheet(pictures, args.keep or args.n, out)
    print(_("{out}: {count} pictures, a row for each text", out=out, count=len(pictures)))


def _read_texts(arguments: list[str]) -> Iterator[str]:
    """The texts of the arguments: each itself, or the lines of the file it names; of the standard input without any."""
    if not arguments:
        yield from inputs.stdin_lines()
    for argument in arguments:
        path = inputs.resolve_file(argument)
        if path is None:
            yield argument
        else:
            yield from inputs.read_text_lines(path)


def _check(args: argparse.Namespace, texts: list[str]) -> None:
    if not texts:
        raise BadInput(_('draw: there must be a text, got none; give one such as "a red circle"'))
    if args.n < 1 or args.n * len(texts) > MAX_PICTURES:
        raise BadSetting(
            _("draw: --n must be from 1 and give at most {limit} pictures, got {n}", limit=MAX_PICTURES, n=args.n)
        )
    if args.every < 0 or args.top_k < 0:
        raise BadSetting(_("draw: --every and --top-k must be at least 0; leave them out"))
    if not 0 <= args.keep <= args.n or (args.keep and not args.rerank):
        raise BadSetting(
            _("draw: --keep must be at most --n ({n}), with --rerank; got {keep}", n=args.n, keep=args.keep)
        )
    if Path(args.out).suffix.lower() != ".png":
        raise BadSetting(_("draw: --out must end in .png, got {out}; sheets are written as PNG", out=args.out))


def _draw(model: PictureModel, texts: list[str], args: argparse.Namespace, out: Path) -> tuple[Tensor, list[Tensor]]:
    """Draw in batches and write the sheet after each stage; returns the pictures, and the stages of the first batch."""
    import torch

    from headwater.generation.guidance import MAX_BATCH_SEQUENCES
    from headwater.tasks.drawing import GRAY, draw_steps

    codec = model.codec
    pictures = torch.full((len(texts), 3, codec.size, codec.size), GRAY)
    stages = []
    for first in range(0, len(texts), MAX_BATCH_SEQUENCES):
        batch = texts[first : first + MAX_BATCH_SEQUENCES]
        steps = draw_steps(
            model,
            batch,
            scale=args.scale,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
            every=args.every,
            first=first,
        )
        for drawn in steps:
            pictures[first : first + len(batch)] = drawn
            _write_sheet(pictures, args.n, out)
            if not first:
                stages.append(drawn)
    return pictures, stages


def _write_stages(stages: list[Tensor], out: Path) -> None:
    """A sheet with a row for each picture, and its stages from left to right."""
    import torch

    _write_sheet(torch.stack(stages, 1).flatten(0, 1), len(stages), out)  # [B · stages, 3, H, W]


def _write_sheet(pictures: Tensor, columns: int, out: Path) -> None:
    from headwater.vision.sheets import contact_sheet, to_pixels, write_png

    write_png(contact_sheet(to_pixels(pictures), columns), out)
