"""A batch as tensors: what it counts, and a forward pass of a model on it.

A TensorBatch has the fields of TrainBatch: ids [B, Q], targets, and perhaps source [B, S], attention_mask,
source_attention_mask, document_ids, token_types, global_tokens, next_sentence_labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.data.collate import TrainBatch
from headwater.tasks.losses import count_targets

T = TypeVar("T")

TensorBatch: TypeAlias = Mapping[str, Tensor]
LossFn: TypeAlias = Callable[
    [Transformer, TensorBatch, float], Tensor
]  # (model, batch, label_smoothing) -> summed loss


class Ranks(Protocol):
    """The processes of a run (headwater.training.distributed)."""

    rank: int
    world_size: int

    def all_gather_object(self, value: T) -> list[T]:
        """The object of every rank."""
        ...


# (model, micro_batches, the context of the forward pass of one, ranks): adds what each micro-batch needs from the
# others, those of other ranks too
PrepareStep: TypeAlias = Callable[
    [Transformer, list[dict[str, Tensor]], Callable[[int], AbstractContextManager[object]], Ranks], None
]


def no_preparation(
    model: Transformer,
    micro_batches: list[dict[str, Tensor]],
    forward_context: Callable[[int], AbstractContextManager[object]],
    ranks: Ranks,
) -> None:
    """Nothing, where the loss of a micro-batch depends on it alone."""


def to_tensors(batch: TrainBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The arrays of a TrainBatch as tensors. A mask without padding is left out: attention is faster without it."""
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch)}
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items() if value is not None}
    masks = [name for name in ("attention_mask", "source_attention_mask") if name in tensors]
    unpadded = [name for name in masks if bool(tensors[name].all())]
    return {name: t.to(device, non_blocking=True) for name, t in tensors.items() if name not in unpadded}


def num_targets(batch: TensorBatch) -> int:
    """The number of targets of a batch (tokens or rows): the loss of a step is divided by it."""
    return int(count_targets(batch["targets"])) + len(batch.get("next_sentence_labels", ()))


def num_tokens(batch: TensorBatch) -> int:
    """The number of tokens of a batch, source and target, without padding: the measure of speed."""
    if "source" in batch:
        return _num_unmasked(batch["source"], batch.get("source_attention_mask")) + int(count_targets(batch["targets"]))
    return _num_unmasked(batch["ids"], batch.get("attention_mask"))


def _num_unmasked(ids: Tensor, attention_mask: Tensor | None) -> int:
    return ids.numel() if attention_mask is None else int(attention_mask.sum())


def forward_hidden(model: Transformer, batch: TensorBatch) -> tuple[Tensor, ModelInputs]:
    """The last hidden states [B, Q, D] of the output stack, before the head."""
    memory = None
    if "source" in batch:
        memory = model.encode(
            batch["source"],
            attention_mask=batch.get("source_attention_mask"),
            document_ids=batch.get("source_document_ids"),
        )
    inputs = model.inputs(batch["ids"], **_model_inputs(model, batch))
    return model.hidden_states(inputs, memory=memory), inputs


def forward_logits(model: Transformer, batch: TensorBatch) -> Tensor:
    """The output of the head of a model with one stack."""
    logits: Tensor = model(batch["ids"], **_model_inputs(model, batch))
    return logits


def _model_inputs(model: Transformer, batch: TensorBatch) -> dict[str, Any]:
    """What the output stack reads beside the ids. Global tokens are for models that have them."""
    names = ["attention_mask", "token_types", "document_ids"]
    stack = getattr(model, "output_stack", None)  # another module than a Transformer has none
    if "global_tokens" in batch and stack is not None and stack.uses_global_tokens:
        names.append("global_tokens")
    return {name: batch[name] for name in names if name in batch}
