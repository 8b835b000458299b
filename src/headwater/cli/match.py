"""The command headwater match MODEL photo.jpg "a cat" "a dog": how well texts and images fit, zero-shot classes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import images, kernels
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadInput
from headwater.i18n import _

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", help=_("a CLIP or SigLIP folder, or a run of images and captions"))
    parser.add_argument("items", nargs="+", help=_("image files or folders, and texts"))
    help_text = _('the texts are labels, put into these templates: "a photo of a {}." (may be repeated)')
    parser.add_argument("--template", action="append", metavar="TEXT", help=help_text)
    parser.add_argument("--labels", action="store_true", help=_("the texts are labels, put into the usual templates"))
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))
    help_text = _("draw the matrix of cosine similarities into this PNG")
    parser.add_argument("--plot", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> None:
    import torch

    from headwater.families.matching import TEMPLATES, load_matcher

    names = [item for item in args.items if images.looks_like_images([item])]
    texts = [item for item in args.items if item not in names]
    if not names or not texts:
        raise BadInput(_('match: it needs images and texts; headwater match MODEL photo.jpg "a cat" "a dog"'))
    paths = images.find_image_arguments(names)
    matcher = load_matcher(args.model)
    kernels.warn_missing()

    # vectors
    if args.labels or args.template:
        text_vectors = matcher.label_vectors(texts, args.template or TEMPLATES)
    else:
        text_vectors = matcher.text_vectors(texts)
    read: list[Path] = []
    parts = []
    for batch in images.read_in_batches(paths):
        read += [image.path for image in batch]
        parts.append(matcher.image_vectors([image.pixels for image in batch]))
    image_vectors = torch.cat(parts)

    # the table
    probabilities = matcher.probabilities(text_vectors, image_vectors)
    cosines = image_vectors @ text_vectors.T
    for path, probs, cosine in zip(read, probabilities, cosines, strict=True):
        print_row(path, texts, probs, cosine, args.json)
    if args.plot:
        from headwater.inspection.image_figures import plot_similarity

        plot_similarity(cosines.numpy(), [path.name for path in read], texts, args.plot)


def print_row(path: Path, texts: list[str], probabilities: Tensor, cosines: Tensor, as_json: bool) -> None:
    """The texts of one image, the most probable first, each with its probability and its cosine."""
    order = probabilities.argsort(descending=True).tolist()
    rows = [(texts[n], round(float(probabilities[n]), 4), round(float(cosines[n]), 4)) for n in order]
    if as_json:
        matches = [{"text": text, "probability": p, "cosine": cosine} for text, p, cosine in rows]
        print(json.dumps({"image": str(path), "matches": matches}, ensure_ascii=False))
        return
    print(escape_for_terminal(str(path)))
    for text, probability, cosine in rows:
        print(escape_for_terminal(f"  {probability:6.1%}  {cosine:7.4f}  {text}"))
