"""The command headwater continue CLIP --model RUN: sound that continues a recording, by an AudioLM."""

from __future__ import annotations

import argparse

from headwater.cli import kernels
from headwater.cli.common import gc_paused
from headwater.cli.sound_output import (
    add_output_argument,
    add_sampling_arguments,
    output_path,
    sampling_rules,
    write_sound,
)
from headwater.errors import BadSetting
from headwater.i18n import _

MAX_SECONDS = 600


def add_continue_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "clip", metavar="CLIP", help=_("the recording (wav, flac, ogg, mp3), or a .npz file of its tokens")
    )
    parser.add_argument("--model", required=True, metavar="RUN", help=_("the run of audio-language-model"))
    add_output_argument(parser, "continued.wav")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help=_("how long the continuation is [5]"))
    help_text = _("only the first S seconds of the recording are known (0: all)")
    parser.add_argument("--prompt-seconds", type=float, default=0.0, metavar="S", help=help_text)
    add_sampling_arguments(parser, "0.6,0.8,0.6")


def run_continue(args: argparse.Namespace) -> None:
    path = output_path(args)
    if not 0 < args.seconds <= MAX_SECONDS or not args.prompt_seconds >= 0:
        raise BadSetting(
            _(
                "--seconds must be above 0 and at most {limit}, --prompt-seconds at least 0, got {seconds:g} and "
                "{prompt:g}; 5 and 0 are usual",
                limit=MAX_SECONDS,
                seconds=args.seconds,
                prompt=args.prompt_seconds,
            )
        )
    with gc_paused():
        from headwater.audiolm.audio_model import open_audio_model

        rules = sampling_rules(args)
        model = open_audio_model(args.model)
    kernels.warn_missing()
    if path.suffix.lower() == ".wav":
        model.require_codec()
    prompt = model.encode(args.clip)
    if args.prompt_seconds:
        prompt = prompt.first(model.tokens, args.prompt_seconds)
    continued = model.continue_voice(prompt, args.seconds, rules)
    write_sound(model, continued.after(prompt), path, mark_frames=len(prompt.fine))
