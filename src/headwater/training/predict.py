"""Predictor: the trained model of a run, called with texts: translate, continue, classify, tag, answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from headwater.codecs import is_codec, load_codec, read_codec_metadata
from headwater.core.model import Transformer
from headwater.data.examples import QAExample
from headwater.errors import BadInput, NotFound
from headwater.families.adapters import load_with_base
from headwater.families.load import load
from headwater.families.tuned_folder import merge_if_float, read_tuned_config
from headwater.i18n import _
from headwater.tasks import get_task
from headwater.tasks.base import TaskMetadata
from headwater.tasks.rollouts import language_tensors
from headwater.text.load import load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.training.checkpoint import MODEL_FILE
from headwater.training.state import TrainResult
from headwater.tuning import set_adapter_tensors
from headwater.tuning.base import file_name
from headwater.weights.native import copy_into
from headwater.weights.safetensors import SafetensorsFile


@dataclass
class Predictor:
    """predictor(text) gives the output of its task: a text, labels, (word, tag) pairs, an answer. Lists give lists."""

    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    metadata: TaskMetadata
    result: TrainResult | None = None

    @property
    def task(self) -> str:
        return self.metadata["task"]

    @property
    def columns(self) -> dict[str, str]:
        """Role -> column of the table it was trained on; empty where the data was no table."""
        return dict(self.metadata.get("columns") or {})

    def __call__(self, text: Any, **options: Any) -> Any:
        single = isinstance(text, (str, QAExample))
        task = get_task(self.task, self.metadata.get("objective", ""))
        outputs = task.predict(self.model, self.tokenizer, self.metadata, [text] if single else list(text), **options)
        return outputs[0] if single else outputs

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters())
        return f"Predictor({str(self.folder)!r}, task={self.task!r}, {size:,} weights)"


def load_run(folder: str | Path, result: TrainResult | None = None) -> Predictor:
    """Load the best model of a run, or a model folder."""
    folder = Path(folder)
    model_dir = folder / "model" if (folder / "config.yaml").is_file() else folder
    if not model_dir.is_dir():
        raise NotFound(
            _("{folder} is not the folder of a run or of a model; `headwater runs` lists the runs here", folder=folder)
        )
    if is_codec(model_dir):
        codec = cast(Transformer, load_codec(model_dir))
        return Predictor(folder, codec, load_tokenizer(model_dir), read_codec_metadata(model_dir), result)
    loaded = load(model_dir)
    metadata: TaskMetadata = loaded.config.get("metadata") or TaskMetadata()
    if "task" not in metadata:
        raise BadInput(
            _(
                "{where} does not say what it was trained for; use headwater.load for a model without a task",
                where=model_dir,
            )
        )
    return Predictor(folder, loaded.model, loaded.tokenizer or load_tokenizer(model_dir), metadata, result)


def load_checkpoint(run: str | Path, checkpoint: str | Path) -> Predictor:
    """The model of a run at one of its checkpoints; of a tuned run, its base with the adapter at that step."""
    run = Path(run)
    file = SafetensorsFile(Path(checkpoint) / MODEL_FILE)
    tensors = language_tensors(file)
    if is_codec(run / "model") or read_tuned_config(run / "model") is None:
        predictor = load_run(run)
        copy_into(predictor.model, tensors, file.where)
        return predictor
    tuned = load_with_base(run)
    set_adapter_tensors(tuned.model, {file_name(path): tensor for path, tensor in tensors.items()}, file.where)
    merge_if_float(tuned.model)
    return Predictor(run, tuned.model, tuned.tokenizer or load_tokenizer(run / "model"), tuned.config["metadata"])
