"""The command headwater transcribe FILE …: speech to text, as plain text, subtitles or JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.cli.common import gc_paused
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadFile, BadInput, BadSetting, Fault
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.transcription.speech_model import SpeechModel
    from headwater.transcription.transcript import Segment

FORMATS = ("txt", "srt", "vtt", "tsv", "json")
LIVE_BLOCK_SECONDS = 0.5
MAX_STDIN_BYTES = 8 << 30


def add_arguments(parser: CommandParser) -> None:
    help_text = _("recordings: wav, flac, ogg, mp3; others and videos if ffmpeg is installed; - for the standard input")
    parser.add_argument("files", nargs="+", metavar="FILE", help=help_text)
    help_text = _("a speech model: whisper-base (default), whisper-tiny.en, a folder or a file")
    parser.add_argument("--model", default="whisper-base", metavar="MODEL", help=help_text)
    parser.add_argument("--to", choices=FORMATS, default="txt", help=_("format of the transcript"))
    help_text = _("write each transcript into this folder; if interrupted, the same command resumes")
    parser.add_argument("--out", "-o", metavar="FOLDER", help=help_text)
    help_text = _("the language spoken, such as en or French; default: detected")
    parser.add_argument("--language", metavar="NAME", help=help_text)
    parser.add_argument("--translate", action="store_true", help=_("translate into English"))
    help_text = _("times of segments (default), of words too (in json; subtitles are divided by them), or none")
    parser.add_argument("--timestamps", choices=("none", "segment", "word"), default="segment", help=help_text)
    help_text = _("a text with names and spellings that occur in the recording")
    parser.add_argument("--initial-prompt", default="", metavar="TEXT", help=help_text)
    help_text = _("characters of a subtitle's line; longer segments are divided")
    parser.add_argument("--max-line-width", type=int, default=0, metavar="N", help=help_text)
    parser.add_argument("--max-lines", type=int, default=2, metavar="N", help=_("lines of a subtitle, with the above"))
    help_text = _("standard input is 16-bit mono sound at 16 kHz that is still arriving: print each passage as it ends")
    parser.add_argument("--live", action="store_true", help=help_text)
    help_text = _("draw the first window: spectrogram, words, and the cross-attention of each token (.png, .svg, .pdf)")
    parser.add_argument("--plot", metavar="IMAGE", help=help_text)
    add_decoding_arguments(parser)


def add_decoding_arguments(parser: CommandParser) -> None:
    """The flags of decoding."""
    group = parser.add_argument_group(_("decoding"))
    group.add_argument("--beam-size", type=int, default=5, metavar="N", help=_("width of the beam search; 1 is greedy"))
    help_text = _("one temperature, without the fallback to higher ones")
    group.add_argument("--temperature", type=float, metavar="N", help=help_text)
    help_text = _("samples at temperatures above 0, of which the best is taken")
    group.add_argument("--best-of", type=int, default=5, metavar="N", help=help_text)
    group.add_argument("--int8", action="store_true", help=_("weights of 8 bits: faster, almost the same text"))
    group.add_argument("--seed", type=int, default=0, metavar="N", help=_("the same seed gives the same text"))
    help_text = _("voice activity detection: skip silence, drop text that was invented for it (default: yes)")
    parser.add_bool_flag(group, "--vad", "vad", help_text)
    help_text = _("give each window the text before it (default: yes)")
    parser.add_bool_flag(group, "--condition-on-previous-text", "condition_on_previous_text", help_text)


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    with gc_paused():
        from headwater.transcription.speech_model import load_speech_model

        model = load_speech_model(args.model, "int8" if args.int8 else "float32")
    kernels.warn_missing()
    if args.live:
        transcribe_live(args, model)
        return 0
    if args.plot:
        from headwater.inspection.speech import align_speech

        print(align_speech(args.files[0], model, args.language).plot(args.plot), file=sys.stderr)
    code = 0
    outputs = output_paths(args.files, args.out, args.to)
    for file, output in zip(args.files, outputs, strict=True):
        if len(args.files) > 1 and output is None:
            print(f"==> {escape_for_terminal(file)} <==", flush=True)  # as head and tail do
        try:
            transcribe_file(args, model, file, output)
        except Fault as fault:
            if len(args.files) == 1:
                raise
            print(_("error: {text}", text=fault), file=sys.stderr)  # the others go on
            code = fault.exit_code
    return code


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if args.live and (args.files != ["-"] or args.out or args.to == "json"):
        raise BadSetting(
            _("--live reads the standard input and prints text; headwater transcribe - --live, without --out and json")
        )
    if args.plot and (len(args.files) > 1 or args.files == ["-"]):
        raise BadSetting(_("--plot draws one recording; name one file"))
    if len(args.files) > 1 and args.to != "txt" and not args.out:
        raise BadSetting(_("--to {format} of several recordings is a file of each; add --out FOLDER", format=args.to))
    if args.max_line_width < 0 or args.max_lines < 1:
        raise BadSetting(_("--max-line-width must be 0 or more and --max-lines 1 or more; correct them"))


def output_paths(files: Sequence[str], folder: str | None, layout: str) -> list[Path | None]:
    """Where each transcript is written; two recordings of one name keep their endings in it."""
    if folder is None:
        return [None] * len(files)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadFile(_("{path}: --out must be a folder, it is a file; choose another name", path=target))
    target.mkdir(parents=True, exist_ok=True)
    return [target / f"{name}.{layout}" for name in transcript_names(files)]


def transcript_names(files: Sequence[str]) -> list[str]:
    """The name of each transcript: the recording's; of those that share one, with the ending, then with the folders."""
    paths = [Path(os.path.abspath(file)) for file in files]
    names = [path.stem if file != "-" else "stdin" for file, path in zip(files, paths, strict=True)]
    depth = 0
    while len(set(names)) < len(names):
        depth += 1
        shared = [names.count(name) > 1 for name in names]
        for i, path in enumerate(paths):
            if not shared[i]:
                continue
            if depth >= len(path.parts):
                raise BadSetting(_("{path} is named twice; name each recording once", path=files[i]))
            names[i] = "-".join(path.parts[-depth:])
    return names


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as keyword arguments of headwater.transcribe."""
    settings = {
        "language": args.language,
        "task": "translate" if args.translate else "transcribe",
        "timestamps": args.timestamps,
        "initial_prompt": args.initial_prompt,
        "beam_size": args.beam_size,
        "best_of": args.best_of,
        "seed": args.seed,
    }
    if args.temperature is not None:
        settings["temperature"] = args.temperature
    for name in ("vad", "condition_on_previous_text"):
        settings[name] = getattr(args, name) != "no"
    return settings


def transcribe_file(args: argparse.Namespace, model: SpeechModel, file: str, output: Path | None) -> None:
    """Transcribe one recording, to a file or the standard output."""
    from headwater.io.files import atomic_write
    from headwater.transcription.api import transcribe
    from headwater.transcription.subtitles import LineLimits, write_transcript

    limits = LineLimits(args.max_line_width, args.max_lines)
    streams = output is None and args.to == "txt" and not limits.width
    report = progress_report(file, streams)
    journal = None if output is None else output.with_name(f".{output.name}.journal")
    with recording_path(file) as path:
        transcript = transcribe(path, model, **settings_of(args), on_segments=report, journal=journal)
    if output is not None:
        with atomic_write(output) as target:
            target.write(write_transcript(transcript, args.to, limits).encode())
        assert journal is not None
        journal.unlink(missing_ok=True)
        print(_("{path}: {language}, {seconds:.0f} s", path=output, language=transcript.language,
                seconds=transcript.duration), file=sys.stderr)  # fmt: skip
    elif not streams:
        print(escape_for_terminal(write_transcript(transcript, args.to, limits)), end="")


@contextlib.contextmanager
def recording_path(file: str) -> Any:
    """The file itself; the standard input is copied to a temporary one."""
    if file != "-":
        yield Path(file)
        return
    import shutil
    import tempfile

    if sys.stdin.isatty():
        raise BadInput(_("transcribe: - reads a recording from a pipe, there is none; name a file"))
    with tempfile.NamedTemporaryFile(suffix=".audio") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        copy.flush()
        yield Path(copy.name)


def progress_report(file: str, streams: bool) -> Callable[[Sequence[Segment], float, float], None]:
    """Print segments as they come, and on a terminal how far the recording has been transcribed, and how fast."""
    begin = time.monotonic()
    shows = sys.stderr.isatty()

    def report(segments: Sequence[Segment], done: float, total: float) -> None:
        if shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if streams:
            for segment in segments:
                print(escape_for_terminal(segment.text.strip()), flush=True)
        if shows and done < total:
            speed = done / max(time.monotonic() - begin, 1e-6)
            line = _("{file}  {done:.0f} of {total:.0f} s  {speed:.1f} x real time", file=Path(file).name, done=done,
                     total=total, speed=speed)  # fmt: skip
            print(line, end="", file=sys.stderr, flush=True)

    return report


def transcribe_live(args: argparse.Namespace, model: SpeechModel) -> None:
    """Transcribe 16-bit mono sound at 16 kHz from the standard input while it arrives."""
    import torch

    from headwater.audio.mel import SAMPLE_RATE
    from headwater.transcription.live import LiveTranscriber
    from headwater.transcription.windows import WindowSettings

    settings = settings_of(args)
    language = settings.pop("language")
    settings["language"] = "" if language is None else model.tokens.find_language(language)
    if "temperature" in settings:
        settings["temperatures"] = (settings.pop("temperature"),)
    live = LiveTranscriber(model, WindowSettings(**settings))

    def show(segment: Segment) -> None:
        print(f"[{segment.start:8.2f} {segment.end:8.2f}] {escape_for_terminal(segment.text.strip())}", flush=True)

    while block := sys.stdin.buffer.read(2 * int(SAMPLE_RATE * LIVE_BLOCK_SECONDS)):
        samples = torch.frombuffer(bytearray(block[: len(block) // 2 * 2]), dtype=torch.int16).float() / 32768
        for segment in live.push(samples):
            show(segment)
    for segment in live.finish():
        show(segment)
