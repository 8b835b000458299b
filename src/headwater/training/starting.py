"""The model a run begins with: from scratch, or the body of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwater.errors import BadSetting
from headwater.training.material import Material
from headwater.training.planning import head_for, spec_of
from headwater.training.settings import Settings
from headwater.weights.native import is_native, load_model


def begin(settings: Settings, material: Material) -> Any:
    """A built model whose vocabulary is the tokenizer's."""
    if not settings.start:
        return spec_of(settings, material).build(seed=settings.seed)
    folder = _model_folder(Path(settings.start))
    model = load_model(folder).model if is_native(folder) else _public(folder, settings, material)
    table = model.writer.embed.tokens
    if table.num_embeddings < len(material.tokenizer):
        raise BadSetting(f"--start {settings.start}: the model has {table.num_embeddings} tokens, the tokenizer "
                         f"{len(material.tokenizer)}; give --tokenizer {settings.start} too")  # fmt: skip
    return model


def _model_folder(path: Path) -> Path:
    return path / "model" if (path / "config.yaml").is_file() else path


def _public(folder: Path, settings: Settings, material: Material) -> Any:
    """A model in a public layout; for labels, tags and answers its body with a new head."""
    from headwater.families.folder import load_folder

    if material.task in ("text-to-text", "language-model"):
        return load_folder(folder).model
    return load_folder(folder, new_head=head_for(material, settings.dropout)).model
