"""Rewards of answers: from a Python function in a file of the user, from a reward model, or from a classifier.

    --reward rewards.py:length       the function length(prompts, completions, **columns) of that file
    --reward runs/reward/pairs       a reward model
    --reward runs/classification/reviews:pos    the log-odds of a label

A function gets lists of equal length, and those columns of the rows that it names; it returns a number for each answer,
or None for one that it cannot score.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from headwater.data.conversations import PromptExample
from headwater.errors import BadInput, BadSetting, NotFound, nearest
from headwater.families.load import find_model, load
from headwater.i18n import _
from headwater.io.files import quote
from headwater.tasks.base import get_task

Scores: TypeAlias = list[float | None]
ON_ERROR = ("stop", "skip")
MIN_PROBABILITY = 1e-6  # of a label, for its log-odds
USERS_ERRORS = (Exception, SystemExit)  # of a function of the user, which may call exit()


class Answer(NamedTuple):
    """An answer of the model to a prompt."""

    example: PromptExample
    text: str


class RewardError(BadInput):
    """A reward that could not be computed: the run is saved first, and then stops."""


ScoreFn: TypeAlias = Callable[[Sequence[Answer]], Scores]


class RewardFunction(Protocol):
    """Scores answers in training; None where it cannot."""

    def __call__(self, answers: Sequence[Answer]) -> Scores: ...

    def take_notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        return []


# ------------------------------------------------------------------------------------------------ from a function


class PythonReward(RewardFunction):
    """A function of the user. A row that fails is named; on_error says whether the run stops or goes on."""

    def __init__(self, function: Callable[..., Any], name: str, on_error: str = "stop") -> None:
        self.function = function
        self.name = name
        self.on_error = on_error
        self.num_failed = 0
        self.notes: list[str] = []
        parameters = inspect.signature(function).parameters
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.parameters = set(parameters)

    def __call__(self, answers: Sequence[Answer]) -> Scores:
        try:
            values = self._call(answers)
        except RewardError:
            raise
        except USERS_ERRORS:
            values = [self._call_one(answer) for answer in answers]
        if len(values) != len(answers):
            raise RewardError(
                _(
                    "{name} must return a number for each of {expected} answers, it returned {got}; correct it",
                    name=self.name,
                    expected=len(answers),
                    got=len(values),
                )
            )
        return [self._checked(value, answer) for value, answer in zip(values, answers, strict=True)]

    def _call(self, answers: Sequence[Answer]) -> list[Any]:
        columns = {key for answer in answers for key in answer.example.columns}
        arguments: dict[str, Any] = {
            key: [answer.example.columns.get(key) for answer in answers]
            for key in columns
            if self.takes_all or key in self.parameters
        }
        arguments["prompts"] = [answer.example.prompt_text for answer in answers]
        arguments["completions"] = [answer.text for answer in answers]
        values = self.function(**{k: v for k, v in arguments.items() if self.takes_all or k in self.parameters})
        if not isinstance(values, Iterable):
            raise RewardError(
                _(
                    "{name} must return a list of numbers, one for each answer, it returned {got}; correct it",
                    name=self.name,
                    got=quote(repr(values), 40),
                )
            )
        return list(values)

    def _call_one(self, answer: Answer) -> Any:
        """The reward of one answer, where that of all together failed; the exception of this one is reported."""
        try:
            return self._call([answer])[0]
        except USERS_ERRORS as error:
            self._report(answer, f"{type(error).__name__}: {quote(str(error), 80)}")
            return None

    def _checked(self, value: Any, answer: Answer) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self._report(answer, quote(repr(value), 40))
            return None
        return number

    def _report(self, answer: Answer, problem: str) -> None:
        """Stop with the row that failed; or count it, and note the first one."""
        prompt = quote(answer.example.prompt_text, 40)
        text = quote(answer.text, 40)
        if self.on_error == "stop":
            raise RewardError(
                _(
                    "{name} must return a finite number, it gave {problem} for the prompt {prompt} and the answer "
                    "{answer}; correct it; a run continues with --resume, or leaves such answers out with "
                    "--reward-errors skip",
                    name=self.name,
                    problem=problem,
                    prompt=prompt,
                    answer=text,
                )
            )
        if not self.num_failed:
            self.notes.append(
                _(
                    "{name} gave {problem} for the prompt {prompt} and the answer {answer}: such answers are left out, "
                    "and `unscored` is their percentage",
                    name=self.name,
                    problem=problem,
                    prompt=prompt,
                    answer=text,
                )
            )
        self.num_failed += 1

    def take_notes(self) -> list[str]:
        notes = self.notes
        self.notes = []
        return notes


def load_function(source: str) -> Callable[..., Any]:
    """The function of file.py:function. The file is the user's own program, and runs as such."""
    path, _colon, name = source.rpartition(":")
    if not Path(path).is_file():
        raise NotFound(_("--reward {source}: there is no file {path}", source=source, path=path))
    spec = importlib.util.spec_from_file_location("headwater_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except USERS_ERRORS as error:
        raise BadInput(
            _(
                "--reward {source}: the file fails with {error}; correct it",
                source=source,
                error=f"{type(error).__name__}: {quote(str(error), 80)}",
            )
        ) from error
    functions = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    if name not in functions:
        raise BadSetting(
            _(
                "--reward {source}: no function is called {name!r}; {nearest}",
                source=source,
                name=name,
                nearest=nearest(name, functions),
            )
        )
    function: Callable[..., Any] = functions[name]
    return function


# -------------------------------------------------------------------------------------------------- from a model


class ModelReward(RewardFunction):
    """The reward of a reward model."""

    def __init__(self, source: str) -> None:
        from headwater.tasks.reward_model import score_answers

        self.loaded = load(source)
        self.score_answers = score_answers

    def __call__(self, answers: Sequence[Answer]) -> Scores:
        assert self.loaded.tokenizer is not None
        rows = [(answer.example.prompt, answer.text) for answer in answers]
        return list(self.score_answers(self.loaded.model.eval(), self.loaded.tokenizer, rows))


class ClassifierReward(RewardFunction):
    """The log-odds of a label of a classifier, log p - log(1 - p), of the prompt and the answer together."""

    def __init__(self, source: str, label: str) -> None:
        self.loaded = load(source)
        self.metadata = self.loaded.config.get("metadata", {})
        labels = list(self.metadata.get("labels", []))
        if label not in labels:
            raise BadSetting(
                _(
                    "--reward {source}: no label is called {label!r}; {nearest}",
                    source=source,
                    label=label,
                    nearest=nearest(label, labels),
                )
            )
        self.label = label

    def __call__(self, answers: Sequence[Answer]) -> Scores:
        assert self.loaded.tokenizer is not None
        texts = [answer.example.prompt_text + answer.text for answer in answers]
        task = get_task("classification")
        rows: list[Mapping[str, float]] = task.predict(
            self.loaded.model.eval(), self.loaded.tokenizer, self.metadata, [text.replace("\t", " ") for text in texts]
        )
        probabilities = [min(1 - MIN_PROBABILITY, max(MIN_PROBABILITY, row[self.label])) for row in rows]
        return [math.log(p) - math.log(1 - p) for p in probabilities]


def load_reward(source: str, on_error: str = "stop") -> RewardFunction:
    """The reward of a --reward setting: file.py:function, RUN of a reward model, or RUN:label of a classifier."""
    if on_error not in ON_ERROR:
        raise BadSetting(
            _(
                "reward_errors must be stop or skip, got {value!r}; {nearest}",
                value=on_error,
                nearest=nearest(on_error, ON_ERROR),
            )
        )
    if not source:
        raise BadSetting(
            _("this task needs a reward: --reward file.py:function, a reward model, or a classifier with :label")
        )
    path, colon, name = source.rpartition(":")
    if colon and path.endswith(".py"):
        return PythonReward(load_function(source), source, on_error)
    model = source if Path(source).exists() or not colon else path
    task = load(find_model(model)).config.get("metadata", {}).get("task", "")
    if task == "reward":
        return ModelReward(model)
    if task == "classification":
        return ClassifierReward(model, name if model != source else "")
    raise BadSetting(
        _(
            "--reward {source}: it must be a reward model or a classifier, its task is {task!r}",
            source=source,
            task=task,
        )
    )
