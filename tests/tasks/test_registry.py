"""What every registered task must say, and how a task is found by its name."""

from __future__ import annotations

import pytest

from headwater.cli import VERBS
from headwater.data.examples import EXAMPLE_FORMATS
from headwater.errors import BadSetting
from headwater.tasks import OBJECTIVES, TASKS, get_task
from headwater.training.config import TrainConfig

EVERY = {task.objective or task.name: task for task in (*TASKS.values(), *OBJECTIVES.values())}
every_task = pytest.mark.parametrize("task", EVERY.values(), ids=EVERY)
NEEDED = {"segments": {"attention": "xl:memory=4"}}  # settings without which a task has no model
CODECS = ("picture-codec", "sound-codec", "text-to-image")  # no Transformers, and one with the codebook of a codec


def test_readers_and_tasks_know_the_same_names():
    assert set(TASKS) == set(EXAMPLE_FORMATS)
    assert all(TASKS[name].name == EXAMPLE_FORMATS[name].task == name for name in TASKS)


@every_task
def test_a_command_line_names_a_verb_that_there_is(task):
    verbs = {verb for group in VERBS.values() for verb in group}
    program, verb = task.command.split()[:2]
    assert program == "headwater" and verb in verbs and "{run}" in task.command
    assert task.verb in verbs | {""}


@pytest.mark.parametrize("name", [name for name in EVERY if name not in CODECS])
def test_a_model_from_scratch_has_the_stacks_that_a_pretrained_one_must_have(name):
    task = EVERY[name]
    config = TrainConfig().replace(d_model=16, heads=2, layers=1, d_ff=16, position="none", **NEEDED.get(name, {}))
    spec = task.model_spec(config, 50, 3)
    present = (spec.encoder is not None, spec.decoder is not None)
    assert task.stacks in (None, present)
    assert task.stacks is None or task.can_keep_head(spec, {}, [])
    assert task.can_keep_head(spec, {"task": task.name, "labels": ["a", "b", "c"]}, ["a", "b", "c"])


def test_a_task_is_found_by_name_alias_and_objective():
    assert get_task("translation") is TASKS["seq2seq"]
    assert get_task("language-model") is get_task("causal", "auto") is OBJECTIVES["causal"]
    assert get_task("language-model", "mlm") is OBJECTIVES["mlm"]
    assert get_task("seq2seq", "mlm") is TASKS["seq2seq"], "an objective is of running text"
    with pytest.raises(BadSetting, match="no objective is called 'mln'; did you mean 'mlm'"):
        get_task("language-model", "mln")
    with pytest.raises(BadSetting, match="no task is called 'translatoin'"):
        get_task("translatoin")
