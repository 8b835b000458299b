"""The delay pattern of MusicGen, and writing codes with it: codebook k is k steps late, so that it sees the others.

    step        0  1  2  3  4  5  6
    codebook 0  -  a  b  c  -  -  -
    codebook 1  -  -  a  b  c  -  -        - is the id of no code, num_codes
    codebook 2  -  -  -  a  b  c  -

In stereo the codebooks of the left and the right channel alternate, and two of them have the same delay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwater.audiolm.stages import GREEDY, SamplingRule
from headwater.core.cache import dynamic_cache
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must
from headwater.variants.codes import CodeHeads

UNKNOWN = -1


@dataclass(frozen=True)
class DelayPattern:
    """books: codebooks of all channels together; num_codes: of one, also the id of no code."""

    books: int
    num_codes: int
    channels: int = 1

    def __post_init__(self) -> None:
        fits = self.channels in (1, 2) and self.books % self.channels == 0
        must(fits, "DelayPattern", _("channels must be 1 or 2 and divide books"), self.channels, _("1 is mono"))

    @property
    def extra(self) -> int:
        """Steps beside those of the frames."""
        return self.books // self.channels

    def apply(self, codes: Tensor, frames: int) -> Tensor:
        """Codes [T, K] of the first frames as steps [frames + extra, K]; those to be written are UNKNOWN."""
        codes = codes[:frames]
        steps = torch.full((frames + self.extra, self.books), self.num_codes)
        for book in range(self.books):
            first = book // self.channels + 1
            steps[first : first + frames, book] = UNKNOWN
            steps[first : first + len(codes), book] = codes[:, book]
        return steps

    def undo(self, steps: Tensor) -> Tensor:
        """Steps [frames + extra, K] as codes [frames, K]."""
        frames = len(steps) - self.extra
        firsts = [book // self.channels + 1 for book in range(self.books)]
        return torch.stack([steps[first : first + frames, book] for book, first in enumerate(firsts)], 1)


@torch.inference_mode()
def write_codes(
    model: Transformer,
    frames: int,
    *,
    memory: ModelInputs | None = None,
    prompt: Tensor | None = None,
    channels: int = 1,
    scale: float = 3.0,
    rule: SamplingRule = GREEDY,
) -> Tensor:
    """Codes [frames, K] after a text, and after the codes [T, K] of a recording.

    memory: model.encode(text); without one nothing is said. scale: of the guidance, 1 is none.
    """
    head = model.spec.head
    if not isinstance(head, CodeHeads) or model.decoder is None:
        raise BadInput(_("model: it must write several codebooks at once, as MusicGen does; load another"))
    pattern = DelayPattern(head.books, head.vocab, channels)
    known = torch.zeros(0, head.books, dtype=torch.long) if prompt is None else prompt
    steps = pattern.apply(known, frames)
    generator = rule.generator(0)

    # rows: with the text, and without it
    guided = memory is not None and scale != 1.0
    memory = _with_nothing(memory, guided, model.decoder.spec.d_model)
    rows = 2 if guided else 1
    cache = dynamic_cache(model)
    place = int((steps == UNKNOWN).any(1).int().argmax()) if bool((steps == UNKNOWN).any()) else len(steps)
    read = steps[:place]
    while place < len(steps):
        logits = model.decode(read[None].expand(rows, -1, -1), memory=memory, cache=cache)[:, -1]  # [rows, K, V]
        guided_logits = logits[-1] + scale * (logits[0] - logits[-1]) if guided else logits[0]
        chosen = rule.choose(guided_logits, generator)
        steps[place] = torch.where(steps[place] == UNKNOWN, chosen, steps[place])
        read = steps[place : place + 1]
        place += 1
    return pattern.undo(steps)


def _with_nothing(memory: ModelInputs | None, guided: bool, width: int) -> ModelInputs:
    """The memory with a second row that says nothing: zeros, which cross-attention without biases turns into zeros."""
    if memory is None or memory.hidden_states is None:
        return ModelInputs(torch.zeros(1, 1, dtype=torch.long), hidden_states=torch.zeros(1, 1, width))
    if not guided:
        return memory
    states = memory.hidden_states
    mask = memory.attention_mask
    return replace(
        memory,
        ids=memory.ids.repeat(2, 1),
        hidden_states=torch.cat((states, torch.zeros_like(states))),
        attention_mask=None if mask is None else torch.cat((mask, torch.ones_like(mask))),
    )
