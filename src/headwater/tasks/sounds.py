"""Datasets of recordings: windows, spectrograms from the cache or of changed samples, states of a frozen encoder."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headwater.audio.augment import SoundAugmenter
from headwater.audio.frames import Frames, SinusoidTable, slots
from headwater.audio.mel import FRAMES_PER_SECOND, SAMPLE_RATE, LogMel
from headwater.audio.sound_cache import CachedRows, Clip, DecodedClips, cached_rows, load_clips
from headwater.core import Normal, Xavier
from headwater.core.init import InitRules
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens
from headwater.data.dataset import Dataset
from headwater.errors import BadInput, BadSetting
from headwater.families.load import load_spec
from headwater.families.whisper import FRAMES_PER_SLOT, cut_window, frame_slots, window_slots
from headwater.i18n import _
from headwater.tasks.task_config import TaskConfig

MELS = 80
# Of models from scratch. With Whisper's 0.02, made for wide layers, the positions of narrow ones drown the spectrogram.
SCRATCH_INIT: InitRules = (
    ("encoder.embed.position.*", SinusoidTable()),
    ("*.tokens.weight", Normal(0.02)),
    ("*.table.weight", Normal(0.02)),
    ("*", Xavier()),
)
WHISPER_SECONDS = 30.0
SHORTEST_WINDOW = 0.5
MIN_WINDOWS = 8  # that fit into a batch, whatever batch_tokens says
TAIL_FRAMES = 4  # after the last sample: the Fourier windows of some still reach it, the last is silence
ENCODER_BATCH = 4


class Windows:
    """The recordings of a split as spectrograms [mels, frames] of one length, silence after each."""

    def __init__(self, clips: DecodedClips, seconds: float, mels: int, augmenter: SoundAugmenter | None = None) -> None:
        self.clips = clips
        self.seconds = seconds
        self.frames = round(seconds * FRAMES_PER_SECOND)
        self.mels = mels
        self.augmenter = augmenter
        self.lengths = np.minimum(clips.samples.lengths // (SAMPLE_RATE // FRAMES_PER_SECOND), self.frames)
        self.cache: CachedRows | None = None

    def __len__(self) -> int:
        return len(self.clips.samples)

    def take_rows(self, rows: np.ndarray) -> Windows:
        """The windows of some of the recordings."""
        return Windows(take_clips(self.clips, rows), self.seconds, self.mels, self.augmenter)

    @property
    def slots(self) -> int:
        """The encoder states of a window."""
        return slots(self.frames)

    def take(self, examples: np.ndarray, epoch: int) -> np.ndarray:
        """[B, mels, frames] the spectrograms of examples, changed as this epoch draws."""
        return torch.stack([self._window(int(index), epoch) for index in examples]).numpy()

    def _window(self, index: int, epoch: int) -> Tensor:
        augmenter = self.augmenter
        if augmenter is None or not augmenter.changes_samples:
            mel = self._cached_mel(index)
            frames = int(self.lengths[index])
        else:
            clip = self.clips.row(index)[: round(self.seconds * SAMPLE_RATE)]
            samples = augmenter.change_samples(clip, index, epoch)
            mel = self._mel_of(samples)
            frames = min(len(samples) * FRAMES_PER_SECOND // SAMPLE_RATE, self.frames)
        mel = pad_mel(mel, self.frames)
        return mel if augmenter is None else augmenter.change_mel(mel, max(frames, 1), index, epoch)

    def _mel_of(self, samples: Tensor) -> Tensor:
        """The spectrogram [mels, n] of samples up to where silence begins."""
        spectrogram = LogMel(samples, self.mels)
        return spectrogram.window(0, min(spectrogram.frames + TAIL_FRAMES, self.frames))

    def _cached_mel(self, index: int) -> Tensor:
        if self.cache is None:
            key = f"{self.clips.samples.key}-mel{self.mels}-{self.frames}"
            rows = (self._mel_of(self.clips.row(row)).T.numpy() for row in range(len(self)))
            self.cache = cached_rows(key, lambda: rows, np.float16, self.mels)
        return torch.from_numpy(self.cache[index].astype(np.float32)).T


def pad_mel(mel: Tensor, frames: int) -> Tensor:
    """A spectrogram [mels, n] followed by silence, which is its lowest value: the floor of its dynamic range."""
    return torch.nn.functional.pad(mel[:, :frames], (0, max(0, frames - mel.shape[1])), value=float(mel.min()))


class SoundDataset(Dataset):
    """Recordings: their lengths are encoder states and tokens. encoder_states: of a frozen encoder, once computed."""

    def __init__(self, windows: Windows, tokens: np.ndarray, special_tokens: SpecialTokens, config: TaskConfig) -> None:
        lengths = np.stack((np.full(len(windows), windows.slots), tokens), 1)
        smallest = MIN_WINDOWS * int(lengths.sum(1).max())
        super().__init__(lengths, special_tokens, max(config.batch_tokens, smallest), config.seed)
        self.windows = windows
        self.encoder_states: CachedRows | None = None

    def sound_arrays(self, examples: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
        """The fields of a TrainBatch that the encoder reads, or its states."""
        if self.encoder_states is None:
            return {"signal": self.windows.take(examples, epoch)}
        states = [np.asarray(self.encoder_states[int(index)], np.float32) for index in examples]
        return {"encoder_states": np.stack(states)}


# ------------------------------------------------------------------------------------------------------- frozen encoder


def cache_encoder_states(model: Transformer, datasets: Sequence[SoundDataset], config: TaskConfig) -> float:
    """Compute what a frozen encoder makes of all recordings, unless the cache has it. Returns the gigabytes."""
    encoder = model.encoder
    assert encoder is not None
    fingerprint = _fingerprint(encoder.state_dict(), config.dtype)
    size = 0
    for dataset in datasets:
        windows = dataset.windows
        key = f"{windows.clips.samples.key}-states{windows.frames}-{fingerprint}"
        rows = partial(_encoder_rows, model, windows, config.dtype)
        dataset.encoder_states = cached_rows(key, rows, np.float16, encoder.spec.d_model)
        size += dataset.encoder_states.values.nbytes
    return size / 1e9


@torch.no_grad()
def _encoder_rows(model: Transformer, windows: Windows, dtype: str) -> Iterator[np.ndarray]:
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    for first in range(0, len(windows), ENCODER_BATCH):
        mel = torch.from_numpy(windows.take(np.arange(first, min(first + ENCODER_BATCH, len(windows))), 0)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            states = model.encode(mel).hidden_states
        assert states is not None
        yield from states.float().cpu().numpy()
    model.train(training)


def _fingerprint(tensors: dict[str, Tensor], dtype: str) -> str:
    """A hash of the weights of an encoder, and of the dtype it computes in."""
    digest = hashlib.sha256(str(dtype).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def is_encoder_frozen(model: Transformer) -> bool:
    """Whether nothing in the encoder learns."""
    return model.encoder is not None and not any(p.requires_grad for p in model.encoder.parameters())


# -------------------------------------------------------------------------------------------------------------- windows


def adapt_window(model: Transformer, config: TaskConfig) -> Transformer:
    """A pretrained model with the window of --window-seconds; with its own where that is 0."""
    window = round(round(config.window_seconds, 1) * FRAMES_PER_SECOND) // FRAMES_PER_SLOT
    return cut_window(model, window) if 0 < window < window_slots(model.spec) else model


def frames_embedding(config: TaskConfig) -> Frames | None:
    """The spectrogram embedding of the model of --init-from; None where a model is trained from scratch."""
    if not config.init_from:
        return None
    spec = load_spec(config.init_from)
    if spec.encoder is None or not isinstance(spec.encoder.embed, Frames):
        raise BadSetting(
            _(
                "--init-from {init_from}: it must be a model that reads sound; start from whisper-base or tiny.en",
                init_from=config.init_from,
            )
        )
    return spec.encoder.embed


def window_seconds(config: TaskConfig, clips: DecodedClips, augmenter: SoundAugmenter, notes: list[str]) -> float:
    """What the model hears at once: Whisper's 30 seconds, or from scratch as long as the longest recording."""
    embed = frames_embedding(config)
    if embed is not None:
        longest_window = FRAMES_PER_SLOT * frame_slots(embed) / FRAMES_PER_SECOND
        if config.window_seconds > longest_window:
            raise BadSetting(
                _(
                    "--window-seconds must be at most {most:g}, what {init_from} hears at once, got {seconds:g}",
                    most=longest_window,
                    init_from=config.init_from,
                    seconds=config.window_seconds,
                )
            )
        return round(config.window_seconds, 1) or longest_window
    if config.window_seconds:
        return round(config.window_seconds, 1)
    longest = int(clips.samples.lengths.max()) / SAMPLE_RATE * augmenter.longest + augmenter.shift
    seconds = min(WHISPER_SECONDS, max(SHORTEST_WINDOW, math.ceil(10 * longest) / 10))
    notes.append(
        _(
            "the model hears {seconds:g} s at once, as the longest recording needs; --window-seconds sets it",
            seconds=seconds,
        )
    )
    return seconds


def take_clips(clips: DecodedClips, rows: np.ndarray) -> DecodedClips:
    """Some of the clips, in a file of their own."""
    key = hashlib.sha256(clips.samples.key.encode() + rows.tobytes()).hexdigest()[:32]
    samples = cached_rows(key, lambda: (clips.samples[int(row)] for row in rows), np.int16, 1)
    return DecodedClips(samples, clips.readable[rows], clips.problems)


def clips_within_window(clips: DecodedClips, seconds: float, split: str, notes: list[str]) -> DecodedClips:
    """The clips that are no longer than the window; a note counts the others."""
    fits = np.flatnonzero(clips.samples.lengths <= seconds * SAMPLE_RATE)
    if len(fits) == len(clips.samples):
        return clips
    notes.append(
        _(
            "{count:,} of {total:,} {split} recordings are longer than {seconds:g} s and left out; cut them at pauses, "
            "or give their subtitles (.srt)",
            count=len(clips.samples) - len(fits),
            total=len(clips.samples),
            split=split,
            seconds=seconds,
        )
    )
    if not len(fits):
        raise BadInput(
            _("{split}: every recording is longer than {seconds:g} s; cut them", split=split, seconds=seconds)
        )
    return take_clips(clips, fits)


def clips_cut_to_window(clips: DecodedClips, seconds: float, split: str, notes: list[str]) -> DecodedClips:
    """All clips; a note counts those of which the window holds only the beginning."""
    longer = int((clips.samples.lengths > seconds * SAMPLE_RATE).sum())
    if longer:
        notes.append(
            _(
                "{count:,} of {total:,} {split} recordings are longer than {seconds:g} s; their beginning is used",
                count=longer,
                total=len(clips.samples),
                split=split,
                seconds=seconds,
            )
        )
    return clips


def load_windows(
    config: TaskConfig,
    clips: Sequence[Clip],
    split: str,
    seconds: float,
    augmenter: SoundAugmenter,
    notes: list[str],
    fit: Callable[[DecodedClips, float, str, list[str]], DecodedClips] = clips_within_window,
) -> tuple[Windows, np.ndarray]:
    """The windows of the clips that can be used, and their indices. seconds 0: chosen from these clips.

    fit: what is done with clips that are longer than the window.
    """
    decoded = load_clips(clips, split, notes)
    seconds = seconds or window_seconds(config, decoded, augmenter, notes)
    decoded = fit(decoded, seconds, split, notes)
    embed = frames_embedding(config)
    mels = MELS if embed is None else embed.mels
    return Windows(
        decoded, seconds, mels, augmenter if augmenter.changes and split == "train" else None
    ), decoded.readable
