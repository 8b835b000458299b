"""Chat templates by name, for a tokenizer that has none of its own, and the choice of one: own, named, or a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.io.files import read_limited
from headwater.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20


class NamedTemplate(NamedTuple):
    """A chat template, and the special tokens that a tokenizer must have for it."""

    template: str
    tokens: tuple[str, ...] = ()


PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}:\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}\n\n"
    "{% endfor %}"
    "{{ 'Assistant:\n' if add_generation_prompt else '' }}"
)
CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt else '' }}"
)
ZEPHYR = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '' }}"
)
TEMPLATES = {
    "plain": NamedTemplate(PLAIN),
    "zephyr": NamedTemplate(ZEPHYR),
    "chatml": NamedTemplate(CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
}
NO_TEMPLATE = "none"  # a prompt and its answer are one text, without roles


def choose_template(choice: str, tokenizer: Tokenizer) -> str:
    """The template of a choice: auto (the tokenizer's own, else plain), none (''), a name, or a Jinja file."""
    if choice == "auto":
        return tokenizer.chat_template or PLAIN
    if choice == NO_TEMPLATE:
        return ""
    if choice in TEMPLATES:
        named = TEMPLATES[choice]
        if missing := [token for token in named.tokens if token not in tokenizer.special_tokens]:
            raise BadSetting(
                _(
                    "chat_template {name} needs the special token {token}, which this tokenizer has not; "
                    "plain works with any tokenizer",
                    name=choice,
                    token=missing[0],
                )
            )
        return named.template
    if not Path(choice).is_file():
        raise BadSetting(
            _(
                "chat_template must be auto, none, a name or a Jinja file, got {choice!r}; {nearest}",
                choice=choice[:60],
                nearest=nearest(choice[:60], [*TEMPLATES, "auto", NO_TEMPLATE]),
            )
        )
    return read_limited(Path(choice), MAX_TEMPLATE_BYTES).decode("utf-8")
