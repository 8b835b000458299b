"""The command headwater speak "text" --model BARK: text to speech, in the voice of a token file."""

from __future__ import annotations

import argparse

from headwater.cli import inputs, kernels
from headwater.cli.common import gc_paused
from headwater.cli.sound_output import (
    add_output_argument,
    add_sampling_arguments,
    output_path,
    sampling_rules,
    write_sound,
)
from headwater.errors import BadInput
from headwater.i18n import _


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help=_("a text, or a file that holds it"))
    help_text = _("a Bark folder: the three models, a tokenizer, and EnCodec among them or in codec/")
    parser.add_argument("--model", required=True, metavar="BARK", help=help_text)
    add_output_argument(parser, "speech.wav")
    parser.add_argument("--voice", metavar="NPZ", help=_("the voice: a .npz file of tokens, such as Bark's speakers"))
    add_sampling_arguments(parser, "0.7,0.7,0.5")


def run(args: argparse.Namespace) -> None:
    path = output_path(args)
    file = inputs.resolve_file(args.text)
    text = args.text if file is None else " ".join(inputs.read_text_lines(file))
    if not text.strip():
        raise BadInput(_("speak: there must be a text, it is empty; give a sentence"))
    with gc_paused():
        from headwater.audiolm.audio_model import open_audio_model
        from headwater.audiolm.voice import Voice, read_voice

        rules = sampling_rules(args)
        model = open_audio_model(args.model)
    kernels.warn_missing()
    if path.suffix.lower() == ".wav":
        model.require_codec()
    voice = read_voice(args.voice) if args.voice else None
    spoken = model.speak(text, voice, rules)
    if not len(spoken.fine):
        raise BadInput(_("speak: the model ended at once, so there is no sound; try another --seed or --voice"))
    write_sound(model, Voice(spoken.semantic, spoken.fine), path)
