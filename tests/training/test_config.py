"""One tree of settings: leaves by name, by section, by words; nothing unknown, nothing silent, nothing lost."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from headwater.errors import BadSetting
from headwater.training.checkpoint import check_resume_changes
from headwater.training.config import FIELDS, SECTIONS, TrainConfig, parse_config
from headwater.training.setting_types import parse_duration


def test_a_leaf_may_be_given_alone_in_its_section_or_as_words():
    for given in ({"lr": 0.5}, {"optim": {"lr": 0.5}}, {"learning_rate": "0.5"}):
        assert parse_config(given).lr == parse_config(given).to_dict()["optim"]["lr"] == 0.5


def test_yaml_and_back_is_the_same():
    made = parse_config({"paths": ["a.tsv", "b.tsv"], "columns": {"source": "en"}, "max_time": "90m", "compile": True})
    assert parse_config(yaml.safe_load(yaml.safe_dump(made.to_dict(), allow_unicode=True))) == made
    assert TrainConfig(**made.model_dump()) == made and made.max_time == 5400.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learing_rate": 1}, "there is no setting 'learing_rate'; did you mean 'learning_rate'?"),
        ({"optim": {"lrr": 1}}, "there is no setting 'lrr'; did you mean 'lr'?"),
        ({"train": 3}, "train must hold settings"),
        ({"lr": "quick"}, "lr must be a number from 0, got 'quick'; it means: peak learning rate"),
        ({"lr": -1}, "lr must be a number from 0, got '-1'"),
        ({"lr": float("nan")}, "lr must be a number from 0"),
        ({"dropout": 1.0}, "dropout must be a number from 0 to 1, got '1.0'"),
        ({"max_steps": 2.5}, "max_steps must be an integer from 0, got '2.5'"),
        ({"max_steps": True}, "max_steps must be an integer"),
        ({"max_time": "soon"}, "max_time must be a time such as 90s or 5m"),
        ({"keep_checkpoints": 1}, "keep_checkpoints must be an integer from 2"),
        ({"compile": "maybe"}, "compile must be true or false"),
        ({"columns": "en"}, "columns must be pairs such as source=en"),
        ({"task": 3}, "task must be a string"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(given, said):
    with pytest.raises(BadSetting) as refused:
        parse_config(given)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_words_of_a_command_line():
    made = parse_config(
        {"max_steps": "1_000", "warmup": "-1", "columns": "source=en,target=de", "paths": "x", "compile": "true"}
    )
    assert (made.max_steps, made.warmup, made.columns, made.paths) == (
        1000,
        -1,
        {"source": "en", "target": "de"},
        ["x"],
    )
    assert [parse_duration(t) for t in ("90s", "1h30m", "5", "m")] == [90.0, 5400.0, None, None]


def test_leaves_have_names_of_their_own_and_words_in_two_languages():
    assert sum(len(SECTIONS[s].model_fields) for s in SECTIONS) == len(FIELDS) == len(TrainConfig.model_fields)
    assert not {"data", "train", "evaluation", "output"} & set(FIELDS)
    for name, leaf in FIELDS.items():
        assert all(leaf.description), name
        assert parse_config({name: leaf.default}) == TrainConfig()


@pytest.mark.parametrize("name", FIELDS)
def test_each_leaf_is_fixed_or_free_in_a_resumed_run(name):
    other = {"N": 7, "X": 0.31, "TIME": 77.0, "yes|no": True, "yes|no|auto": "yes"}
    other |= {"NAME": "other", "FILE": ["z"], "A=B": {"a": "b"}}
    before, now = TrainConfig(), TrainConfig(**{name: other[FIELDS[name].type.metavar]})
    if FIELDS[name].mutable:
        assert [c.name for c in check_resume_changes(before, now)] == [name]
    else:
        with pytest.raises(BadSetting, match=f"{name} cannot change in a resumed run"):
            check_resume_changes(before, now)


def test_what_decides_the_numbers_is_fixed():
    free = {name for name, leaf in FIELDS.items() if leaf.mutable}
    assert not free & {
        "paths",
        "seed",
        "lr",
        "batch_tokens",
        "d_model",
        "dropout",
        "tokenizer",
        "schedule",
        "valid_fraction",
    }


def test_settings_need_neither_torch_nor_numpy():
    code = "import sys, headwater.training.config; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
