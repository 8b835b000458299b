"""Rollouts: answers sampled from the model that learns, scored, and kept as the dataset of the next steps.

An iteration samples `rollouts` answers with the engine of headwater.generation, and learns from them in minibatches,
`epochs` times in fresh random orders. Prompts, seeds and orders are functions of the iteration alone; the answers and
what was computed of them are in the checkpoint. So a resumed run is the run that never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.data.answers import ChatEncoder
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.conversations import PromptExample
from headwater.data.dataset import Dataset, IndexBatch, micro_batches
from headwater.data.step_metrics import MetricMeans
from headwater.generation.api import TextModel, generate
from headwater.generation.request import FinishReason
from headwater.rng import SEED_LIMIT, permutation, permuted_index, random_bits
from headwater.tasks.logprobs import language_head, target_logprobs
from headwater.tasks.rewards import Answer, RewardFunction, Scores
from headwater.text.tokenizer import Tokenizer
from headwater.tuning import Full, use_adapter
from headwater.tuning.base import tuning_of

VALUE_PATHS = "head.value.*"  # of PPO's value head
SCORING_TOKENS = 8192  # of a batch whose log-probabilities are computed without a gradient


class SampledAnswer(NamedTuple):
    """An answer with its token ids, the end included. ended: it ended by itself."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    ended: bool


@dataclass(frozen=True)
class RolloutBatch(TrainBatch):
    """Rows of prompt and answer; all [B, Q] at the position before each token of the answer, 0 elsewhere."""

    old_logprobs: np.ndarray | None = None  # when the answer was sampled
    reference_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    old_values: np.ndarray | None = None
    weights: np.ndarray | None = None  # of the loss of each token


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled. num_per_prompt: answers to each prompt, one after the other."""

    rollouts: int
    minibatch: int
    epochs: int
    num_per_prompt: int
    max_tokens: int
    temperature: float
    seed: int


# Rollout arrays [N, Q] by name, and the metrics of the iteration.
Learn = Callable[[dict[str, Tensor], Tensor], dict[str, float]]


def language_model(model: Transformer) -> Transformer:
    """The model with its language-model head alone, sharing every module: what samples and is saved."""
    head = language_head(model)
    if head is model.head:
        return model
    lm_spec = dict(model.spec.head.heads)["lm"]  # type: ignore[attr-defined]
    tied = tuple((path.replace("head.lm.", "head."), home) for path, home in model.spec.tied)
    view = replace(model.spec, head=lm_spec, tied=tied).on_meta()
    view.encoder = model.encoder
    view.decoder = model.decoder
    view.head = head
    if (tuning := tuning_of(model)) is not None:
        adapters = {name: tuple(method for method in methods if method != Full(VALUE_PATHS))
                    for name, methods in tuning.adapters.items()}  # fmt: skip
        view.__dict__["tuning"] = replace(tuning, adapters=adapters)
    return view.train(model.training)


def language_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint under the names of its language model: without the value head of PPO."""
    if not any(path.startswith("head.value.") for path in tensors):
        return tensors
    names = {path: path.replace("head.lm.", "head.", 1) for path in tensors if not path.startswith("head.value.")}
    return {name: tensors[path] for path, name in names.items()}


def sample_answers(
    model: Transformer, text_model: TextModel, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], **options: Any
) -> list[SampledAnswer]:
    """An answer to each prompt."""
    with eval_mode(model):
        completions = generate(text_model, list(prompts), seed=list(seeds), **options)
    return [
        SampledAnswer(tuple(prompt), each.ids, each.text, each.finish_reason is FinishReason.EOS)
        for prompt, each in zip(prompts, completions, strict=True)
    ]


class Reference:
    """The model that the policy is held to: a frozen copy of the initial one."""

    def __init__(self, model: Transformer) -> None:
        self.model = _frozen_copy(model)

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"reference:{name}": p.detach().numpy() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[f"reference:{name}"]))

    def active(self, policy: Transformer) -> AbstractContextManager[Transformer]:
        """The reference in a block."""
        return nullcontext(self.model)


class AdapterReference(Reference):
    """The reference of a tuned model: its base, with the adapter switched off."""

    def __init__(self) -> None:
        pass

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        pass

    @contextmanager
    def active(self, policy: Transformer) -> Iterator[Transformer]:
        tuning = tuning_of(policy)
        assert tuning is not None
        name = tuning.selection.active
        use_adapter(policy, None)
        try:
            yield policy
        finally:
            use_adapter(policy, name)


@torch.no_grad()
def _frozen_copy(model: Transformer) -> Transformer:
    view = language_model(model)
    copied = view.spec.build(seed=0)
    values = dict(view.named_parameters())
    for name, parameter in copied.named_parameters():
        parameter.copy_(values[name])
    return copied.requires_grad_(False).eval()


class RolloutDataset(Dataset):
    """Prompts, and the answers of the current iteration. bind() gives it the model; learn() computes advantages."""

    def __init__(
        self,
        prompts: Sequence[PromptExample],
        encoder: ChatEncoder,
        tokenizer: Tokenizer,
        reward: RewardFunction,
        sampling: Sampling,
        special_tokens: SpecialTokens,
    ) -> None:
        self.prompts = prompts
        self.prompt_ids = [tuple(encoder.prompt_ids(example.prompt)) for example in prompts]
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.reward = reward
        self.sampling = sampling
        self.metrics = MetricMeans()
        self.iteration = -1
        self.arrays: dict[str, np.ndarray] = {}
        self.iteration_metrics: dict[str, float] = {}
        self.reference: Reference | None = None
        self.is_rehearsal = False  # before a checkpoint is restored: nothing is asked of the user's function
        lengths = np.array([len(ids) + sampling.max_tokens for ids in self.prompt_ids])
        super().__init__(lengths, special_tokens, int(lengths.max()) * sampling.minibatch, sampling.seed)
        self.probe_batches = self.steps_per_iteration

    def bind(self, model: Transformer, learn: Learn, reference: Reference | None) -> None:
        """The model that answers, how advantages follow from scores, and the reference."""
        self.model = model
        self.learn = learn
        self.reference = reference

    # ----------------------------------------------------------------------------------------------------- the order

    @property
    def steps_per_iteration(self) -> int:
        return self.sampling.epochs * -(-self.sampling.rollouts // self.sampling.minibatch)

    @property
    def size(self) -> int:
        """Positions of one pass over the prompts."""
        return len(self.prompts) * self.sampling.num_per_prompt * self.sampling.epochs

    def steps_per_epoch(self) -> int:
        return max(1, self.size // self.sampling.minibatch)

    def batches_from(self, position: int) -> Iterator[IndexBatch]:
        """Minibatches; at the beginning of an iteration its answers are sampled from the model as it is now."""
        plan = self.sampling
        while True:
            iteration, offset = divmod(position, plan.rollouts * plan.epochs)
            if self.iteration != iteration:
                self.roll_out(iteration)
            if not offset:
                self.metrics.update(self.iteration_metrics)
            epoch, done = divmod(offset, plan.rollouts)
            order = permutation(plan.rollouts, plan.seed, iteration, "minibatches", epoch)
            rows = order[done : done + plan.minibatch]
            yield IndexBatch(rows, iteration, position)
            position += len(rows)

    def micro_batches(self, examples: np.ndarray, max_tokens: int) -> Sequence[np.ndarray]:
        lengths = self.arrays["lengths"]
        by_length = examples[np.argsort(lengths[examples], kind="stable")]
        return micro_batches(by_length, lengths, max(max_tokens, int(lengths[examples].max(initial=1))))

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        width = int(self.arrays["lengths"][examples].max(initial=1))
        names = {field.name for field in fields(RolloutBatch)} & self.arrays.keys()
        return RolloutBatch(**{name: self.arrays[name][examples, :width] for name in names})

    # ------------------------------------------------------------------------------------------------------ sampling

    def roll_out(self, iteration: int) -> None:
        """Sample, score and keep the answers of an iteration."""
        start = time.monotonic()
        answers, examples = self._sample(iteration)
        scores = self._score(answers, examples)
        batch = self._rows(answers)
        with torch.no_grad(), eval_mode(self.model):
            for name, value in self._logprobs(batch).items():
                batch[name] = value
            metrics = self.learn(batch, torch.tensor([np.nan if s is None else s for s in scores]))
        self.arrays = {name: value.numpy() for name, value in batch.items()}
        self.iteration = iteration
        ended = 100 * sum(answer.ended for answer in answers) / len(answers)
        length = sum(len(answer.ids) for answer in answers) / len(answers)
        unscored = 100 * sum(score is None for score in scores) / len(scores)
        self.iteration_metrics = {**metrics, "ended": ended, "length": length, "unscored": unscored}
        self.extra_step_seconds = (time.monotonic() - start) / self.steps_per_iteration

    def _sample(self, iteration: int) -> tuple[list[SampledAnswer], list[PromptExample]]:
        plan = self.sampling
        num_prompts = plan.rollouts // plan.num_per_prompt
        chosen: list[int] = []
        for position in range(iteration * num_prompts, (iteration + 1) * num_prompts):
            epoch, offset = divmod(position, len(self.prompts))
            index = int(permuted_index(np.array([offset]), len(self.prompts), plan.seed, epoch)[0])
            chosen += [index] * plan.num_per_prompt
        seeds = [int(random_bits(plan.seed, iteration, "rollout", i)) % SEED_LIMIT for i in range(plan.rollouts)]
        answers = self.answer([self.prompt_ids[i] for i in chosen], seeds)
        return answers, [self.prompts[i] for i in chosen]

    def answer(self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> list[SampledAnswer]:
        """Answers of the model as it is now."""
        eos_ids = tuple(self.encoder.eos_ids)
        text_model = TextModel(language_model(self.model), self.tokenizer, eos_ids=eos_ids)
        options = {"temperature": self.sampling.temperature, "max_tokens": self.sampling.max_tokens}
        return sample_answers(self.model, text_model, prompts, seeds, **options)

    def _score(self, answers: Sequence[SampledAnswer], examples: Sequence[PromptExample]) -> Scores:
        if self.is_rehearsal:
            return [0.0] * len(answers)
        return self.reward([Answer(example, answer.text) for example, answer in zip(examples, answers, strict=True)])

    def _rows(self, answers: Sequence[SampledAnswer]) -> dict[str, Tensor]:
        """ids, targets, attention_mask [N, Q], lengths [N] and ended [N] of the answers."""
        lengths = torch.tensor([len(answer.prompt_ids) + len(answer.ids) for answer in answers])
        width = int(lengths.max())
        ids = torch.full((len(answers), width), self.special_tokens.pad_id)
        targets = torch.full((len(answers), width), IGNORE_INDEX)
        for row, answer in enumerate(answers):
            tokens = torch.tensor([*answer.prompt_ids, *answer.ids])
            first = len(answer.prompt_ids)
            ids[row, : len(tokens)] = tokens
            targets[row, first - 1 : len(tokens) - 1] = tokens[first:]  # a target stands before its token
        ended = torch.tensor([answer.ended for answer in answers])
        mask = torch.ones(ids.shape, dtype=torch.bool)  # padding is on the right, never in the past of a token
        return {"ids": ids, "targets": targets, "attention_mask": mask, "lengths": lengths, "ended": ended}

    def _logprobs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Log-probabilities of the answers in the policy and in the reference, and the values of their tokens."""
        out: dict[str, Tensor] = {"old_logprobs": self._in_batches(self.model, batch, target_logprobs_at)}
        if isinstance(self.model.head, nn.ModuleDict):
            out["old_values"] = self._in_batches(self.model, batch, token_values)
        if self.reference is not None:
            with self.reference.active(self.model) as reference:
                out["reference_logprobs"] = self._in_batches(reference, batch, target_logprobs_at)
        return out

    def _in_batches(
        self, model: Transformer, batch: Mapping[str, Tensor], compute: Callable[[Transformer, Any, float], Tensor]
    ) -> Tensor:
        rows = max(1, SCORING_TOKENS // batch["ids"].shape[1])
        ids = batch["ids"].split(rows)
        targets = batch["targets"].split(rows)
        parts = [
            compute(model, {"ids": a, "targets": b}, self.sampling.temperature)
            for a, b in zip(ids, targets, strict=True)
        ]
        return torch.cat(parts)

    # -------------------------------------------------------------------------------------------------------- state

    def take_metrics(self) -> dict[str, float]:
        return self.metrics.take()

    def take_notes(self) -> list[str]:
        return self.reward.take_notes()

    def state_arrays(self) -> dict[str, np.ndarray]:
        state = {f"rollout:{name}": array for name, array in self.arrays.items()}
        reference = {} if self.reference is None else self.reference.arrays()
        return {**state, **reference, **self.learner_state(), "iteration": np.array([self.iteration])}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        prefix = "rollout:"
        self.arrays = {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
        self.iteration = int(arrays["iteration"][0])
        if self.reference is not None:
            self.reference.load_arrays(arrays)
        self.load_learner_state(arrays)
        self.is_rehearsal = False

    def learner_state(self) -> dict[str, np.ndarray]:
        """The state of what computes advantages; set by the task."""
        return {}

    def load_learner_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of learner_state."""


def target_logprobs_at(model: Transformer, batch: Mapping[str, Tensor], temperature: float) -> Tensor:
    """[B, Q] log-probabilities of the targets at a temperature."""
    return target_logprobs(model, batch, temperature)


def token_values(model: Transformer, batch: Mapping[str, Tensor], temperature: float) -> Tensor:
    """[B, Q] the values of the tokens of an answer, read before them."""
    inputs = model.inputs(batch["ids"])
    head: Any = model.head
    values: Tensor = head["value"](model.hidden_states(inputs), inputs)[..., 0].float()
    return values * (batch["targets"] != IGNORE_INDEX)
