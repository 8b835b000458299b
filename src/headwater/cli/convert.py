"""The command headwater convert OLD NEW: converts a run to transformers or GGUF, an old checkpoint to safetensors."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from headwater.cli.parser import CommandParser
from headwater.i18n import _, join

if TYPE_CHECKING:
    from headwater.families.convert import ConversionResult


def add_arguments(parser: CommandParser) -> None:
    add = parser.add_argument
    old = _("a run, a model folder, a .gguf file, an old checkpoint (pytorch_model.bin, fairseq), or a known name")
    layout = _("transformers, headwater, or a model_type such as llama; auto: transformers where a family fits")
    vocabulary = _("folder of the tokenizer files, if not OLD")
    drop = _("drop tensors whose name matches; may be repeated")
    add("old", metavar="OLD", help=old)
    add("new", metavar="NEW", help=_("the folder or .gguf file to write"))
    add("--layout", default="auto", metavar="LAYOUT", help=layout)
    add("--vocabulary", metavar="FOLDER", help=vocabulary)
    add("--drop", action="append", default=[], metavar="PATTERN", help=drop)
    add("--force", action="store_true", help=_("write into an existing folder"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.convert import convert
    from headwater.families.hf_folder import ModelWeights

    result = convert(
        args.old, args.new, vocabulary=args.vocabulary, drop=args.drop, force=args.force, layout=args.layout
    )
    weights = ModelWeights(result.loaded.model)
    num_weights = sum(weights.meta_tensor(name).numel() for name in weights)
    model_type = result.loaded.config["model_type"]
    head = result.loaded.head
    with_head = _(" with the head {head!r}", head=head) if head else ""
    print(
        _(
            "{folder}: {model_type}{with_head}, {num_tensors} tensors, {num_weights:,} weights",
            folder=result.folder,
            model_type=model_type,
            with_head=with_head,
            num_tensors=result.num_tensors,
            num_weights=num_weights,
        )
    )
    _print_layout(result)
    if result.dropped:
        print(_("dropped tensors: {dropped}", dropped=", ".join(result.dropped)))
    if result.tokenizer_note:
        print(_("note: ") + str(result.tokenizer_note))
    print(_("loaded again and compared: equal"))


REWRITES = {
    "output_bias": _("a bias of zeros on the output"),
    "sinusoidal_halves": _("sines before cosines, features reordered to match"),
    "embedding_scale": _("the embedding scale moved into the token table"),
}


def _print_layout(converted: ConversionResult) -> None:
    """Print the rewrites that made a family match, or why none matches."""
    if converted.rewrites:
        changes = join("; ", (REWRITES[name] for name in converted.rewrites))
        print(_("rewritten, with the same outputs: {changes}", changes=changes))
    if converted.mismatch is not None:
        name = converted.mismatch.family
        difference = converted.mismatch.difference
        print(
            _(
                "note: headwater's own layout, transformers does not open it: its nearest family, "
                "{name}, has {theirs} as {where}, this model has {ours}",
                name=name,
                theirs=difference.family_value,
                where=difference.path,
                ours=difference.model_value,
            )
        )
