"""Talking with a model: a chat, a text that goes on, a translation, or labels; with the ids that were said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headwater.errors import BadInput
from headwater.generation.ask import Voice, stream
from headwater.inspection.scores import says_tokens
from headwater.inspection.subjects import still
from headwater.inspection.words import Both
from headwater.serving.asking import MOST_PROMPT, Talk, counted
from headwater.serving.shelf import Opened
from headwater.text.chat import encode_chat

SECONDS = 120.0


def talk(opened: Opened, ask: Talk) -> Iterator[dict[str, Any]]:
    """Events: {"text", "token", "share"} as it is said, at last {"done", "ids", "source_ids"} with how many tokens were
    generated and read; or one {"labels"}.
    """
    subject = opened.subject
    if not says_tokens(subject.model) or opened.shape == "encoder":
        yield labelled(opened, ask)
        return
    prompt = counted(_prompt(opened, ask), MOST_PROMPT)
    new: list[int] = []
    stopped = "length"
    settings = {**ask.choosers(), "seed": ask.seed, "max_tokens": ask.tokens, "seconds": SECONDS}
    for event in stream(subject.voice, prompt, **settings):
        new.append(event.token)
        stopped = event.stopped or stopped
        yield {"text": event.text, "token": event.token, "share": round(float(torch.tensor(event.logprob).exp()), 6)}
    counts = {"done": stopped, "generated": len(new), "read": len(prompt)}
    if subject.two:
        said = new[:-1] if new and new[-1] in subject.ends else new
        yield {**counts, "ids": [subject.start, *said], "source_ids": prompt}
    else:
        yield {**counts, "ids": [*prompt, *new], "source_ids": []}


def _prompt(opened: Opened, ask: Talk) -> list[int]:
    subject = opened.subject
    if subject.two:
        return subject.prompt(ask.source or ask.text)
    if ask.messages:
        if subject.tokenizer is None or not subject.tokenizer.chat_template:
            raise BadInput(
                Both(
                    "this model has no chat template; give it a text to go on with",
                    "这个模型没有对话模板；请给一段让它续写的文字",
                )
            )
        return encode_chat(subject.tokenizer, [m.model_dump() for m in ask.messages])
    return list(Voice.of(subject.voice).ids(subject.prompt(ask.text)))


def labelled(opened: Opened, ask: Talk) -> dict[str, Any]:
    """What a head with labels says: shares of a text's labels, or a tag for each token."""
    subject = opened.subject
    if not subject.labels:
        raise BadInput(
            Both(
                "this model neither writes nor names labels; look at its attention, or use headwater embed",
                "这个模型既不写字也不给标签；请看它的注意力，或用 headwater embed",
            )
        )
    ids = counted(subject.prompt(ask.text))
    with still(subject.model), torch.inference_mode():
        answer = subject.model(torch.tensor([ids]))[0].float().softmax(-1)
    if answer.dim() == 1:
        order = answer.argsort(descending=True).tolist()
        return {"labels": [[subject.labels[n], round(float(answer[n]), 6)] for n in order[:50]], "ids": ids}
    best = answer.max(-1)
    tags = [[subject.labels[int(n)], round(float(p), 6)] for n, p in zip(best.indices, best.values, strict=True)]
    return {"tags": tags, "ids": ids}
