"""load and save: one way in for every kind of model, one way out.

A MODEL, wherever one is asked for: a public model folder, a run that was trained here, a .gguf file, or a known name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.families.folder import Loaded, load_folder, save_folder
from headwater.families.known import locate


def find_model(name: str | Path) -> Path:
    """The file or folder that a MODEL means."""
    path = Path(name)
    if not path.exists():
        return locate(str(name))
    return path / "model" if (path / "model" / "config.json").is_file() else path


def load(name: str | Path, *, head: str | None = None, new_head: Any = None) -> Loaded:
    """Load a model with its tokenizer: headwater.load("smollm2"), load("runs/mine"), load("model.gguf").

    head: which of the family's heads to build (language, states, pooled, class, tags, span, next); the file's own where
    it is not said. new_head: a head part of your own on the file's body, to be tuned.
    """
    path = find_model(name)
    if path.suffix == ".gguf":
        from headwater.families.gguf import load_gguf

        return load_gguf(path)
    return load_folder(path, head=head, new_head=new_head)


def save(loaded: Loaded, folder: str | Path) -> Path:
    """Write the public layout (config.json, model.safetensors, tokenizer.json), then read it back and compare.

    A name that ends in .gguf becomes one GGUF file instead.
    """
    if Path(folder).suffix == ".gguf":
        from headwater.families.gguf import save_gguf

        return save_gguf(loaded, folder)
    return save_folder(loaded, folder)
