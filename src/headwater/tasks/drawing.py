"""Drawing: pictures for texts, by a decoder over text and picture tokens (text_to_image.py) or by DALL-E mini.

    model = open_picture_model("runs/text-to-image/pairs")
    pictures = draw(model, ["a red circle"])                                  # [1, 3, H, W] in 0 … 1
    for pictures in draw_steps(model, ["a red circle"], every=8): ...         # growing

Picture tokens are sampled with classifier-free guidance. Places that are not yet drawn are mid-gray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwater.codecs import PictureCodec, find_codec, is_codec, load_codec
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens
from headwater.errors import BadInput, BadSetting
from headwater.families.load import find_model, load
from headwater.families.matching import Matcher
from headwater.generation.guidance import MAX_BATCH_SEQUENCES, Guidance, stream_guided
from headwater.generation.penalties import AllowedTokens
from headwater.generation.request import Request
from headwater.generation.sampling import LogitsProcessor, Temperature, TopK
from headwater.i18n import _
from headwater.rng import fork_seed
from headwater.text.tokenizer import Tokenizer
from headwater.variants.text_image_positions import TextImagePositions
from headwater.vision.sheets import to_pixels

DEFAULT_SCALE = 3.0  # of the guidance
GRAY = 0.5


@dataclass(frozen=True)
class PictureModel:
    """A Transformer that writes picture tokens, its tokenizer and its codec."""

    model: Transformer
    tokenizer: Tokenizer
    codec: PictureCodec
    start_id: int = 0  # of an encoder-decoder: the id that starts a picture

    @property
    def first_code(self) -> int:
        """The id of the codec's first code: after those of the text, where one stack reads both."""
        return 0 if self.model.encoder is not None else len(self.tokenizer)

    def request(self, text: str, processors: tuple[LogitsProcessor, ...], seed: int) -> Request:
        """The request for the picture of a text; '' asks for a picture of anything."""
        rows, columns = self.codec.grid
        if self.model.encoder is not None:
            source = tuple(self.tokenizer.encode(text))[: self.model.encoder.spec.max_positions]
            return Request((self.start_id,), source, processors, max_tokens=rows * columns, seed=seed)
        return Request(self.text_ids(text), None, processors, max_tokens=rows * columns, seed=seed)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """<bos> text <eos> <pad> … in the places of the text."""
        position = getattr(self.model.output_stack.spec.embed, "position", None)
        if not isinstance(position, TextImagePositions):
            raise BadInput(_("draw: the model must draw pictures, this one does not; train with --task text-to-image"))
        special = SpecialTokens.from_tokenizer(self.tokenizer)
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: position.text - 2]
        row = [special.bos_id, *ids, special.eos_id]
        return (*row, *[special.pad_id] * (position.text - len(row)))


def open_picture_model(name: str | Path) -> PictureModel:
    """Load a run of text-to-image, or a folder of DALL-E mini, with the codec in its folder `codec`."""
    path = find_model(name)
    if is_codec(path):
        raise BadInput(
            _("draw: {name} is a codec alone; give the run of text-to-image that was trained with it", name=name)
        )
    loaded = load(name)
    if loaded.tokenizer is None or loaded.model.decoder is None:
        raise BadInput(_("draw: the model must draw pictures, this one does not; train with --task text-to-image"))
    codec = load_codec(find_codec(path))
    if not isinstance(codec, PictureCodec):
        raise BadInput(_("draw: the codec of {path} is no picture codec; give a model that draws", path=path))
    model = PictureModel(loaded.model, loaded.tokenizer, codec, loaded.decoder_start_id or 0)
    vocab = model.first_code + codec.num_codes
    if getattr(loaded.spec.head, "vocab", 0) < vocab:
        raise BadSetting(_("draw: the codec has {codes} codes, more than the model knows", codes=codec.num_codes))
    return model


def draw(
    model: PictureModel,
    texts: Sequence[str],
    *,
    scale: float = DEFAULT_SCALE,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> Tensor:
    """Pictures [B, 3, H, W] in 0 … 1, one for each text. The settings are those of draw_steps."""
    pictures = []
    for first in range(0, len(texts), MAX_BATCH_SEQUENCES):
        batch = texts[first : first + MAX_BATCH_SEQUENCES]
        steps = draw_steps(model, batch, scale=scale, temperature=temperature, top_k=top_k, seed=seed, first=first)
        pictures.append(list(steps)[-1])
    return torch.cat(pictures)


def draw_steps(
    model: PictureModel,
    texts: Sequence[str],
    *,
    scale: float = DEFAULT_SCALE,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    every: int = 0,
    first: int = 0,
) -> Iterator[Tensor]:
    """Pictures [B, 3, H, W] of up to 16 texts while they grow, after each `every` tokens and at the end.

    scale: of the guidance, 1 is none. top_k: only the k most probable codes, 0 for all. The picture of a text depends
    on its seed alone: seed, and the number of the text from `first` on.
    """
    processors = (
        AllowedTokens(tuple(range(model.first_code, model.first_code + model.codec.num_codes))),
        Temperature(temperature),
        *((TopK(top_k),) if top_k else ()),
    )
    requests = [model.request(text, processors, fork_seed(seed, first + n)) for n, text in enumerate(texts)]
    empty = model.request("", (), 0)
    guidance = Guidance(empty.prompt_ids if empty.source_ids is None else empty.source_ids, scale)
    rows, columns = model.codec.grid
    for states in stream_guided(model.model, requests, guidance):
        for state in states:
            if state.fault is not None:
                raise state.fault
        count = len(states[0].events)
        if count == rows * columns or (every and count and count % every == 0):
            yield decode_partial(model.codec, [[id - model.first_code for id in state.output_ids] for state in states])


def rerank(matcher: Matcher, texts: Sequence[str], pictures: Tensor, keep: int) -> Tensor:
    """Of the pictures [T · n, 3, H, W] of each text the `keep` that a CLIP finds most similar to it, the best first."""
    each = len(pictures) // len(texts)
    images = matcher.image_vectors(list(to_pixels(pictures))).unflatten(0, (len(texts), each))  # [T, n, W]
    cosines = torch.einsum("tnw,tw->tn", images, matcher.text_vectors(texts))
    best = cosines.sort(dim=1, descending=True, stable=True).indices[:, :keep]  # [T, keep]
    rows = torch.arange(len(texts))[:, None] * each + best
    return pictures[rows.flatten()]


@torch.inference_mode()
def decode_partial(codec: PictureCodec, ids: Sequence[Sequence[int]]) -> Tensor:
    """The pictures [B, 3, H, W] of the first ids of each; what is missing is gray."""
    rows, columns = codec.grid
    count = len(ids[0])
    grid = torch.zeros(len(ids), rows * columns, dtype=torch.long)
    grid[:, :count] = torch.tensor(ids)
    pictures = codec.decode(grid.unflatten(1, (rows, columns)))
    drawn = (torch.arange(rows * columns) < count).view(rows, columns)
    known = drawn.repeat_interleave(codec.factor, 0).repeat_interleave(codec.factor, 1)  # [H, W]
    return torch.where(known, pictures, torch.tensor(GRAY))
