"""From what a user types to a spec: a preset, a known model, a model folder or file, or a spec in a file of its own."""

from __future__ import annotations

from pathlib import Path

from headwater.core.model import Model
from headwater.core.presets import ALSO, PRESETS, preset
from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.families.known import KNOWN
from headwater.families.loading import spec_of
from headwater.parts import from_plain
from headwater.weights import strict_json

LARGEST_SPEC = 16 * 2**20  # bytes; the spec of the largest known model is a few thousand


def resolve(name: str, vocab: int | None = None) -> Model:
    """The spec that a name or a path stands for. A name that is a preset's means the preset."""
    if name.lower() in PRESETS or name.lower() in ALSO:
        return preset(name, vocab)
    path = Path(name)
    if not path.exists() and name not in KNOWN:
        hint = nearest(name, [*PRESETS, *ALSO, *KNOWN])
        raise NotFound(f"{name!r} must be the name of a preset or a model, or a file, and is none of them; {hint}")
    if vocab is not None:
        raise BadSetting(f"vocab changes a preset, got it for the file {name}; change it in the file")
    if name in KNOWN or path.is_dir() or path.suffix == ".gguf":
        return spec_of(name)
    return spec_of(path.parent) if path.name == "config.json" else read_spec(path)


def read_spec(path: Path) -> Model:
    """A spec from JSON, as parts.to_plain writes it."""
    if path.stat().st_size > LARGEST_SPEC:
        raise BadFile(
            f"{path}: a spec has at most {LARGEST_SPEC:,} bytes, this has {path.stat().st_size:,}; is it weights?"
        )
    spec = from_plain(strict_json.parse_object(path.read_bytes(), path))
    if not isinstance(spec, Model):
        raise BadFile(
            f"{path}: must hold a Model, it holds a {type(spec).__name__}; write it with parts.to_plain(model.spec)"
        )
    return spec
