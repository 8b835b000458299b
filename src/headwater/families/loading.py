"""load and save: one way in for every kind of model, one way out.

A MODEL, wherever one is asked for: a public model folder, a run that was trained here, a .gguf file, or a known name.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from headwater.core import Model, Transformer
from headwater.errors import BadFile, BadInput, BadSetting, nearest
from headwater.families.export import ORDER, Exported, Misfit, as_public, is_described
from headwater.families.family import FAMILIES
from headwater.families.folder import Loaded, compare, load_folder, plan, save_folder, tokenizer_of
from headwater.families.known import locate
from headwater.families.writer import WRITERS
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
    native = load_model(folder)
    return _with_marks(native.model, tokenizer_of(folder), native.about, folder)


def _with_marks(model: Transformer, tokenizer: Any, about: dict[str, Any], where: Path) -> Loaded:
    """The tokens a text begins and ends with are the tokenizer's."""
    marks = {} if tokenizer is None else {"eos_token_id": tokenizer.eos, "decoder_start_token_id": tokenizer.bos}
    labels = [str(label) for label in about.get("labels", [])]
    return Loaded(model, tokenizer, {"model_type": KIND, "about": about}, where, labels=labels, generation=marks)


class Saved(NamedTuple):
    """What was written, in which form. misfit: why it is not in the layout of a family, where that was hoped for."""

    path: Path
    model: Loaded
    rewrites: tuple[str, ...] = ()
    misfit: Misfit | None = None


def save(model: Any, path: str | Path, *, layout: str = "auto") -> Path:
    """Write a model (of load, or of train) as a folder: config.json, model.safetensors, tokenizer.json.

    layout   "transformers": the public layout of the family that expresses the model, or a fault that says why none
             does; a model_type, such as "llama": that of this family; "headwater": our own, which holds every model;
             "auto": the public layout where there is one, otherwise our own, with a warning

    A path that ends in .gguf becomes one GGUF file instead. What was written is read back and compared.
    """
    saved = save_as(model, path, layout)
    if saved.misfit is not None:
        name, other = saved.misfit.name, saved.misfit.difference
        warnings.warn(
            f"{path} is in headwater's own layout, which transformers does not open: its nearest family, {name}, has "
            f"{other.theirs} as {other.where}, this model has {other.ours}",
            stacklevel=2,
        )
    return saved.path


def save_as(model: Any, path: str | Path, layout: str = "auto") -> Saved:
    """As save; what there is to say is returned, not warned of."""
    given, path, known = as_loaded(model), Path(path), ("auto", "transformers", KIND, *WRITERS)
    if layout not in known:
        raise BadSetting(
            f"layout must be auto, transformers, headwater or a model_type, got {layout!r:.60}; "
            f"{nearest(layout[:60], known)}"
        )
    if path.suffix == ".gguf":
        from headwater.families.gguf import gguf_form, save_gguf

        made = gguf_form(given)
        return Saved(save_gguf(made, path), made)
    own = str(given.config.get("model_type"))
    asked = layout in ("auto", own) or (layout == "transformers" and own in WRITERS)
    if own in FAMILIES and asked and is_described(given):
        return Saved(save_folder(given, path), given)
    if layout == KIND:
        return Saved(_save_native(given, path), given)
    found = as_public(given, ORDER if layout in ("auto", "transformers") else [layout])
    if isinstance(found, Exported):
        return Saved(save_folder(found.model, path), found.model, found.rewrites)
    if layout != "auto":
        other = found.difference
        raise BadSetting(
            f"layout {layout!r} cannot express this model: transformers' {found.name} has {other.theirs} as "
            f"{other.where}, this model has {other.ours}; save it with layout 'headwater'"
        )
    return Saved(_save_native(given, path), given, misfit=found)


def as_loaded(model: Any) -> Loaded:
    """What load gives, as it is; what train gives, or a model alone, with what is known of it."""
    if isinstance(model, Loaded):
        return model
    if isinstance(model, Transformer):
        return Loaded(model, None, {"model_type": KIND, "about": {}}, Path("model"))
    if not isinstance(getattr(model, "model", None), Transformer):
        raise BadInput(f"save needs a model, got {type(model).__name__}; give what load, train or build returns")
    return _with_marks(model.model, model.tokenizer, model.about, model.folder)


def _save_native(loaded: Loaded, folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(f"{folder}: it must be a new or empty folder, it holds files; choose another name")
    save_model(folder, loaded.model, loaded.config.get("about", {}))
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder)
    compare(loaded.model, load_model(folder).model, folder)
    return folder
