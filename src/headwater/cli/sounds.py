"""Sound arguments of a command: recordings and folders of them; unreadable ones are reported, not fatal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from headwater.cli import kernels
from headwater.cli.parser import escape_for_terminal
from headwater.errors import BadInput, Fault, NotFound
from headwater.i18n import _


def looks_like_sounds(arguments: Sequence[str]) -> bool:
    """Whether every argument has the name of a recording, or is a folder that holds some."""
    from headwater.audio.file_names import is_audio
    from headwater.data.readers.recording_folders import find_recordings

    paths = [Path(argument) for argument in arguments]
    return bool(paths) and all(is_audio(path) or (path.is_dir() and find_recordings(path)) for path in paths)


def find_sound_arguments(arguments: Sequence[str]) -> list[Path]:
    """The recordings that the arguments name; folders are searched, with the folders in them."""
    from headwater.data.readers.recording_folders import find_recordings

    paths: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if not path.exists():
            raise NotFound(_("no recording {word!r}; give an existing file or a folder", word=argument))
        paths += find_recordings(path) if path.is_dir() else [path]
    return paths


def classify_sounds(run: str, arguments: Sequence[str], as_json: bool) -> None:
    """Print the most probable label of each recording, with its probability; as JSON all of them."""
    from headwater.data.recordings import SOUNDS
    from headwater.tasks import get_task
    from headwater.training.predict import load_run

    paths = find_sound_arguments(arguments)
    predictor = load_run(run)
    if predictor.task != SOUNDS:
        raise BadInput(
            _("{run} was trained for {task}, not for sounds; train one with headwater train sounds/", run=run,
              task=predictor.task)
        )  # fmt: skip
    kernels.warn_missing()
    task = get_task(predictor.task)
    skipped = 0
    for path in paths:
        try:
            output = predictor(str(path))
        except Fault as fault:
            skipped += 1
            print(escape_for_terminal(str(fault)), file=sys.stderr)
            continue
        if as_json:
            print(json.dumps({"input": str(path), "output": output}, ensure_ascii=False))
        else:
            print(escape_for_terminal(f"{path}\t{task.output_line(output)}"))
    if skipped == len(paths):
        raise BadInput(_("none of the recordings can be read; see above"))
