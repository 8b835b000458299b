"""Choosers: what happens between the model's scores and the token, as small values in a row.

    (RepetitionPenalty(1.1), Temperature(0.8), TopP(0.95))

Each is a pure function of the scores [B, V] and of what each row has said so far. One that narrows the choice (TopK,
TopP, MinP) leaves at least one token; where bans leave none, the row's request ends with a fault that names them
(picking.py).
"""

from __future__ import annotations

from typing import Any

from headwater.errors import BadSetting, nearest
from headwater.generation.narrowing import Chooser, Greedy, MinP, Said, Temperature, TopK, TopP
from headwater.generation.weighing import (
    Allow,
    Ban,
    ForcedPrefix,
    FrequencyPenalty,
    MinTokens,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
)

__all__ = [
    "Allow",
    "Ban",
    "Chooser",
    "ForcedPrefix",
    "FrequencyPenalty",
    "Greedy",
    "MinP",
    "MinTokens",
    "NoRepeatNgram",
    "PresencePenalty",
    "RepetitionPenalty",
    "Said",
    "Temperature",
    "TopK",
    "TopP",
    "named",
]

# In the order in which they act: first what weighs and forbids, then how bold, then how many.
NAMED: dict[str, type[Chooser]] = {
    "repetition_penalty": RepetitionPenalty,
    "frequency_penalty": FrequencyPenalty,
    "presence_penalty": PresencePenalty,
    "no_repeat_ngram": NoRepeatNgram,
    "ban": Ban,
    "allow": Allow,
    "forced_prefix": ForcedPrefix,
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
}
DRAWING = {"temperature", "top_k", "top_p", "min_p"}


def named(**settings: Any) -> tuple[Chooser, ...]:
    """Choosers from plain settings, None meaning not given; greedy unless one of DRAWING is.

    >>> named(top_k=5, repetition_penalty=1.1)
    (RepetitionPenalty(factor=1.1), TopK(count=5))
    """
    for name in settings:
        if name not in NAMED:
            raise BadSetting(f"generation has no setting {name!r}; {nearest(name, NAMED)}")
    given = {name: value for name, value in settings.items() if value is not None}
    made = tuple(kind(given[name]) for name, kind in NAMED.items() if name in given)  # type: ignore[call-arg]
    return made if DRAWING & given.keys() else (*made, Greedy())
