"""Load and save Hugging Face model folders: config.json, model.safetensors (or shards), tokenizer files.

Loading: config.json -> spec -> a model on the meta device -> the file's memory-mapped tensors become its parameters,
one by one. No model is loaded partially: every name, shape and dtype is checked before the first tensor is read.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.audio.feature_extractor import feature_extractor_config
from headwater.audio.frames import Frames
from headwater.core import Attention, Model, Transformer
from headwater.core.base import HeadSpec
from headwater.core.init import NORMS, init_buffers, match_rule
from headwater.core.norms import OffsetRMSNormLayer
from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.families.config_writers import CONFIG_WRITERS, find_part
from headwater.families.registry import FAMILIES, LABELED_HEADS, Family, detect_head_type, find_family
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.text.load import load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.vision.processor import PROCESSOR_NAME, ImageProcessor, find_processor
from headwater.weights.checks import check_finite, check_memory
from headwater.weights.hf_config import MAX_CONFIG_BYTES, HFConfig
from headwater.weights.name_map import NameMap
from headwater.weights.native import quantized_layers
from headwater.weights.safetensors import LazyStateDict
from headwater.weights.shards import WEIGHTS_INDEX_NAME, WEIGHTS_NAME, open_weights, save_weights

INPUT_EMBEDDINGS = ("decoder.embed.tokens", "encoder.embed.tokens")
# Modules whose weights may be tied.
TIEABLE_WEIGHTS = ("encoder.embed.tokens", "decoder.embed.tokens", "head.out", "head.language.out")
TiedPairs = tuple[tuple[str, str], ...]


@dataclass
class LoadedModel:
    """A model with its tokenizer and its config. config: the contents of config.json, which save() writes back."""

    model: Transformer
    tokenizer: Tokenizer | None
    config: dict[str, Any]
    path: Path
    head: str = ""
    labels: list[str] = field(default_factory=list)
    generation_config: dict[str, Any] = field(default_factory=dict)  # takes precedence over config
    processor: ImageProcessor | None = None  # of images

    @property
    def spec(self) -> Model:
        return self.model.spec

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence token ids: those of the config, or that of the tokenizer."""
        eos_id = self.generation_setting("eos_token_id")
        if eos_id is None and self.tokenizer is not None:
            eos_id = self.tokenizer.eos_id
        if eos_id is None:
            return ()
        return tuple(eos_id) if isinstance(eos_id, list) else (eos_id,)

    @property
    def decoder_start_id(self) -> int | None:
        """The token id that the decoder of an encoder-decoder model starts with."""
        for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(self.generation_setting(key), int):
                return self.generation_setting(key)
        return None

    @property
    def max_positions(self) -> int | None:
        """The maximum sequence length the model was trained for; None where the config does not name it."""
        for key in ("max_position_embeddings", "n_positions", "max_target_positions"):
            if isinstance(self.generation_setting(key), int):
                return self.generation_setting(key)
        return None

    def generation_setting(self, key: str) -> Any:
        """A setting of generation_config.json, or of config.json where that has none."""
        value = self.generation_config.get(key)
        return self.config.get(key) if value is None else value


class ModelPlan(NamedTuple):
    """The contents of a config.json: family, head type, spec and labels. No weight is needed."""

    family: Family
    head_type: str
    spec: Model
    labels: list[str]


def read_model_plan(folder: Path, head_type: str | None = None) -> ModelPlan:
    """Read config.json. Every key that may change what the model computes is read, or rejected by name."""
    if not (folder / "config.json").is_file():
        raise NotFound(
            _("{folder}: a model folder must have a config.json, it has none; is this the right folder?", folder=folder)
        )
    config = HFConfig.from_json_file(folder / "config.json")
    family = find_family(config.get_str("model_type"), config.where)
    head_type = _choose_head_type(family, config, head_type)
    spec = family.read_spec(config, head_type)
    labels = config.get_labels() if head_type in LABELED_HEADS else []
    config.refuse_unread()
    return ModelPlan(family, head_type, spec, labels)


def load_hf_folder(folder: str | Path, *, head: str | None = None, new_head: HeadSpec | None = None) -> LoadedModel:
    """Load the model of a Hugging Face folder, in float32 and eval mode.

    head: the head type to build; by default the one the checkpoint was saved with.
    new_head: the spec of a new head, with initial weights, on the body of the checkpoint.
    """
    folder = Path(folder)
    plan = read_model_plan(folder, head if new_head is None else "hidden_states")
    model = build_with_weights(plan.spec, plan.family, plan.head_type, open_weights(folder), new_head)
    return LoadedModel(
        model,
        find_tokenizer(folder),
        _read_json(folder / "config.json"),
        folder,
        plan.head_type,
        plan.labels,
        _read_json(folder / "generation_config.json"),
        find_processor(folder),
    )


def _choose_head_type(family: Family, config: HFConfig, head: str | None) -> str:
    if head is None:
        return detect_head_type(family, config.get_list("architectures", str, []))
    if head not in family.head_names:
        raise BadSetting(
            _(
                "{name} has no head {head!r}; {nearest}",
                name=family.name,
                head=head,
                nearest=nearest(head, family.head_names),
            )
        )
    return head


def build_with_weights(
    spec: Model, family: Family, head_type: str, checkpoint: LazyStateDict, new_head: HeadSpec | None = None
) -> Transformer:
    """Build a model with the tensors of a checkpoint; the tensors it holds decide which weights are tied."""
    check_memory(spec, len(checkpoint), checkpoint.where)
    names = family.body_names + family.head_names[head_type]

    # A model on the meta device, its weights tied as in the checkpoint.
    model = replace(spec, tied=()).on_meta()
    sources = param_sources(names, checkpoint, dict(model.named_parameters()))
    spec = replace(spec, tied=detect_ties(model, spec.tied, checkpoint, sources))
    model.spec = spec
    model.tie_weights()

    # The checkpoint under parameter names, every name and shape checked.
    params = {name: p for name, p in model.named_parameters() if name in sources or not family.is_optional(name)}
    tied = {f"{path}.weight": _tied_owner(f"{path}.weight", spec) for path, _ in spec.tied}
    tensors = names.load(checkpoint, params, tied=tied, ignored_prefixes=(), **transform_sizes(spec))

    if new_head is not None:
        model = replace(spec, head=new_head).on_meta()
    load_tensors_into(model, tensors)
    return model.eval()


def param_sources(names: NameMap, checkpoint: LazyStateDict, params: Container[str] = ()) -> dict[str, str]:
    """Parameter -> name of its tensor in the checkpoint, for the parameters that the checkpoint has.

    params: those of the model, where a tensor's name depends on them.
    """
    sources: dict[str, str] = {}
    for checkpoint_name in checkpoint:
        match = names.match_checkpoint(checkpoint_name, params)
        if match is not None:
            sources |= dict.fromkeys(match.param_names(), checkpoint_name)
    return sources


def detect_ties(
    model: Transformer, declared: TiedPairs, checkpoint: LazyStateDict, sources: Mapping[str, str]
) -> TiedPairs:
    """The pairs of tied weights. The tensors decide, not the flag in config.json.

    Two tables of one shape are tied where the file holds only one of them, or both and they are equal.

    model: on the meta device, with nothing tied; declared: pairs the family would tie; sources: param_sources().
    """
    shapes = {path: tuple(m.weight.shape) for path, m in model.named_modules() if hasattr(m, "weight")}
    stored = {path: sources.get(f"{path}.weight") for path in TIEABLE_WEIGHTS if path in shapes}
    ties: list[tuple[str, str]] = []
    for path, name in list(stored.items())[1:]:
        owners = [owner for declared_path, owner in declared if declared_path == path]
        for base in dict.fromkeys([*owners, *INPUT_EMBEDDINGS]):
            if base == path or (base, path) in ties or shapes.get(base) != shapes[path]:
                continue
            base_name = stored[base]
            if name is None or base_name is None or torch.equal(checkpoint[name], checkpoint[base_name]):
                ties.append((path, base))
                stored[base] = base_name or name
                stored[path] = stored[base]
                break
    others = (pair for pair in declared if pair[0] not in TIEABLE_WEIGHTS)
    return (*ties, *(pair for pair in others if _is_one_tensor(pair, checkpoint, sources)))


def _is_one_tensor(pair: tuple[str, str], checkpoint: LazyStateDict, sources: Mapping[str, str]) -> bool:
    """Whether the file holds one tensor for both paths, or two that are equal."""
    names = [sources[f"{path}.weight"] for path in pair if f"{path}.weight" in sources]
    return len(names) < 2 or torch.equal(checkpoint[names[0]], checkpoint[names[1]])


def _tied_owner(path: str, spec: Model) -> str:
    """The name under which named_parameters() lists a tied tensor: the first of them."""
    tied = {f"{path}.weight": f"{owner}.weight" for path, owner in spec.tied}
    owner = path
    while owner in tied:
        owner = tied[owner]
    return owner


def transform_sizes(spec: Model) -> dict[str, int]:
    """The sizes that transforms of a name map need: heads and key/value heads."""
    attn = find_part(spec, Attention)
    assert attn is not None, "every family has attention"
    return {"heads": attn.heads, "kv_heads": attn.kv_heads or attn.heads}


def load_tensors_into(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Make the tensors a model's parameters: float32 ones stay memory-mapped, others are converted one by one.

    Parameters that the file does not hold (a new head, an optional bias) are initialized.
    """
    for name, _unused in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = load_tensor(tensors, name) if name in tensors else init_tensor(model, name)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value))
    model.tie_weights()
    init_buffers(model)


def init_tensor(model: Transformer, name: str) -> Tensor:
    """Initial values for one tensor of a model, by the rules of its spec."""
    module = model.get_submodule(name.rpartition(".")[0])
    like = model.get_parameter(name)
    if isinstance(module, NORMS):
        start = 0.0 if name.endswith("bias") or isinstance(module, OffsetRMSNormLayer) else 1.0
        return torch.full(like.shape, start)
    value = torch.empty(like.shape)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, (1,))))
    match_rule(name, model.spec.init_rules).fill(value, generator)
    return value


def load_tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """One tensor in float32; NaN and infinity are rejected."""
    stored = tensors[name]
    value = stored.to(torch.float32).contiguous()
    check_finite(value, name, getattr(tensors, "where", "the file"))
    if value.data_ptr() != stored.data_ptr() and isinstance(tensors, LazyStateDict):
        tensors.release(name)
    return value


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has none."""
    try:
        return load_tokenizer(folder)
    except NotFound:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path) if path.is_file() else {}


# --------------------------------------------------------------------------------------------------------------- saving


def save_hf_folder(loaded: LoadedModel, folder: str | Path) -> Path:
    """Write a Hugging Face folder, load it again and compare. The folder must be new or empty.

    The files are written to a temporary folder, compared, and then moved, so that an error leaves nothing behind.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(
            _("{folder}: it must be a new or empty folder, it holds files; choose another name", folder=folder)
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temp:
        temp_dir = Path(temp)
        _write_hf_files(loaded, temp_dir)
        check_round_trip(loaded.model, load_hf_folder(temp_dir, head=loaded.head).model, folder)
        folder.mkdir(exist_ok=True)
        weights_last = sorted(temp_dir.iterdir(), key=lambda path: path.name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME))
        for path in weights_last:
            os.replace(path, folder / path.name)
    return folder


def _write_hf_files(loaded: LoadedModel, folder: Path) -> None:
    """Write the files of a Hugging Face folder."""
    model_type = loaded.config["model_type"]
    family = FAMILIES[model_type]
    names = family.body_names + family.head_names[loaded.head]
    tensors: Mapping[str, Tensor] = names.export(ModelWeights(loaded.model), **transform_sizes(loaded.spec))
    if model_type in CONFIG_WRITERS:
        extra = CONFIG_WRITERS[model_type].extra_tensors(loaded.spec, loaded.config)
        if extra:
            tensors = dict(tensors) | extra
    save_weights(folder, tensors)
    files = {"config.json": loaded.config, "generation_config.json": loaded.generation_config}
    encoder_embed: Any = getattr(loaded.spec.encoder, "embed", None)
    if isinstance(encoder_embed, Frames):
        frames = 2 * (encoder_embed.position.max_positions or 1500)
        files[PROCESSOR_NAME] = feature_extractor_config(encoder_embed.mels, frames)
    for name, content in files.items():
        if content:
            with atomic_write(folder / name) as file:
                file.write(json.dumps(content, indent=2, ensure_ascii=False).encode())
    if loaded.tokenizer is not None:
        loaded.tokenizer.save(folder, token_types=getattr(encoder_embed, "token_types", 0) > 1)
    if loaded.processor is not None:
        loaded.processor.save(folder)


def check_round_trip(model: Transformer, reloaded: Transformer, folder: Path) -> None:
    """A model and its reloaded copy must have equal weights, bit for bit."""
    original = ModelWeights(model)
    copy = ModelWeights(reloaded)
    for name in original:
        if name not in copy or not torch.equal(original[name], copy[name]):
            raise BadFile(
                _(
                    "{folder}: {name} changed when it was written and read back; is the disk damaged?",
                    folder=folder,
                    name=name,
                )
            )


class ModelWeights(LazyStateDict):
    """Every weight of a model under its first path, in float32; quantized ones are dequantized on access."""

    def __init__(self, model: nn.Module):
        self._dense = {path: p.detach() for path, p in model.named_parameters()}
        quantized = quantized_layers(model)
        first_path = {}  # of tied layers only the first
        for path, module in reversed(list(quantized.items())):
            first_path[module.blocks.data_ptr()] = path
        self._quantized = {f"{path}.weight": quantized[path] for path in first_path.values()}

    def __getitem__(self, name: str) -> Tensor:
        return self._dense[name] if name in self._dense else self._quantized[name].weight

    def __iter__(self) -> Iterator[str]:
        return iter((*self._quantized, *self._dense))

    def __len__(self) -> int:
        return len(self._dense) + len(self._quantized)

    def meta_tensor(self, name: str) -> Tensor:
        if name in self._dense:
            return self._dense[name].to("meta")
        layer = self._quantized[name]
        return torch.empty(layer.rows, layer.columns, device="meta")
