"""LoRA, rsLoRA and DoRA in the layout of peft, which adapts whole modules of transformers.

Where such a module holds several layers of ours (GPT-2's c_attn is q, k and v), reading gives each of them A and its
own rows of B; writing stacks the As and puts the Bs on a diagonal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.core import Transformer
from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicModule, PublicNames, group_by_module
from headwater.families.hf_folder import LoadedModel
from headwater.families.peft_common import PREFIX, AdapterFile, PeftFiles, check_complete, group_tensors, read_saved
from headwater.families.peft_config import PeftConfig
from headwater.i18n import _
from headwater.io.files import quote
from headwater.quantization.layers import QuantizedModule
from headwater.tuning.embedding import LowRankTable
from headwater.tuning.lowrank import DoRA, LoRA, LowRank, LowRankDirection
from headwater.weights.safetensors import SafetensorsFile

TABLE_SUFFIXES = {".lora_embedding_A": "table_a", ".lora_embedding_B": "table_b", ".base_layer.weight": "base"}
LORA_SUFFIXES = {".lora_A.weight": "lora_a", ".lora_B.weight": "lora_b", ".lora_magnitude_vector": "magnitude"}


ByModule = dict[str, dict[str, Tensor]]  # tensors of a file by module and kind


class LowRankWeights(NamedTuple):
    """The tensors of one adapted module, and its scale s: W + s · B A."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float


def read_lora(names: PublicNames, loaded: LoadedModel, config: PeftConfig, file: SafetensorsFile) -> AdapterFile:
    by_module, saved = group_tensors(file, LORA_SUFFIXES | TABLE_SUFFIXES)
    tables = names.tables(loaded.model)
    known = [module.name for module in names.modules(loaded.model)]
    expected = config.targets([*known, *tables], names.model_type, "lora")
    dora = config.get("use_dora", bool, False)
    take_base_copies(names, loaded.model, by_module, file.where)
    of_tables = {name: parts for name, parts in by_module.items() if find_table(names, tables, name) is not None}
    of_layers = {name: parts for name, parts in by_module.items() if name not in of_tables}
    needed = {"lora_a", "lora_b", "magnitude"} if dora else {"lora_a", "lora_b"}
    check_complete(names, of_layers, [name for name in expected if name not in tables], needed, file.where)
    check_complete(names, of_tables, [name for name in expected if name in tables], {"table_a", "table_b"}, file.where)

    methods: dict[tuple[type[LoRA], int, float], list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for name, parts in of_layers.items():
        module = names.find_module(name)
        assert module is not None, "every module was expected"
        rank, alpha = _rank_and_alpha(config, name, parts, file.where)
        pieces = {kind: names.split_rows(module, t) for kind, t in parts.items() if kind != "lora_a"}
        for index, path in enumerate(module.paths):
            methods.setdefault((DoRA if dora else LoRA, rank, alpha), []).append(path)
            tensors[f"{path}.lora_a"] = parts["lora_a"].float()
            for kind, split in pieces.items():
                if split is None:
                    raise BadFile(_("{where}: {name} has the wrong number of rows", where=file.where, name=quote(name)))
                tensors[f"{path}.{kind}"] = split[index].float()
    for name, parts in of_tables.items():
        path = str(find_table(names, tables, name))
        weights = {"lora_a": parts["table_a"].float(), "lora_b": parts["table_b"].float()}
        rank, alpha = _rank_and_alpha(config, name, weights, file.where)
        methods.setdefault((LoRA, rank, alpha), []).append(path)
        tensors |= {f"{path}.{kind}": tensor for kind, tensor in weights.items()}
    lora = [method(rank, alpha, tuple(paths)) for (method, rank, alpha), paths in methods.items()]
    full, saved_tensors = read_saved(names, saved, file.where)
    return AdapterFile((*lora, *full), tensors | saved_tensors)


def find_table(names: PublicNames, tables: Mapping[str, str], name: str) -> str | None:
    """Our path of the table of tokens of a public name, with or without the prefix of the body; else None."""
    paths = names.paths_of(name)
    is_table = any(name == known or known.endswith(f".{name}") or name.endswith(f".{known}") for known in tables)
    return paths[0] if is_table and paths and paths[0] in tables.values() else None


def take_base_copies(names: PublicNames, model: Transformer, by_module: ByModule, where: object) -> None:
    """Beside an embedding or an output layer peft stores the weight of the base: it must be ours, and is taken out."""
    for name in [name for name, parts in by_module.items() if "base" in parts]:
        copy = by_module[name].pop("base")
        if not by_module[name]:
            del by_module[name]
        paths = names.paths_of(name)
        layer: Any = model.get_submodule(paths[0]) if len(paths) == 1 else None
        is_packed = isinstance(layer, QuantizedModule)
        same_shape = layer is not None and layer.weight.shape == copy.shape
        if not same_shape or not (is_packed or torch.equal(layer.weight, copy.to(layer.weight.dtype))):
            raise BadFile(
                _(
                    "{where}: {name} was trained or resized beside the adapter, its weight is not that of this base; "
                    "use that base",
                    where=where,
                    name=quote(name),
                )
            )


def _rank_and_alpha(config: PeftConfig, name: str, parts: Mapping[str, Tensor], where: object) -> tuple[int, float]:
    """The rank and the alpha of a module; that of rsLoRA is folded into it: alpha / √r = (alpha √r) / r."""
    a = parts["lora_a"]
    b = parts["lora_b"]
    rank = int(config.pattern_value("rank_pattern", name, config.get("r", int, 8)))
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise BadFile(
            _(
                "{where}: {name} must have rank {rank}, its tensors are {a} and {b}",
                where=where,
                name=quote(name),
                rank=rank,
                a=list(a.shape),
                b=list(b.shape),
            )
        )
    alpha = config.pattern_value("alpha_pattern", name, config.get("lora_alpha", (int, float), 8))
    return rank, alpha * rank**0.5 if config.get("use_rslora", bool, False) else alpha


def lora_files(names: PublicNames, model: Transformer, changes: Mapping[str, LowRank | LowRankTable]) -> PeftFiles:
    """The config and the tensors of low-rank changes."""
    layers = {path: change for path, change in changes.items() if isinstance(change, LowRank)}
    tables = {path: change for path, change in changes.items() if isinstance(change, LowRankTable)}
    dora = any(isinstance(change, LowRankDirection) for change in layers.values())
    if dora and tables:
        raise BadSetting(_("export: peft cannot have LoRA of a table of tokens beside DoRA; use LoRA for both"))
    modules = {m.name: join_low_rank(names, m, layers) for m in group_by_module(names, list(layers))}
    if not modules and not tables:
        raise BadSetting(_("export: the adapter changes no linear layer; choose another layout"))
    tensors: dict[str, Tensor] = {}
    for module, weights in modules.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = weights.a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = weights.b.contiguous()
        if weights.magnitude is not None:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = weights.magnitude.contiguous()
    for module, path in names.tables(model).items():
        if path in tables:
            table = tables[path]
            modules[module] = LowRankWeights(table.lora_a.detach(), table.lora_b.detach(), None, table.scale)
            tensors[f"{PREFIX}{module}.lora_embedding_A"] = modules[module].a.contiguous()
            tensors[f"{PREFIX}{module}.lora_embedding_B"] = modules[module].b.contiguous()

    # The most frequent rank and alpha stand for all, the others are patterns.
    ranks = {module: len(weights.a) for module, weights in modules.items()}
    alphas = {module: weights.scale * len(weights.a) for module, weights in modules.items()}
    ((rank, _count),) = Counter(ranks.values()).most_common(1)
    ((alpha, _count),) = Counter(alphas.values()).most_common(1)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {module: value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "use_dora": dora,
        "bias": "none",
    }
    return PeftFiles(config, tensors)


@torch.no_grad()
def join_low_rank(names: PublicNames, module: PublicModule, changes: Mapping[str, LowRank]) -> LowRankWeights:
    """The low-rank change of a public module, from those of our layers in it; a layer without one adds nothing."""
    here = [changes.get(path) for path in module.paths]
    present = [change for change in here if change is not None]
    first = present[0]
    outs = _row_counts(module, here)
    same_a = len(present) == len(here) and all(
        torch.equal(change.lora_a, first.lora_a) and change.scale == first.scale for change in present
    )
    if same_a:
        a = first.lora_a.detach()
        blocks = [change.lora_b.detach() for change in present]
    else:
        a = torch.cat([change.lora_a.detach() for change in present])
        blocks = [torch.zeros(out, len(a)) for out in outs]
        column = 0
        for block, change in zip(blocks, here, strict=True):
            if change is not None:
                r = len(change.lora_a)
                block[:, column : column + r] = change.lora_b.detach() * (change.scale / first.scale)
                column += r
    magnitude = None
    if isinstance(first, LowRankDirection):
        if len(present) != len(here):
            raise BadSetting(_("export: {name} must be adapted whole by DoRA: its q, k and v", name=module.name))
        lengths = [change.magnitude.detach() for change in present if isinstance(change, LowRankDirection)]
        magnitude = names.join_rows(module, lengths)
    return LowRankWeights(a, names.join_rows(module, blocks), magnitude, first.scale)


def _row_counts(module: PublicModule, changes: Sequence[LowRank | None]) -> list[int]:
    """The rows of each of our layers in a module, which is split evenly: one that is not adapted has as many."""
    known = [len(change.lora_b) for change in changes if change is not None]
    return [known[0] if change is None else len(change.lora_b) for change in changes]
