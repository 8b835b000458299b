"""What the commands that write sounds have in common: options of sampling, and the files they write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.errors import BadSetting
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.audiolm.audio_model import AudioModel
    from headwater.audiolm.stages import SamplingRule
    from headwater.audiolm.voice import Voice

SUFFIXES = (".wav", ".npz")


def add_sampling_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    help_text = _(
        "of the semantic, the coarse and the fine stage, or one for all; 0: the most probable [{default}]",
        default=default,
    )
    parser.add_argument("--temperature", default=default, metavar="X,X,X", help=help_text)
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help=_("only the K most probable tokens"))
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=_("the same seed writes the same sound"))


def add_output_argument(parser: argparse.ArgumentParser, default: str) -> None:
    help_text = _("a .wav file, with its spectrogram beside it, or a .npz file of tokens [{default}]", default=default)
    parser.add_argument("--out", default=default, metavar="FILE", help=help_text)


def sampling_rules(args: argparse.Namespace) -> list[SamplingRule]:
    """The rules of the three stages."""
    from headwater.audiolm.stages import SamplingRule

    parts = args.temperature.split(",")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise BadSetting(
            _(
                "--temperature must be one number or three with commas, got {value}; 0.6,0.8,0.6 is AudioLM's",
                value=args.temperature[:40],
            )
        )
    values = values * 3 if len(values) == 1 else values
    return [SamplingRule(value, args.top_k, args.seed) for value in values]


def output_path(args: argparse.Namespace) -> Path:
    """The file that --out names."""
    path = Path(args.out)
    if path.suffix.lower() not in SUFFIXES:
        raise BadSetting(_("--out must end in .wav or .npz, got {out}; sounds are written as WAV", out=args.out))
    return path


def write_sound(model: AudioModel, voice: Voice, path: Path, mark_frames: int = 0) -> None:
    """Write tokens as they are, or as sound with its spectrogram. mark_frames: where what was written begins."""
    if path.suffix.lower() == ".npz":
        from headwater.audiolm.voice import write_voice

        write_voice(path, voice, model.tokens.coarse_books)
        print(
            _(
                "{path}: {semantic} semantic tokens, {frames} frames",
                path=path,
                semantic=len(voice.semantic),
                frames=len(voice.fine),
            )
        )
        return
    from headwater.audio.write import spectrogram_image, write_wav
    from headwater.vision.sheets import write_png

    samples = model.decode(voice.fine)
    write_wav(path, samples, model.sample_rate)
    mark = mark_frames / model.tokens.frame_rate if mark_frames else None
    picture = write_png(spectrogram_image([samples], model.sample_rate, mark), path.with_suffix(".png"))
    seconds = len(samples) / model.sample_rate
    print(_("{path}: {seconds:.1f} s; its spectrogram: {picture}", path=path, seconds=seconds, picture=picture))
