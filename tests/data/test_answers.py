"""The mask of learned tokens: by position, with the end of turn, whatever the padding token is."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.data.answers import AnswerRows, ChatEncoder, answer_batch, text_spans
from headwater.data.collate import IGNORE_INDEX
from headwater.data.conversations import ChatTurn
from headwater.errors import BadInput, BadSetting
from headwater.text.chat_templates import PLAIN, TEMPLATES, choose_template
from headwater.text.tokenizer import Tokenizer
from headwater.text.train import train_tokenizer

TEXTS = ["system user assistant User: Assistant: hi there, hello to you; good bye", "what is it? it is a word."] * 4
CHAT = [ChatTurn("user", "hi there"), ChatTurn("assistant", "hello <eos> you"), ChatTurn("user", "what is it?"),
        ChatTurn("assistant", "it is a word.")]  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, "bpe", 300)


def encoder(tokenizer: Tokenizer, template: str) -> ChatEncoder:
    copy = Tokenizer(tokenizer.spec, tokenizer.special_tokens_map, template)
    assert copy.eos_id is not None
    return ChatEncoder(copy, copy.eos_id)


def learned_texts(made: ChatEncoder, turns: list[ChatTurn]) -> list[list[str]]:
    return [
        [text for text, learned in text_spans(made.tokenizer, row) if learned] for row in made.conversation_rows(turns)
    ]


def test_answers_and_their_end_are_learned_and_nothing_else(trained) -> None:
    made = encoder(trained, PLAIN)
    assert learned_texts(made, CHAT) == [["hello <eos> you<eos>", "it is a word.<eos>"]]
    (row,) = made.conversation_rows(CHAT)
    assert row.ids[-1] == trained.eos_id and row.learned[-1]
    assert row.ids.count(trained.eos_id) == 2  # what a user typed stays text


def test_the_prompt_of_a_row_is_what_the_model_will_read(trained) -> None:
    made = encoder(trained, PLAIN)
    row = made.answer_row(CHAT[:1], "good bye")
    start = row.learned.index(True)
    assert row.ids[:start] == made.prompt_ids(CHAT[:1])


def test_the_end_of_turn_is_learned_where_it_is_the_padding_token_too(trained) -> None:
    """A mask by the id of the padding token would drop it: such a model never stops."""
    made = encoder(trained, PLAIN)
    eos = trained.eos_id
    rows = AnswerRows.from_rows(made.conversation_rows(CHAT) + made.conversation_rows(CHAT[:2]))
    groups = [np.array([0]), np.array([1])]
    width = int(rows.ids.lengths.max())
    batch = answer_batch(rows, groups, width, eos)
    assert int((batch.targets == eos).sum()) == 3
    masked_by_id = np.where(batch.targets == eos, IGNORE_INDEX, batch.targets)
    assert not (masked_by_id == eos).any()  # the planted fault


def test_packed_rows_have_the_targets_of_single_ones(trained) -> None:
    made = encoder(trained, PLAIN)
    rows = AnswerRows.from_rows(made.conversation_rows(CHAT) + made.conversation_rows(CHAT[:2]))
    width = int(rows.ids.lengths.sum())
    packed = answer_batch(rows, [np.array([0, 1])], width, 0)
    alone = answer_batch(rows, [np.array([0]), np.array([1])], width, 0)
    kept = [targets[targets != IGNORE_INDEX] for targets in (packed.targets[0], alone.targets[0], alone.targets[1])]
    assert kept[0].tolist() == [*kept[1].tolist(), *kept[2].tolist()]
    assert packed.num_targets == int(rows.num_learned.sum())
    first = int(rows.ids.lengths[0])
    assert packed.targets[0, first - 1] == IGNORE_INDEX  # nothing is predicted across documents


def test_a_template_that_ends_no_answer_gets_the_end_of_the_text(trained) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
        "{{ 'assistant:' if add_generation_prompt else '' }}"
    )
    made = encoder(trained, template)
    assert learned_texts(made, CHAT[:2])[0][-1].endswith("<eos>")


def test_a_template_that_drops_old_answers_teaches_each_in_a_row_of_its_own(trained) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}{{ m['role'] }}:\n{{ m['content'] }}"
        "{{ eos_token if m['role'] == 'assistant' else '' }}\n{% endif %}{% endfor %}"
        "{{ 'assistant:\n' if add_generation_prompt else '' }}"
    )
    made = encoder(trained, template)
    assert learned_texts(made, CHAT) == [["hello <eos> you<eos>"], ["it is a word.<eos>"]]


def test_a_template_without_a_generation_prompt_is_refused(trained) -> None:
    made = encoder(trained, "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}")
    with pytest.raises(
        BadSetting, match=r"add_generation_prompt\), it writes '<assistant>' first.*--chat-template plain"
    ):
        made.check_generation_prompt(CHAT)
    ends_with_prompt = (
        "{% for m in messages %}"
        "{{ '[I] ' + m['content'] + ' [/I] ' if m['role'] == 'user' else m['content'] + eos_token }}{% endfor %}"
    )
    encoder(trained, ends_with_prompt).check_generation_prompt(CHAT)  # the user's turn ends where the answer begins
    encoder(trained, PLAIN).check_generation_prompt(CHAT)


def test_without_a_template_prompt_and_answer_are_one_text(trained) -> None:
    made = encoder(trained, "")
    turns = [ChatTurn("user", "hi there,"), ChatTurn("assistant", " hello")]
    assert learned_texts(made, turns) == [[" hello<eos>"]]
    with pytest.raises(BadInput, match="one prompt and one answer"):
        made.conversation_rows(CHAT)


def test_templates_are_chosen_by_name_or_file(trained, tmp_path) -> None:
    assert choose_template("auto", trained) == PLAIN
    assert choose_template("none", trained) == ""
    assert choose_template("zephyr", trained) == TEMPLATES["zephyr"].template
    with pytest.raises(BadSetting, match="chatml needs the special token <|im_start|>".replace("|", r"\|")):
        choose_template("chatml", trained)
    with pytest.raises(BadSetting, match="did you mean 'plain'"):
        choose_template("plian", trained)
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert choose_template(str(tmp_path / "own.jinja"), trained) == "{{ messages }}"
