"""Crops of token clips, for the three stages of AudioLM: what each reads in training, as in generation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headwater.audiolm.semantic import SemanticCodec
from headwater.audiolm.voice import Voice
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.dataset import Dataset
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.rng import randint, uniform
from headwater.variants.audiolm import AudioTokens

COARSE_BOOKS = 2
SEMANTIC_PLACES = 128  # of the coarse model
KNOWN_SEMANTIC = 96  # tokens of which the coarse model knows the codes
WINDOW_SEMANTIC = 20  # tokens of which it writes the codes before it moves on
FINE_FRAMES = 256
KNOWN_CROPS = 0.5  # the part of the crops of the fine model of which the first frames are known
BARK_RATES = (49.9, 75.0)  # of semantic tokens and frames


def trained_tokens(
    voices: Sequence[Voice], context_length: int, frame_rate: float | None, semantic: SemanticCodec | None
) -> AudioTokens:
    """The layout of the tokens of these voices. Where no codec says its rate, they are taken for Bark's."""
    books = {voice.fine.shape[1] for voice in voices}
    if len(books) > 1 or min(books) <= COARSE_BOOKS:
        raise BadInput(
            _(
                "all clips must have the same number of codebooks, more than {coarse}, got {books}; encode them with "
                "one codec",
                coarse=COARSE_BOOKS,
                books=sorted(books),
            )
        )
    largest = max(int(voice.semantic.max()) for voice in voices)
    semantic_codes = semantic.num_codes if semantic is not None else _round_up(largest + 1)
    codes = _round_up(max(int(voice.fine.max()) for voice in voices) + 1)
    rates = BARK_RATES if semantic is None else (float(semantic.rate), frame_rate or BARK_RATES[1])
    ratio = rates[1] / rates[0] * COARSE_BOOKS
    first = COARSE_BOOKS * codes  # the ids of codes come before those of semantic tokens
    return AudioTokens(
        semantic_codes=semantic_codes,
        semantic_end=semantic_codes,
        semantic_infer=semantic_codes + 1,
        semantic_rate=rates[0],
        semantic_length=context_length,
        text_length=0,
        codes=codes,
        books=min(books),
        coarse_books=COARSE_BOOKS,
        frame_rate=rates[1],
        coarse_offset=0,
        semantic_offset=first,
        coarse_pad=first + semantic_codes,
        coarse_infer=first + semantic_codes + 1,
        coarse_semantic=SEMANTIC_PLACES,
        coarse_history=math.ceil(KNOWN_SEMANTIC * ratio / COARSE_BOOKS) * COARSE_BOOKS,
        coarse_window=math.ceil(WINDOW_SEMANTIC * ratio / COARSE_BOOKS) * COARSE_BOOKS,
        fine_history=FINE_FRAMES // 2,
        fine_length=FINE_FRAMES,
    )


def _round_up(count: int) -> int:
    """The next power of two, and Bark's 10,000 for what is near it."""
    return 10_000 if 4096 < count <= 10_000 else 1 << max(1, count - 1).bit_length()


class CropDataset(Dataset):
    """Crops of clips. In training they begin anywhere, in validation one where the last one ended."""

    def __init__(
        self,
        voices: Sequence[Voice],
        tokens: AudioTokens,
        special_tokens: SpecialTokens,
        batch_tokens: int,
        seed: int,
        moving: bool,
    ) -> None:
        self.voices = voices
        self.tokens = tokens
        self.moving = moving
        self.coarse_length = tokens.coarse_history + tokens.coarse_window
        lengths = (tokens.semantic_length, tokens.coarse_semantic + 1 + self.coarse_length, tokens.fine_length)
        counts = [max(self._counts(voice)) for voice in voices]
        self.owners = np.repeat(np.arange(len(voices)), counts)  # example -> clip
        self.numbers = np.concatenate([np.arange(count) for count in counts])
        rows = np.tile(np.array(lengths), (len(self.owners), 1))
        super().__init__(rows, special_tokens, max(batch_tokens, sum(lengths)), seed)

    def _counts(self, voice: Voice) -> tuple[int, int, int]:
        """Crops of each stage that cover a clip."""
        tokens = self.tokens
        per_crop = int(self.coarse_length / tokens.ratio)
        return (
            -(-len(voice.semantic) // tokens.semantic_length),
            -(-len(voice.semantic) // per_crop),
            -(-len(voice.fine) // tokens.fine_length),
        )

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        """ids, targets: semantic. source: coarse. signal, code_targets: fine. Stages crop apart from each other."""
        rows = [self._crop(int(example), epoch) for example in examples]
        ids, targets, coarse, fine = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        batch = TrainBatch(ids, np.ones(ids.shape, bool), targets, source=coarse, signal=fine)
        return self._with_unknown_codes(batch, examples, epoch) if self.moving else batch

    def _crop(self, example: int, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        tokens = self.tokens
        voice = self.voices[self.owners[example]]
        semantic = voice.semantic.numpy()
        codes = voice.fine.numpy()
        shifts = [float(uniform(self.seed, epoch, example, "crop", stage)) for stage in range(3)]
        places = (tokens.semantic_length, int(self.coarse_length / tokens.ratio), tokens.fine_length)
        sizes = (len(semantic), len(semantic), len(codes))
        starts = [
            int(shift * (max(0, size - place) + 1)) if self.moving else int(self.numbers[example]) * place
            for shift, size, place in zip(shifts, sizes, places, strict=True)
        ]

        # semantic: the start, then tokens; each predicts the next
        part = semantic[starts[0] : starts[0] + tokens.semantic_length]
        ids = np.full(tokens.semantic_length, tokens.semantic_end)
        ids[: 1 + len(part[:-1])] = [tokens.semantic_infer, *part[:-1]]
        targets = np.full(tokens.semantic_length, IGNORE_INDEX)
        targets[: len(part)] = part
        if not len(part):  # beyond the end, in validation
            ids[0] = tokens.semantic_infer

        # coarse: semantic tokens, the start, codes frame by frame
        coarse = np.full(tokens.coarse_semantic + 1 + self.coarse_length, tokens.coarse_pad)
        part = semantic[starts[1] : starts[1] + tokens.coarse_semantic]
        coarse[: len(part)] = part + tokens.semantic_offset
        coarse[tokens.coarse_semantic] = tokens.coarse_infer
        frame = round(starts[1] * tokens.ratio / tokens.coarse_books)
        flat = codes[frame : frame + self.coarse_length // tokens.coarse_books, : tokens.coarse_books]
        offsets = tokens.coarse_offset + np.arange(tokens.coarse_books) * tokens.codes
        flat = (flat + offsets).reshape(-1)
        coarse[tokens.coarse_semantic + 1 :][: len(flat)] = flat

        # fine: the codes of all codebooks
        fine = np.full((tokens.fine_length, tokens.books), tokens.codes)
        frames = codes[starts[2] : starts[2] + tokens.fine_length]
        fine[: len(frames)] = frames
        return ids, targets, coarse, fine

    def _with_unknown_codes(self, batch: TrainBatch, examples: np.ndarray, epoch: int) -> TrainBatch:
        """One codebook for the batch, with those before it; of half of the rows the first frames are known."""
        tokens = self.tokens
        assert batch.signal is not None
        choice = int(randint(tokens.books - tokens.coarse_books, self.seed, epoch, int(examples[0]), "codebook"))
        book = tokens.coarse_books + choice
        fine = batch.signal[..., : book + 1].copy()
        with_history = uniform(self.seed, epoch, examples, "history") < KNOWN_CROPS
        known = np.where(with_history, uniform(self.seed, epoch, examples, "known") * tokens.fine_history, 0).astype(
            int
        )
        unknown = np.arange(tokens.fine_length) >= known[:, None]  # [B, F]
        targets = np.where(unknown & (fine[..., book] != tokens.codes), fine[..., book], IGNORE_INDEX)
        fine[..., book] = np.where(unknown, tokens.codes, fine[..., book])
        return TrainBatch(
            batch.ids, batch.attention_mask, batch.targets, source=batch.source, signal=fine, code_targets=targets
        )
