"""The command headwater inspect MODEL "text": attention, heads, logit lens, losses, gradients; with figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import images, inputs, kernels
from headwater.cli.parser import escape_control
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _, language

if TYPE_CHECKING:
    from headwater.families.hf_folder import LoadedModel
    from headwater.inspection.api import Inspection
    from headwater.training.predict import Predictor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = _("a folder, a run, a .gguf file or a known name (headwater models)")
    add("model", metavar="MODEL", help=help_text)
    help_text = _("the input text, or a file with it; for an encoder-decoder, the source; for an image model, an image")
    add("text", help=help_text)
    help_text = _("the text is a text, even if it looks like a file name")
    add("--as-text", action="store_true", help=help_text)
    help_text = _("the target text of an encoder-decoder; default: generated")
    add("--target", metavar="TEXT", help=help_text)
    help_text = _(
        "analyses, separated by commas: next, losses, heads, alignment, attention, lens, attribution, "
        "gradients, ablation, positions, costs (all but ablation)"
    )
    add("--analyses", metavar="ANALYSIS,…", help=help_text)
    add("--layer", type=int, metavar="N", help=_("only this layer, from 0"))
    add("--head", type=int, metavar="N", help=_("only this head, from 0"))
    help_text = _("encoder.self_attn, decoder.self_attn or decoder.cross_attn")
    add("--kind", metavar="KIND", help=help_text)
    help_text = _("write a report, figures and data into this folder")
    add("--out", metavar="DIR", help=help_text)
    add("--svg", action="store_true", help=_("figures as SVG"))
    add("--json", action="store_true", help=_("print everything as JSON"))


def run(args: argparse.Namespace) -> None:
    if args.head is not None and args.layer is None:
        raise BadSetting(_("inspect: --head needs --layer, got none; give a layer, from 0"))
    if images.looks_like_images([args.text]) and not args.as_text:
        inspect_image(args)
        return
    if not args.as_text and is_sound(args.text):
        inspect_recording(args)
        return
    from headwater.families.config_writers import find_part
    from headwater.inspection.api import inspect
    from headwater.variants.patches import Patches

    analyses = [name.strip() for name in args.analyses.split(",")] if args.analyses else None
    text = inputs.read_prompt(args.text, args.as_text)
    model = load_model(args.model)
    if find_part(model.model.spec, Patches) is not None:
        raise BadInput(
            _(
                "inspect: {model} reads images, got {text!r}; give an image file such as photo.jpg",
                model=args.model,
                text=args.text[:60],
            )
        )
    if model.tokenizer is None:
        raise BadInput(
            _(
                "{model}: it has no tokenizer, so it takes no text; use headwater.inspect with token ids",
                model=args.model,
            )
        )
    kernels.warn_missing()
    report = inspect(model, text, args.target, analyses=analyses, layer=args.layer, head=args.head, kind=args.kind)
    paths = []
    if args.out:
        paths = report.write(args.out, language(), "svg" if args.svg else "png")
    if args.json:
        print(json.dumps(report.to_dict(), ensure_ascii=False, allow_nan=False))
        return
    print(escape_control("\n".join(map(str, summary(report)))))
    for line in output_lines(args.out, paths):
        print(line)


def inspect_image(args: argparse.Namespace) -> None:
    """Print what an image model sees in an image, and draw it into --out: overlays, and one of every head."""
    from headwater.families.load import load
    from headwater.inspection.image_figures import plot_heads, plot_image_maps
    from headwater.inspection.image_maps import image_maps
    from headwater.vision.images import read_image

    loaded = load(args.model)
    if loaded.processor is None:
        raise BadInput(_("{model} has no preprocessor_config.json, so it takes no image", model=args.model))
    pixels = read_image(args.text)
    kernels.warn_missing()
    maps = image_maps(loaded.model, loaded.processor([pixels]))
    label = loaded.labels[maps.best] if loaded.labels else ""
    rows, columns = maps.rollout.shape
    top = maps.rollout.argmax()
    result = {
        "image": args.text,
        "label": label,
        "grid": [rows, columns],
        "most_attended_patch": [int(top // columns), int(top % columns)],
        "rollout": maps.rollout.round(5).tolist(),
        "attribution": maps.attribution.round(5).tolist(),
    }
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        print(escape_control(f"{args.text}  {label}"))
        place = _("row {row}, column {column}", row=top // columns + 1, column=top % columns + 1)
        print(_("{rows} x {columns} patches; most attended: {place}", rows=rows, columns=columns, place=place))
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "svg" if args.svg else "png"
        resized = loaded.processor.resize(pixels)
        plot_image_maps(resized, maps, label, folder / f"attention.{suffix}")
        plot_heads(resized, maps, label, folder / f"heads.{suffix}")
        print(_("wrote {first} and {second}", first=folder / f"attention.{suffix}", second=folder / f"heads.{suffix}"))


def is_sound(text: str) -> bool:
    """Whether the argument names a recording or a token file."""
    from headwater.audio.file_names import is_audio

    path = Path(text)
    return (is_audio(path) or path.suffix == ".npz") and path.is_file()


def inspect_recording(args: argparse.Namespace) -> None:
    """Print the tokens that an AudioLM sees in a recording, and write them into --out, with sound that plays."""
    from headwater.audiolm.audio_model import open_audio_model
    from headwater.inspection.sound_tokens import inspect_sound

    model = open_audio_model(args.model)
    kernels.warn_missing()
    tokens = inspect_sound(model, args.text)
    if args.json:
        print(json.dumps(tokens.to_dict()))
    else:
        print(escape_control("\n".join(tokens.lines())))
    if args.out:
        print(_("wrote {report}", report=tokens.write(args.out)[0]))


def load_model(name: str) -> LoadedModel | Predictor:
    """Load a model of any kind, or a training run."""
    from headwater.families.load import find_model, load
    from headwater.weights.native import is_native

    path = find_model(name)
    if path.is_dir() and is_native(path):
        from headwater.training.predict import load_run

        return load_run(path)
    return load(name)


def summary(report: Inspection) -> list[str]:
    """The inspection report as lines of text."""
    size = f"{len(report.inputs.source or report.inputs.tokens)} {_('input tokens')}"
    lines = [f"{report.name}{_(': ')}{size}", ""]
    if report.inputs.source:
        output_text = "".join(token.text for token in report.inputs.next_tokens if token.piece_index == 1)
        lines += [f"{_('generated: ')}{output_text.strip()}", ""]
    body = report.lines() or [line for result in report.results.values() for line in result.lines()]
    lines += [str(line) for line in body]
    return lines + [f"{name}{_(': ')}{report.skipped[name]}" for name in report.too_long]


def output_lines(folder: str | None, paths: list[Path]) -> list[str]:
    """Where the report was written, or how to write one."""
    if folder is None:
        return ["", _("--out DIR writes a report with figures")]
    num_others = len(paths) - 1
    return [
        "",
        _("wrote {report} and {num_others} more files to the same folder", report=paths[0], num_others=num_others),
    ]
