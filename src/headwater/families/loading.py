"""load and save: one way in for every kind of model, one way out.

A MODEL, wherever one is asked for: a public model folder, a run that was trained here, a .gguf file, or a known name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.core import Model
from headwater.families.folder import Loaded, load_folder, plan, save_folder, tokenizer_of
from headwater.families.known import locate
from headwater.weights.native import KIND, described, is_native, load_model, save_model


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
    if is_native(path):
        return _ours(path)
    return load_folder(path, head=head, new_head=new_head)


def spec_of(name: str | Path) -> Model:
    """What a MODEL is made of, from config.json or the header of a .gguf file alone: no weight is read."""
    path = find_model(name)
    if path.suffix == ".gguf":
        from headwater.families.gguf import plan_of
        from headwater.weights.gguf import GgufFile

        return plan_of(GgufFile(path))[2]
    return described(path)[0] if is_native(path) else plan(path).spec


def _ours(folder: Path) -> Loaded:
    """A model in our own layout: what was trained here, or saved from parts."""
    native, tokenizer = load_model(folder), tokenizer_of(folder)
    marks = {} if tokenizer is None else {"eos_token_id": tokenizer.eos, "decoder_start_token_id": tokenizer.bos}
    config = {"model_type": KIND, "about": native.about}
    labels = [str(label) for label in native.about.get("labels", [])]
    return Loaded(native.model, tokenizer, config, folder, labels=labels, generation=marks)


def save(loaded: Loaded, folder: str | Path) -> Path:
    """Write the public layout (config.json, model.safetensors, tokenizer.json), then read it back and compare.

    A name that ends in .gguf becomes one GGUF file instead.
    """
    if Path(folder).suffix == ".gguf":
        from headwater.families.gguf import save_gguf

        return save_gguf(loaded, folder)
    if loaded.config.get("model_type") == KIND:
        save_model(folder, loaded.model, loaded.config.get("about", {}))
        if loaded.tokenizer is not None:
            loaded.tokenizer.save(folder)
        return Path(folder)
    return save_folder(loaded, folder)
