"""load() and save(): one entry point for Hugging Face folders, training runs, GGUF files and installed models.

A MODEL argument is a Hugging Face folder, the folder of a training run, a .gguf file, or an installed model's name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core import MeanPooling, Model, Transformer
from headwater.core.base import HeadSpec
from headwater.errors import BadFile, BadInput, BadSetting, nearest
from headwater.families.config_writers import CONFIG_WRITERS
from headwater.families.export import FAMILY_ORDER, ExportedModel, FamilyMismatch, config_matches_spec, export_to_family
from headwater.families.hf_folder import (
    LoadedModel,
    check_round_trip,
    find_tokenizer,
    load_hf_folder,
    read_model_plan,
    save_hf_folder,
)
from headwater.families.hub import find_installed
from headwater.families.registry import FAMILIES
from headwater.families.tuned_folder import load_tuned_folder, read_tuned_config
from headwater.families.whisper_formats import is_ctranslate2, load_ctranslate2, load_ggml, save_ggml
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer
from headwater.tuning.base import check_merged
from headwater.vision.processor import find_processor
from headwater.weights.ggml import is_ggml
from headwater.weights.native import MODEL_TYPE, is_native, load_native, read_native_spec, save_native


def find_model(name: str | Path) -> Path:
    """The file or folder of a MODEL argument."""
    path = Path(name)
    if not path.exists():
        return find_installed(str(name))
    return path / "model" if (path / "model" / "config.json").is_file() else path


def load(name: str | Path, *, head: str | None = None, new_head: HeadSpec | None = None) -> LoadedModel:
    """Load a model with its tokenizer: headwater.load("smollm2"), load("runs/mine"), load("model.gguf").

    name      a known name (headwater models), a folder in the Hugging Face or the native layout, or a .gguf file
    head      the head type to build: language, hidden_states, pooler, sequence_classification, token_classification,
              question_answering, next_sentence or pretraining; by default the one the checkpoint was saved with
    new_head  the spec of a new head on the checkpoint's body, to be fine-tuned
    """
    path = find_model(name)
    if path.suffix == ".gguf":
        from headwater.families.gguf import load_gguf

        return load_gguf(path)
    if is_native(path):
        return _load_native_model(path)
    if is_ctranslate2(path):
        return load_ctranslate2(path)
    if is_ggml(path):
        return load_ggml(path)
    return load_hf_folder(path, head=head, new_head=new_head)


def load_spec(name: str | Path) -> Model:
    """The spec of a MODEL, from config.json or the header of a .gguf file: no weight is read."""
    path = find_model(name)
    if path.suffix == ".gguf":
        from headwater.families.gguf import read_gguf_plan
        from headwater.weights.gguf import GgufFile

        return read_gguf_plan(GgufFile(path))[2]
    if is_ctranslate2(path):  # its sizes are those of its tensors
        return load_ctranslate2(path).spec
    if is_ggml(path):
        return load_ggml(path).spec
    return read_native_spec(path)[0] if is_native(path) else read_model_plan(path).spec


def _load_native_model(folder: Path) -> LoadedModel:
    """Load a model in the native layout; a tuned one is its base with an adapter."""
    if read_tuned_config(folder) is not None:
        return load_tuned_folder(folder, load)
    native = load_native(folder)
    return _with_special_tokens(native.model, find_tokenizer(folder), native.metadata, folder)


def _with_special_tokens(
    model: Transformer, tokenizer: Tokenizer | None, metadata: Mapping[str, Any], path: Path
) -> LoadedModel:
    """A native model as a LoadedModel: the tokens that start and end a text are the tokenizer's."""
    generation_config = {}
    if tokenizer is not None:
        eos_ids = [int(n) for n in metadata.get("eos_ids") or ()]  # of a chat model: the ends of its answers
        generation_config = {"eos_token_id": eos_ids or tokenizer.eos_id, "decoder_start_token_id": tokenizer.bos_id}
    config = {"model_type": MODEL_TYPE, "metadata": dict(metadata)}
    labels = [str(label) for label in metadata.get("labels", [])]
    processor = find_processor(path) if path.is_dir() else None
    return LoadedModel(
        model, tokenizer, config, path, labels=labels, generation_config=generation_config, processor=processor
    )


class TrainedModel(Protocol):
    """The attributes of a training result that save() needs."""

    @property
    def model(self) -> Transformer: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def metadata(self) -> Mapping[str, object]: ...
    @property
    def folder(self) -> Path: ...


class SaveResult(NamedTuple):
    """The result of a save: the path, the saved model, its rewrites, and why no family fits (mismatch)."""

    path: Path
    model: LoadedModel
    rewrites: tuple[str, ...] = ()
    mismatch: FamilyMismatch | None = None


def save(model: LoadedModel | Transformer | TrainedModel, path: str | Path, *, layout: str = "auto") -> Path:
    """Save a model (from load or train) as a folder: config.json, model.safetensors, tokenizer.json.

    layout   "transformers": the layout of a transformers family that expresses the model, else an error with the reason
             a model_type such as "llama": the layout of this family
             "headwater": the native layout, for every model
             "auto": the layout of a transformers family if one fits, else the native one, with a warning

    A path that ends in .gguf becomes one GGUF file instead, a Whisper with a path that ends in .bin a ggml file.
    The result is loaded again and compared, except that of a ggml file, whose matrices are rounded to 16 bits.
    """
    result = save_with_result(model, path, layout)
    if result.mismatch is not None:
        family = result.mismatch.family
        difference = result.mismatch.difference
        warnings.warn(
            f"{path} is in the native layout, which transformers does not open: its nearest family, {family}, has "
            f"{difference.family_value} as {difference.path}, this model has {difference.model_value}",
            stacklevel=2,
        )
    return result.path


def save_with_result(
    model: LoadedModel | Transformer | TrainedModel, path: str | Path, layout: str = "auto"
) -> SaveResult:
    """As save(), but a mismatch is returned instead of warned of."""
    loaded = to_loaded_model(model)
    check_merged(loaded.model, "save")
    path = Path(path)
    known = ("auto", "transformers", MODEL_TYPE, *CONFIG_WRITERS)
    if layout not in known:
        raise BadSetting(
            _(
                "layout must be auto, transformers, headwater or a model_type, got {layout!r:.60}; {nearest}",
                layout=layout,
                nearest=nearest(layout[:60], known),
            )
        )
    if path.suffix == ".gguf":
        from headwater.families.gguf import save_gguf, to_gguf_family

        exported = to_gguf_family(loaded)
        return SaveResult(save_gguf(exported, path), exported)

    if path.suffix == ".bin":
        return SaveResult(save_ggml(loaded, path), loaded)

    # Its own family, where config.json still describes the model.
    model_type = str(loaded.config.get("model_type"))
    keeps_family = layout in ("auto", model_type) or (layout == "transformers" and model_type in CONFIG_WRITERS)
    if model_type in FAMILIES and keeps_family and config_matches_spec(loaded):
        return SaveResult(save_hf_folder(loaded, path), loaded)
    if layout == MODEL_TYPE:
        return SaveResult(_save_native_folder(loaded, path), loaded)

    # A family that expresses the model, or the native layout.
    result = export_to_family(loaded, FAMILY_ORDER if layout in ("auto", "transformers") else [layout])
    if isinstance(result, ExportedModel):
        return SaveResult(save_hf_folder(result.model, path), result.model, result.rewrites)
    if layout != "auto":
        difference = result.difference
        raise BadSetting(
            _(
                "layout {layout!r} cannot express this model: transformers' {family} has {family_value} as "
                "{where}, this model has {model_value}; save it with layout 'headwater'",
                layout=layout,
                family=result.family,
                family_value=difference.family_value,
                where=difference.path,
                model_value=difference.model_value,
            )
        )
    return SaveResult(_save_native_folder(loaded, path), loaded, mismatch=result)


def to_loaded_model(model: LoadedModel | Transformer | TrainedModel) -> LoadedModel:
    """A LoadedModel from the result of load() or train(), or from a Transformer."""
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, Transformer):
        return LoadedModel(model, None, {"model_type": MODEL_TYPE, "metadata": {}}, Path("model"))
    if not isinstance(getattr(model, "model", None), Transformer):
        raise BadInput(
            _("save needs a model, got {name}; give what load, train or build returns", name=type(model).__name__)
        )
    return _with_special_tokens(model.model, model.tokenizer, model.metadata, model.folder)


def _save_native_folder(loaded: LoadedModel, folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(
            _("{folder}: it must be a new or empty folder, it holds files; choose another name", folder=folder)
        )
    save_native(folder, loaded.model, loaded.config.get("metadata", {}))
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder)
    if loaded.processor is not None:
        loaded.processor.save(folder)
    check_round_trip(loaded.model, load_native(folder).model, folder)
    return folder


# --------------------------------------------------------------------------------------------------
# Sentence embeddings: mean pooling of an encoder's hidden states, L2-normalized.


def embed(loaded: LoadedModel, texts: Sequence[str], batch_size: int = 32) -> Tensor:
    """Sentence embeddings, [len(texts), D] unit vectors: their dot product is the cosine similarity.

    loaded      an encoder with its tokenizer, from headwater.load
    texts       the sentences; the result is in their order
    batch_size  texts of one forward pass; those of similar length share one
    """
    if loaded.tokenizer is None or loaded.model.encoder is None or loaded.model.decoder is not None:
        raise BadInput(_("embed: it needs an encoder with a tokenizer, got another kind of model; try minilm"))
    out = torch.zeros(len(texts), loaded.model.encoder.spec.d_model)
    with torch.inference_mode():
        for indices in _batches_by_length(texts, batch_size):
            batch = loaded.tokenizer.encode_padded([texts[i] for i in indices])
            inputs = loaded.model.inputs(batch.ids, batch.attention_mask, None, None, None)
            hidden_states = loaded.model.hidden_states(inputs)  # [B, S, D]
            pooled = MeanPooling().pool(hidden_states, inputs)  # [B, D]
            out[indices] = F.normalize(pooled, dim=-1)
    return out


def _batches_by_length(texts: Sequence[str], batch_size: int) -> Iterator[list[int]]:
    """Indices of texts of similar length, so that little is padding."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
