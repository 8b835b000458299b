"""Public model folders in and out: config.json, model.safetensors (or shards), tokenizer files.

load: config -> parts -> a model without memory -> the file's tensors, mapped, put in place one by one. Nothing is half
loaded: every name, shape and kind has been checked before the first tensor is read.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.core import Model, Transformer
from headwater.core.init import constants, fresh
from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.families.family import FAMILIES, Family, find, head_kind
from headwater.families.writer import WRITERS
from headwater.fast.packed import Packed
from headwater.text.load import load as load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.weights.files import atomic, read_bounded
from headwater.weights.finite import check_finite
from headwater.weights.room import check_room
from headwater.weights.settings import MOST_BYTES, Settings
from headwater.weights.shards import INDEX, WHOLE, open_folder, write_folder
from headwater.weights.strict_json import parse_object
from headwater.weights.tensors import Tensors

INPUTS = ("decoder.embed.tokens", "encoder.embed.tokens")
TABLES = ("encoder.embed.tokens", "decoder.embed.tokens", "head.out", "head.language.out")  # which may be one table
Pairs = tuple[tuple[str, str], ...]


@dataclass
class Loaded:
    """A model with what belongs to it. config is config.json as it was read; it is written back by save()."""

    model: Transformer
    tokenizer: Any
    config: dict[str, Any]
    where: Path
    head: str = ""
    labels: list[str] = field(default_factory=list)
    generation: dict[str, Any] = field(
        default_factory=dict
    )  # generation_config.json: it wins over config where both say

    @property
    def spec(self) -> Model:
        return self.model.spec

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: eos of the file, or of the tokenizer."""
        said = self.said("eos_token_id")
        if said is None and self.tokenizer is not None:
            said = self.tokenizer.eos
        return tuple(said) if isinstance(said, list) else () if said is None else (said,)

    @property
    def start(self) -> int | None:
        """The token a decoder begins with, where there is an encoder."""
        for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(self.said(key), int):
                return self.said(key)
        return None

    @property
    def longest(self) -> int | None:
        """How many places the model was made for, where it has an end."""
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(self.said(key), int):
                return self.said(key)
        return None

    def said(self, key: str) -> Any:
        value = self.generation.get(key)
        return self.config.get(key) if value is None else value


class Plan(NamedTuple):
    """What config.json alone tells."""

    relation: Family
    head: str
    spec: Model
    labels: list[str]


def plan(folder: Path, head: str | None = None) -> Plan:
    """Read config.json. Every setting that may change what the model computes has been read, or is refused by name."""
    if not (folder / "config.json").is_file():
        raise NotFound(f"{folder}: a model folder must have a config.json, it has none; is this the right folder?")
    c = Settings.read(folder / "config.json")
    relation = find(c.word("model_type"), c.where)
    kind = _kind(relation, c, head)
    spec = relation.read(c, kind)
    labels = c.labels() if kind in ("class", "tags") else []
    c.done()
    return Plan(relation, kind, spec, labels)


def load_folder(folder: str | Path, *, head: str | None = None, new_head: Any = None) -> Loaded:
    """The model in a public folder, in float32 and eval mode.

    head: which of the family's heads to build; the one the file was saved with where it is not said.
    new_head: a head part of your own, with first weights, on the body in the file.
    """
    folder = Path(folder)
    relation, kind, spec, labels = plan(folder, head if new_head is None else "states")
    file = open_folder(folder)
    model = build_from(spec, relation, kind, file, new_head)
    config = _json(folder / "config.json")
    return Loaded(model, tokenizer_of(folder), config, folder, kind, labels, _json(folder / "generation_config.json"))


def _kind(relation: Family, c: Settings, head: str | None) -> str:
    if head is None:
        return head_kind(relation, c.items("architectures", str, []))
    if head not in relation.heads:
        raise BadSetting(f"{relation.name} has no head {head!r}; {nearest(head, relation.heads)}")
    return head


def build_from(spec: Model, relation: Family, kind: str, file: Tensors, new_head: Any = None) -> Transformer:
    """The model of a spec with the tensors of a file; weight tying is decided by what the file holds."""
    check_room(spec, len(file), file.where)
    names = relation.names + relation.heads[kind]
    sources = {ours: theirs for theirs in file if (found := names.find_theirs(theirs)) for ours in found.ours()}
    skeleton = replace(spec, tied=()).skeleton()
    skeleton.spec = spec = replace(spec, tied=ties(skeleton, spec.tied, file, sources))
    skeleton.tie()
    wanted = {name: p for name, p in skeleton.named_parameters() if name in sources or name not in relation.optional}
    second = {f"{path}.weight": _home(f"{path}.weight", spec) for path, _ in spec.tied}
    reading = names.read(file, wanted, tied=second, spare=(), **sizes(spec))
    if new_head is not None:
        skeleton = replace(spec, head=new_head).skeleton()
    fill(skeleton, reading)
    return skeleton.eval()


def ties(model: Transformer, meant: Pairs, file: Tensors, sources: Mapping[str, str]) -> Pairs:
    """Tied are two tables of one shape of which the file holds only one, or both and equal. The flag is not asked.

    model: its skeleton with nothing tied; meant: pairs the family would tie; sources: our names that the file holds,
    and its names for them. A table the file lacks is stood for by the one it is tied to.
    """
    shapes = {path: tuple(m.weight.shape) for path, m in model.named_modules() if hasattr(m, "weight")}
    holder = {path: sources.get(f"{path}.weight") for path in TABLES if path in shapes}
    decided: list[tuple[str, str]] = []
    for path, theirs in list(holder.items())[1:]:
        for base in dict.fromkeys([*(home for one, home in meant if one == path), *INPUTS]):
            if base == path or (base, path) in decided or shapes.get(base) != shapes[path]:
                continue
            if theirs is None or holder[base] is None or torch.equal(file[theirs], file[str(holder[base])]):
                decided.append((path, base))
                holder[base] = holder[path] = holder[base] or theirs
                break
    return tuple(decided)


def _home(path: str, spec: Model) -> str:
    """The name under which a tied tensor is listed: the first that named_parameters() meets."""
    target, tied = path, {f"{a}.weight": f"{b}.weight" for a, b in spec.tied}
    while target in tied:
        target = tied[target]
    return target


def sizes(spec: Model) -> dict[str, int]:
    """What changes in a name table go by: heads and key/value heads."""
    stack: Any = spec.decoder if spec.decoder is not None else spec.encoder
    attn = stack.layers[0].branches[0].layer
    return {"heads": attn.heads, "kv_heads": attn.kv_heads or attn.heads}


def fill(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors in place: a float32 one as it is mapped, others turned into float32 one by one.

    What the file does not hold (a new head, an optional bias) gets its first values.
    """
    for name, _ in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        value = value_of(tensors, name) if name in tensors else fresh(model, name)
        setattr(model.get_submodule(owner), last, nn.Parameter(value))
    model.tie()
    constants(model)


def value_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """One tensor in float32; a weight that is no number is refused."""
    given = tensors[name]
    value = given.to(torch.float32).contiguous()
    check_finite(value, name, getattr(tensors, "where", "the file"))
    if value.data_ptr() != given.data_ptr() and isinstance(tensors, Tensors):
        tensors.release(name)
    return value


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """None where the folder has no tokenizer: a model of something else than text, or a body alone."""
    try:
        return load_tokenizer(folder)
    except NotFound:
        return None


def _json(path: Path) -> dict[str, Any]:
    return parse_object(read_bounded(path, MOST_BYTES), path) if path.is_file() else {}


# ------------------------------------------------------------------------------------------------------------- save


def save_folder(loaded: Loaded, folder: str | Path) -> Path:
    """Write the public layout, read it again and compare. The folder must not be there yet, or be empty.

    All is written aside and put in place when it has been compared, so a fault leaves nothing behind.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(f"{folder}: it must be a new or empty folder, it holds files; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as aside:
        made = Path(aside)
        _write_public(loaded, made)
        compare(loaded.model, load_folder(made, head=loaded.head).model, folder)
        folder.mkdir(exist_ok=True)
        for path in sorted(made.iterdir(), key=lambda path: path.name in (WHOLE, INDEX)):  # the weights last
            os.replace(path, folder / path.name)
    return folder


def _write_public(loaded: Loaded, folder: Path) -> None:
    model_type = loaded.config["model_type"]
    relation = FAMILIES[model_type]
    names = relation.names + relation.heads[loaded.head]
    tensors: Mapping[str, Tensor] = names.write(ModelWeights(loaded.model), **sizes(loaded.spec))
    if model_type in WRITERS and (fixed := WRITERS[model_type].constants(loaded.spec, loaded.config)):
        tensors = dict(tensors) | fixed
    write_folder(folder, tensors)
    for name, content in (("config.json", loaded.config), ("generation_config.json", loaded.generation)):
        if content:
            with atomic(folder / name) as file:
                file.write(json.dumps(content, indent=2, ensure_ascii=False).encode())
    if loaded.tokenizer is not None:
        embed: Any = getattr(loaded.spec.encoder, "embed", None)
        loaded.tokenizer.save(folder, token_types=getattr(embed, "kinds", 0) > 1)


def compare(model: Transformer, again: Transformer, folder: Path) -> None:
    """A model and what was read back of it must be equal, number for number."""
    ours, read = ModelWeights(model), ModelWeights(again)
    for name in ours:
        if name not in read or not torch.equal(ours[name], read[name]):
            raise BadFile(f"{folder}: {name} reads back changed; is the disk sound?")


class ModelWeights(Tensors):
    """Every weight of a model under its first path, in float32; packed ones are widened when they are asked for."""

    def __init__(self, model: nn.Module):
        self._plain = {path: p.detach() for path, p in model.named_parameters()}
        packed = {path: module for path, module in model.named_modules() if isinstance(module, Packed)}
        first = {module.blocks.data_ptr(): path for path, module in reversed(list(packed.items()))}  # tied: once
        self._packed = {f"{path}.weight": packed[path] for path in first.values()}

    def __getitem__(self, name: str) -> Tensor:
        return self._plain[name] if name in self._plain else self._packed[name].weight

    def __iter__(self) -> Iterator[str]:
        return iter((*self._packed, *self._plain))

    def __len__(self) -> int:
        return len(self._plain) + len(self._packed)

    def outline(self, name: str) -> Tensor:
        if name in self._plain:
            return self._plain[name].to("meta")
        return torch.empty(self._packed[name].rows, self._packed[name].columns, device="meta")
