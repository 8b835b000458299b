"""Model store: the models and runs of the server by name, loaded on demand.

RUN@STEP names a checkpoint of a run, and RUN@base the base of a run that learns an adapter.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headwater.core.model import Transformer
from headwater.errors import BadInput, NotFound, nearest
from headwater.families.builders import decoder, encoder, transformer
from headwater.families.hf_folder import LoadedModel
from headwater.families.hub import HUB
from headwater.families.load import find_model, load
from headwater.families.tuned_folder import ADAPTER_NAME, load_base, read_tuned_config
from headwater.families.whisper_formats import CTRANSLATE2_WEIGHTS
from headwater.i18n import _
from headwater.inspection.inputs import InspectedModel
from headwater.text.tokenizer import Tokenizer
from headwater.text.train import train_tokenizer
from headwater.training.checkpoint import MODEL_FILE
from headwater.training.predict import Predictor, load_checkpoint, load_run
from headwater.weights.native import is_native

MAX_OPEN_MODELS = 2
MAX_DISCOVERED = 200


@dataclass(frozen=True)
class StoredModel:
    """A model by name. path: of a checkpoint and of a base, the directory of its run.

    kind: model, run (a run directory), checkpoint or base (of a run), random (a tiny untrained model).
    """

    name: str
    kind: str
    path: Path | None = None
    step: int = 0  # of a checkpoint

    @property
    def files(self) -> Path:
        """The file or the folder of its weights; of a base that of the adapter, which names it."""
        assert self.path is not None
        if self.kind == "checkpoint":
            return checkpoint_folder(self.path, self.step)
        return self.path / "model" if self.kind in ("run", "base") else self.path

    @property
    def mtime_key(self) -> tuple[int, ...]:
        """Modification times of the files, which change when a run saves a model; NotFound if they are missing."""
        if self.path is None:
            return ()
        model = self.files
        try:
            files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
            if self.kind == "base":
                return ((model / "config.json").stat().st_mtime_ns,)
            return tuple(f.stat().st_mtime_ns for f in [model, *files])
        except OSError:
            if self.kind == "run" and self.path.is_dir():
                raise NotFound(_("{name} has no model yet; wait for its first evaluation", name=self.name)) from None
            raise files_missing(self.name) from None


def files_missing(name: str) -> NotFound:
    """The error for a model whose files were deleted while the server runs."""
    return NotFound(
        _(
            "the files of {name} were deleted while the server was running; restore them, or choose another model",
            name=name,
        )
    )


@dataclass(frozen=True, eq=False)
class OpenModel:
    """A model in memory, with the wrapper that inspection uses."""

    stored: StoredModel
    mtime_key: tuple[int, ...]
    inspected: InspectedModel
    loaded: ServedModel

    @property
    def architecture(self) -> str:
        """encoder-decoder, decoder or encoder."""
        if self.inspected.is_encoder_decoder:
            return "encoder-decoder"
        return "encoder" if self.inspected.model.decoder is None else "decoder"

    @property
    def cache_key(self) -> tuple[Any, ...]:
        return (self.stored.name, self.mtime_key)


class ModelStore:
    """Models by name; the MAX_OPEN_MODELS most recently used ones stay in memory."""

    def __init__(self, entries: Iterable[StoredModel]) -> None:
        random_models = [StoredModel(name, "random") for name in TINY_MODELS]
        self.entries = {entry.name: entry for entry in [*entries, *random_models]}
        self.open_models: OrderedDict[str, OpenModel] = OrderedDict()

    def get(self, name: str) -> StoredModel:
        """The entry of a name, of RUN@STEP or of RUN@base."""
        if name in self.entries:
            return self.entries[name]
        run, separator, version = name.rpartition("@")
        if separator and self.entries.get(run, StoredModel("", "")).kind == "run":
            if version.isdecimal():
                return self._checkpoint(run, int(version))
            if version == "base":
                return self._base(run)
        raise NotFound(
            _(
                "this server has no model {name!r}; {nearest}",
                name=name[:60],
                nearest=nearest(name, self.entries),
                items="、".join(list(self.entries)[:5]),
            )
        )

    def _checkpoint(self, run: str, step: int) -> StoredModel:
        folder = self.run_dir(run)
        if step not in checkpoint_steps(folder) or not (checkpoint_folder(folder, step) / MODEL_FILE).is_file():
            raise NotFound(
                _(
                    "{run} has no checkpoint of step {step}; older ones are deleted as training continues",
                    run=run,
                    step=step,
                )
            )
        return StoredModel(f"{run}@{step}", "checkpoint", folder, step)

    def _base(self, run: str) -> StoredModel:
        folder = self.run_dir(run)
        if not is_tuned_run(folder):
            raise NotFound(_("{run} has no base: it is not the run of an adapter (--tune)", run=run))
        return StoredModel(f"{run}@base", "base", folder)

    def run_dir(self, name: str) -> Path:
        """The directory of a run."""
        entry = self.get(name)
        if entry.kind != "run" or entry.path is None:
            runs = [run for run, other in self.entries.items() if other.kind == "run"]
            raise NotFound(
                _(
                    "{name} is a model, not a run; {nearest}",
                    name=name,
                    nearest=nearest(name, runs) if runs else _("there are no runs"),
                )
            )
        if not entry.path.is_dir():
            raise files_missing(name)
        return entry.path

    def open(self, name: str) -> OpenModel:
        """The model in memory, loaded again if its files have changed. Called in the thread of model_worker only."""
        entry = self.get(name)
        mtime_key = entry.mtime_key
        open_model = self.open_models.get(name)
        if open_model is None or open_model.mtime_key != mtime_key:
            # Evict before loading, so that no more than MAX_OPEN_MODELS are in memory
            self.open_models.pop(name, None)
            while len(self.open_models) >= MAX_OPEN_MODELS:
                self.open_models.popitem(last=False)
            loaded = _load(entry)
            open_model = OpenModel(entry, mtime_key, InspectedModel.wrap(loaded), loaded)
            self.open_models[name] = open_model
        self.open_models.move_to_end(name)
        return open_model


def _load(stored: StoredModel) -> ServedModel:
    if stored.path is None:
        return build_tiny_model(stored.name)
    if stored.kind == "checkpoint":
        return load_checkpoint(stored.path, stored.files)
    if stored.kind == "base":
        config = read_tuned_config(stored.files)
        if config is None:
            raise files_missing(stored.name)
        return load_base(config, stored.files, load_model)
    return load_model(stored.path)


def load_model(path: str | Path) -> ServedModel:
    """A run or another model."""
    folder = find_model(path)
    if folder.is_dir() and is_native(folder):
        return load_run(path)
    return load(path)


def is_tuned_run(folder: Path) -> bool:
    """Whether the model of a run is an adapter, and its base another model."""
    return (folder / "model" / ADAPTER_NAME).is_file()


def checkpoint_folder(run: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of a run's committed checkpoints, oldest first."""
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir():
        return []
    steps = [path.parent.name.removeprefix("step-") for path in checkpoints.glob("step-*/manifest.json")]
    return sorted(int(step) for step in steps if step.isdigit())


# ------------------------------------------------------------------------------------------------------ discovery


def discover_models(names: Iterable[str]) -> list[StoredModel]:
    """Entries for the names on the command line: models, runs, folders of them; none: ./runs and installed models."""
    names = list(names)
    if not names:
        return _unique_entries([*_discover_runs(Path("runs")), *_discover_installed()])
    discovered: list[tuple[str, str, Path]] = []
    for name in names:
        path = Path(name)
        if name in HUB and not path.exists():
            discovered.append((name, "model", find_model(name)))
        elif (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file():
            discovered.append((_path_name(path), "run", path.resolve()))
        elif path.suffix == ".gguf" or (path / "config.json").is_file():
            discovered.append((_path_name(path), "model", path.resolve()))
        elif path.is_dir() and (entries_in_folder := [*_discover_runs(path), *_discover_folders(path)]):
            discovered += entries_in_folder
        else:
            find_model(name)  # raises NotFound with the nearest names, where there is no such path
            raise BadInput(
                _(
                    "{name} must be a model, a run or a folder of them, it is none of these; see headwater models",
                    name=name,
                )
            )
    return _unique_entries(discovered)


def _discover_runs(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted(folder.rglob("config.yaml"))[:MAX_DISCOVERED] if folder.is_dir() else ():
        yield path.parent.relative_to(folder).as_posix(), "run", path.parent.resolve()


def _discover_folders(folder: Path) -> Iterator[tuple[str, str, Path]]:
    for path in sorted([*folder.glob("*/config.json"), *folder.glob("*.gguf")])[:MAX_DISCOVERED]:
        model = path.parent if path.name == "config.json" else path
        yield _path_name(model), "model", model.resolve()


def _discover_installed() -> Iterator[tuple[str, str, Path]]:
    for name, hub_model in HUB.items():
        path = hub_model.installed_path()
        if path is not None and path.exists() and (path.suffix == ".gguf" or _has_weights(path)):
            yield name, "model", path


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights that are read as they are; an old pickle is converted first."""
    return any(folder.glob("*.safetensors")) or (folder / CTRANSLATE2_WEIGHTS).is_file()


def _path_name(path: Path) -> str:
    return path.resolve().name or "model"


def _unique_entries(discovered: Iterable[tuple[str, str, Path]]) -> list[StoredModel]:
    """Entries with unique names, without control characters."""
    entries: dict[str, StoredModel] = {}
    for name, kind, path in discovered:
        safe_name = re.sub(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", "?", name)[:100]
        unique = safe_name
        number = 1
        while unique in entries:
            number += 1
            unique = f"{safe_name}-{number}"
        entries[unique] = StoredModel(unique, kind, path)
    return list(entries.values())


# --------------------------------------------------------------------------------------------------
# Tiny randomly initialized models, one per architecture, so that the page works before anything is trained.


TINY_MODELS: dict[str, Any] = {"tiny encoder-decoder": transformer, "tiny encoder": encoder, "tiny decoder": decoder}
TINY_SIZES: dict[str, Any] = {"d_model": 32, "heads": 4, "layers": 3, "d_ff": 64, "dropout": 0.0}
QK_SCALE = 1.6  # initial weights alone give nearly uniform attention
TOKENIZER_TEXT = """the cat sat on the mat because it was tired . the dog did not sit there , it was too warm outside .
a small river begins at its headwater and flows down to the sea . attention is all you need .
we read the words one by one and look back at what came before . hello world , how are you today ?
小 河 从 源 头 流 向 大 海 。 注 意 力 就 是 你 所 需 要 的 一 切 。 猫 坐 在 垫 子 上 , 因 为 它 累 了 。"""


@dataclass
class TinyModel:
    """The fields of families.load.LoadedModel that the server uses."""

    model: Transformer
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    decoder_start_id: int
    max_positions: int = 2048
    labels: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    path: None = None

    def generation_setting(self, key: str) -> None:
        """None: there is no generation config."""
        return None


ServedModel = LoadedModel | Predictor | TinyModel


@cache
def tiny_tokenizer() -> Tokenizer:
    """A BPE tokenizer trained on TOKENIZER_TEXT."""
    return train_tokenizer(TOKENIZER_TEXT.split("\n"), vocab_size=384, add_bos_eos=False)


def build_tiny_model(name: str) -> TinyModel:
    """A tiny model by name, with fixed random weights."""
    tokenizer = tiny_tokenizer()
    builder = TINY_MODELS[name]
    model = builder(len(tokenizer), **TINY_SIZES).build(seed=7).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if path.rpartition(".")[0].endswith((".q", ".k")):
                weight.mul_(QK_SCALE)
    return TinyModel(model, tokenizer, (tokenizer.eos_id or 0,), tokenizer.bos_id or 0)
