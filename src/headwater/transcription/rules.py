"""The rules of Whisper's output, as changes of the logits: what may follow what has been said so far.

- Never: symbols that are no speech, and special tokens. First: neither a space nor the end.
- With timestamps, the output is segments: a stamp, text, a stamp. Text follows an opening stamp; after text and one
  stamp comes another stamp or the end; times never go back, and a segment lasts longer than nothing.
- The first token is a stamp of at most one second.
- If all stamps together are more probable than each text token, a stamp it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.transcription.tokens import SECONDS_PER_STAMP, SpeechTokens

MAX_FIRST_STAMP = round(1.0 / SECONDS_PER_STAMP)


class OutputRules:
    """The rules for the outputs of one window."""

    def __init__(self, tokens: SpeechTokens, timestamps: bool) -> None:
        self.tokens = tokens
        self.timestamps = timestamps
        self.suppressed = torch.tensor(sorted({*tokens.suppressed, tokens.no_timestamps}), dtype=torch.long)
        self.suppressed_first = torch.tensor(tokens.suppressed_first, dtype=torch.long)

    def apply(self, logits: Tensor, outputs: Sequence[Sequence[int]]) -> Tensor:
        """Set the logits [B, V] of what may not follow the output tokens of each row to -inf, in place."""
        logits.index_fill_(1, self.suppressed, -torch.inf)
        if not outputs[0]:
            logits.index_fill_(1, self.suppressed_first, -torch.inf)
        if not self.timestamps:
            logits[:, self.tokens.first_stamp :] = -torch.inf
            return logits
        for row, output in zip(logits, outputs, strict=True):
            self._follow_stamps(row, output)
        first = self.tokens.first_stamp
        stamps_win = logits[:, first:].logsumexp(1) > logits[:, :first].amax(1)
        logits[:, :first].masked_fill_(stamps_win[:, None], -torch.inf)
        return logits

    def _follow_stamps(self, row: Tensor, output: Sequence[int]) -> None:
        """The rules of timestamps for one row [V]."""
        first = self.tokens.first_stamp
        if not output:
            row[:first] = -torch.inf
            row[first + MAX_FIRST_STAMP + 1 :] = -torch.inf
            return
        after_stamp = output[-1] >= first
        after_pair = after_stamp and (len(output) < 2 or output[-2] >= first)
        if after_pair:
            row[first:] = -torch.inf
        elif after_stamp:
            row[: self.tokens.end] = -torch.inf
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:
            may_repeat = after_stamp and not after_pair  # the next segment may begin where this one ends
            row[first : last + (0 if may_repeat else 1)] = -torch.inf
