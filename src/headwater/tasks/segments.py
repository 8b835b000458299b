"""Language modelling in segments with a memory (Transformer-XL): the rows of a batch continue those of the one before.

The text is cut into as many long rows as a batch has. Step t reads segment t of every row, and each layer attends to
what it remembers of the segments before; an epoch begins with an empty memory.

    text a b c d e f g h i j k l    2 rows, segments of 2    step 0: a b   step 1: c d   step 2: e f
                                                                     g h           i j           k l

    headwater train text.txt --objective segments --attention xl:memory=256 --context-length 128
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from headwater.core.model import Model, Transformer
from headwater.data.collate import SpecialTokens, TrainBatch, causal_batch
from headwater.data.dataset import IndexBatch
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.tasks.base import TaskConfig
from headwater.tasks.batch import TensorBatch
from headwater.tasks.language_model import CausalLM, CausalLMDataset, lm_head_loss
from headwater.variants.transformer_xl import SegmentMemory, memory_size, segment_memory

MIN_SEGMENTS = 4  # of a row, where the text is long enough; else a batch has fewer rows


class SegmentDataset(CausalLMDataset):
    """Segments of continuing rows. Example e is segment e // rows of row e % rows.

    number: of this dataset, by which the loss finds the memory of its rows (DATASETS). memories: what was remembered
    after the last segment, by the first row of each micro-batch.
    """

    one_process = True

    def __init__(
        self, stream: np.ndarray, context_length: int, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        segments = (len(stream) - 1) // context_length
        self.num_rows = max(1, min(batch_tokens // context_length, segments // MIN_SEGMENTS))
        super().__init__(stream, context_length, special_tokens, self.num_rows * context_length, seed)
        self.row_length = (len(stream) - 1) // self.num_rows
        self.num_segments = self.row_length // context_length
        self.lengths = np.full((self.num_rows * self.num_segments, 1), context_length)
        self.memories: dict[int, SegmentMemory] = {}
        self.saved: dict[int, dict[str, Tensor]] = {}  # of a checkpoint, until the model reads them
        self.number = next(_numbers)
        DATASETS[self.number] = self

    def batches_from(self, position: int) -> Iterator[IndexBatch]:
        """The batches in the order of the text."""
        for step in itertools.count(position // self.num_rows):
            epoch, segment = divmod(step, self.num_segments)
            yield IndexBatch(self._segment(segment), epoch, step * self.num_rows)

    def eval_batches(self, max_examples: int, max_tokens: int = 4096) -> Iterator[np.ndarray]:
        """The first segments, in the order of the text."""
        for segment in range(min(self.num_segments, max(1, max_examples // self.num_rows))):
            yield self._segment(segment)

    def _segment(self, segment: int) -> np.ndarray:
        return segment * self.num_rows + np.arange(self.num_rows)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        segments, rows = np.divmod(examples, self.num_rows)
        starts = rows * self.row_length + segments * self.context_length
        ids = self.stream[starts[:, None] + np.arange(self.context_length + 1)].astype(np.int64)
        place = np.stack((np.full_like(rows, self.number), rows, segments), 1)
        return replace(causal_batch(ids), segments=place)

    # --------------------------------------------------------------------------------------------------- the memory

    def memory(self, model: Transformer, first_row: int, num_rows: int, segment: int) -> SegmentMemory:
        """What is remembered of these rows: nothing at their first segment, or where other rows were read with them."""
        if first_row in self.saved:
            self.memories[first_row] = segment_memory(model)
            self.memories[first_row].load(self.saved.pop(first_row))
        memory = self.memories.get(first_row)
        if memory is None or segment == 0 or memory.num_rows not in (None, num_rows):
            memory = segment_memory(model)
            self.memories[first_row] = memory
        return memory

    def state_arrays(self) -> dict[str, np.ndarray]:
        saved = {row: memory.tensors() for row, memory in self.memories.items()}
        return {
            f"{row}.{name}": tensor.cpu().numpy().copy()
            for row, tensors in saved.items()
            for name, tensor in tensors.items()
        }

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.memories.clear()
        self.saved.clear()
        for key, array in arrays.items():
            row, _dot, name = key.partition(".")
            self.saved.setdefault(int(row), {})[name] = torch.from_numpy(array)


_numbers = itertools.count()
DATASETS: WeakValueDictionary[int, SegmentDataset] = WeakValueDictionary()  # by number


class SegmentedLM(CausalLM):
    """Next-token prediction in segments, with a memory of those before (Transformer-XL)."""

    objective = "segments"
    dataset_type = SegmentDataset

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        spec = super().model_spec(config, vocab_size, num_labels)
        if not memory_size(spec.on_meta()):
            raise BadSetting(
                _(
                    "objective segments: the model must have a memory, attention {attention} has none; "
                    "use --attention xl:memory=256",
                    attention=config.attention,
                )
            )
        return spec

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        number, first_row, segment = batch["segments"][0].tolist()
        memory = DATASETS[number].memory(model, first_row, len(batch["ids"]), segment)
        inputs = model.inputs(batch["ids"])
        hidden_states = model.hidden_states(inputs, cache=memory)
        return lm_head_loss(model.head, hidden_states, inputs, batch["targets"], label_smoothing)
