"""Audio classification: a label for a recording, by Whisper's encoder, tuned or small and from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.audio.augment import SoundAugmenter
from headwater.audio.files import read_audio
from headwater.audio.frames import Frames
from headwater.audio.mel import FRAMES_PER_SECOND, log_mel
from headwater.audio.sound_cache import Clip
from headwater.core import Model
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens, TrainBatch, label_ids, label_names
from headwater.data.examples import EXAMPLE_FORMATS
from headwater.data.recordings import SOUNDS, LabeledSound
from headwater.errors import BadInput
from headwater.families.config_writers import find_part
from headwater.families.whisper import read_whisper_spec
from headwater.i18n import _
from headwater.tasks.base import TaskConfig, TaskData, TaskMetadata
from headwater.tasks.batch import TensorBatch
from headwater.tasks.labels import LabelTask, label_probabilities
from headwater.tasks.sounds import (
    MELS,
    SCRATCH_INIT,
    SoundDataset,
    Windows,
    adapt_window,
    clips_cut_to_window,
    load_windows,
)
from headwater.text.tokenizer import Tokenizer
from headwater.weights.hf_config import HFConfig


class SoundClassDataset(SoundDataset):
    """Recordings and their classes."""

    def __init__(self, windows: Windows, labels: np.ndarray, special_tokens: SpecialTokens, config: TaskConfig) -> None:
        super().__init__(windows, np.ones(len(labels), np.int64), special_tokens, config)
        self.labels = labels

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        slots = np.zeros((len(examples), self.windows.slots), np.int64)
        sounds = self.sound_arrays(examples, epoch)
        return TrainBatch(slots, np.ones(slots.shape, bool), self.labels[examples], **sounds)


class AudioClassification(LabelTask[LabeledSound]):
    """Classes of recordings, from a folder for each class or a table of paths and labels."""

    name = SOUNDS
    example_format = EXAMPLE_FORMATS[SOUNDS]
    augmentable = True
    reads_text = False
    default_position = "learned"
    lr_factor = 0.5

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[LabeledSound],
        valid: Sequence[LabeledSound],
        labels: Sequence[str] = (),
    ) -> TaskData:
        names = tuple(labels) or label_names(row.label for row in train)
        if len(names) < 2:
            raise BadInput(
                _(
                    "classification needs at least two labels, all recordings have {name!r}; give a folder for each "
                    "class",
                    name=names[0],
                )
            )
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        augmenter = SoundAugmenter.from_settings(config.augment, config.seed)
        notes: list[str] = []
        seconds = 0.0  # chosen from the recordings to learn from

        def build(split: str, rows: Sequence[LabeledSound]) -> tuple[SoundClassDataset, list[LabeledSound]]:
            clips = [Clip(row.path) for row in rows]
            windows, readable = load_windows(config, clips, split, seconds, augmenter, notes, fit=clips_cut_to_window)
            kept = [rows[i] for i in readable]
            classes = label_ids([row.label for row in kept], names)
            return SoundClassDataset(windows, classes, special_tokens, config), kept

        train_set, _train_rows = build("train", train)
        seconds = train_set.windows.seconds
        valid_set, valid_rows = build("valid", valid)
        tokens = int(train_set.lengths.sum())
        data = TaskData(self, tokenizer, train_set, valid_set, valid_rows, names, notes=notes, num_tokens=tokens)
        data.settings = {"window_seconds": seconds}
        data.window_seconds = seconds
        return data

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        """Whisper's encoder in the sizes of a config, and the head of a sound classifier."""
        sizes: dict[str, Any] = {
            "d_model": config.d_model,
            "vocab_size": 1,
            "encoder_layers": config.layers,
            "encoder_attention_heads": config.heads,
            "encoder_ffn_dim": config.d_ff,
            "max_source_positions": round(config.window_seconds * FRAMES_PER_SECOND / 2) or 1500,
            "dropout": config.dropout,
            "id2label": {str(n): str(n) for n in range(num_labels)},
        }
        return replace(read_whisper_spec(HFConfig(sizes), "audio_classification"), init=SCRATCH_INIT)

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        return adapt_window(model, config)

    # ------------------------------------------------------------------------------------------------------ loss

    def logits(self, model: Transformer, batch: TensorBatch) -> Tensor:
        logits: Tensor = model(batch["signal"])
        return logits.float()

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return F.cross_entropy(
            self.logits(model, batch), batch["targets"], reduction="sum", label_smoothing=label_smoothing
        )

    # ----------------------------------------------------------------------------------------------- predictions

    @torch.no_grad()
    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str | Path],
        *args: Any,
        **options: Any,
    ) -> list[dict[str, float]]:
        """For each recording the labels with their probabilities, the most probable first."""
        logits = [model(sound_signal(model, path)) for path in inputs]
        return label_probabilities(torch.cat(logits), metadata["labels"])

    @property
    def command(self) -> str:
        return "headwater classify {run} recording.wav"

    def format_input(self, example: LabeledSound) -> str:
        return "/".join(Path(example.path).parts[-2:])


def sound_signal(model: Transformer, path: str | Path) -> Tensor:
    """The first window of a recording as the model reads it, [1, mels, frames]; the rest is left out."""
    embed = find_part(model.spec.encoder, Frames)
    mels, positions = (MELS, 1500) if embed is None else (embed.mels, embed.position.max_positions or 1500)
    return log_mel(read_audio(path), mels, 2 * positions / FRAMES_PER_SECOND)[None]
