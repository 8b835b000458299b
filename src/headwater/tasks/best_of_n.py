"""Best of n: the answer with the highest reward of several. PPO and GRPO are compared with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.data.answers import ChatEncoder
from headwater.data.collate import SpecialTokens
from headwater.data.conversations import ChatTurn, PromptExample
from headwater.errors import BadInput
from headwater.families.load import LoadedModel
from headwater.generation.api import TextModel, generate
from headwater.i18n import _
from headwater.parts import must
from headwater.tasks.rewards import Answer, ScoreFn


class BestAnswer(NamedTuple):
    """The best of several answers. rewards: of all of them, in the order they were sampled."""

    text: str
    reward: float
    rewards: tuple[float | None, ...]


def best_of_n(
    loaded: LoadedModel, prompts: Sequence[str], reward: ScoreFn, n: int = 8, **options: Any
) -> list[BestAnswer]:
    """For each prompt the best of n sampled answers; options: those of headwater.generate."""
    must(n >= 1, "best_of_n", _("n must be at least 1"), n, _("8 is usual"))
    if loaded.tokenizer is None:
        raise BadInput(_("best_of_n: the model must have a tokenizer, this one has none"))
    examples = [PromptExample((ChatTurn("user", prompt),)) for prompt in prompts]
    encoder = ChatEncoder(loaded.tokenizer, SpecialTokens.from_tokenizer(loaded.tokenizer).eos_id)
    ids = [tuple(encoder.prompt_ids(example.prompt)) for example in examples]
    settings = {"temperature": 1.0, "seed": list(range(len(ids))), **options}
    groups = generate(TextModel.wrap(loaded), ids, n=n, **settings)
    best: list[BestAnswer] = []
    for example, group in zip(examples, groups, strict=True):
        completions = group if n > 1 else [group]
        rewards = reward([Answer(example, completion.text) for completion in completions])
        ranked = [(-math.inf if value is None else value, -i) for i, value in enumerate(rewards)]
        value, index = max(ranked)
        if value == -math.inf:
            raise BadInput(
                _("best_of_n: the reward must score at least one of {n} answers, it scored none; correct it", n=n)
            )
        best.append(BestAnswer(completions[-index].text, value, tuple(rewards)))
    return best


def best_of_n_kl(n: int) -> float:
    """The divergence of the best of n from the model itself, at most: log n - (n - 1) / n (nats per answer).

    >>> round(best_of_n_kl(8), 4)
    1.2044
    """
    return math.log(n) - (n - 1) / n
