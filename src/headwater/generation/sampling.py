"""Sampling: temperature, top-k, top-p and min-p as logits processors; from logits [B, V] to one token per sequence.

B sequences, V tokens in the vocabulary. A logit of -inf means that the token is never sampled.

    (RepetitionPenalty(1.1), Temperature(0.8), TopP(0.95))

The logits processors of a sequence act one after another. Those that narrow the distribution (TopK, TopP, MinP) leave
at least one token; where suppressed tokens leave none, that sequence ends with an error that names the processor.
Sequences with equal processors are sampled together; an error of one sequence leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadSetting, CheckFailed, Fault
from headwater.i18n import _
from headwater.parts import must, part
from headwater.rng import allowed_tokens, gumbel_max

if TYPE_CHECKING:
    from headwater.generation.request import SequenceState


TOP_P_CANDIDATES = 256  # tokens that top-p sorts first: sorting a full vocabulary is seldom needed


class TokenHistory(NamedTuple):
    """The tokens of one sequence: its prompt, and its output so far."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class LogitsProcessor:
    """Base class: a pure function from logits [B, V] and the sequences' tokens to logits [B, V].

    deterministic: at most one token is left, so that there is nothing to sample.
    """

    deterministic: ClassVar[bool] = False

    def check_vocab(self, vocab_size: int) -> None:
        """Raise BadSetting if this processor names a token beyond the vocabulary."""

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- greedy and temperature


@part
class Greedy(LogitsProcessor):
    """Greedy decoding: only the most probable token; of equal ones, that with the lowest id."""

    deterministic: ClassVar[bool] = True

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        best = logits.argmax(-1, keepdim=True)  # [B, 1]
        return torch.full_like(logits, -torch.inf).scatter(-1, best, logits.gather(-1, best))


@part
class Temperature(LogitsProcessor):
    """Temperature: logits / value; below 1 a sharper distribution, above 1 a flatter one; 0 is Greedy()."""

    value: float = 1.0

    def __post_init__(self) -> None:
        law = _("value must be 0 (greedy) or from 0.0001 to 100")
        must(self.value == 0 or 1e-4 <= self.value <= 100, self, law, self.value, _("0.7 is usual"))

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        return self.value == 0

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        if self.value == 0:
            return Greedy()(logits, histories)
        return (logits - logits.amax(-1, keepdim=True)) / self.value  # minus the maximum, so that nothing overflows


# ------------------------------------------------------------------------------------------------ top-k, top-p, min-p


@part
class TopK(LogitsProcessor):
    """Top-k sampling: the k most probable tokens, and any that are as probable as the last of them."""

    k: int

    def __post_init__(self) -> None:
        must(self.k >= 1, self, _("k must be at least 1"), self.k, _("50 is usual; leave it out for all tokens"))

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        threshold = logits.topk(min(self.k, logits.shape[-1])).values[:, -1:]  # [B, 1]
        return logits.masked_fill(logits < threshold, -torch.inf)


@part
class TopP(LogitsProcessor):
    """Nucleus sampling (Holtzman et al. 2019): the most probable tokens whose probabilities sum to p.

    A token stays if the tokens before it, in order of probability, sum to less than p.
    """

    p: float

    def __post_init__(self) -> None:
        must(0 <= self.p <= 1, self, _("p must be from 0 to 1"), self.p, _("0.95 is usual; 1 keeps all tokens"))

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        if self.p == 1:
            return logits
        probs = logits.softmax(-1)

        # The most probable tokens in order; all of them only where the first few do not reach p.
        for num_candidates in (TOP_P_CANDIDATES, logits.shape[-1]):
            top_probs, ids = probs.topk(min(num_candidates, logits.shape[-1]))  # [B, K]
            cumulative = top_probs.cumsum(-1)
            if bool((cumulative[:, -1] >= self.p).all()):
                break

        nucleus = cumulative - top_probs < self.p
        nucleus[:, 0] = True
        top_logits = logits.gather(-1, ids).masked_fill(~nucleus, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, top_logits)


@part
class MinP(LogitsProcessor):
    """Min-p sampling: tokens at least p times as probable as the most probable one."""

    p: float

    def __post_init__(self) -> None:
        must(0 <= self.p <= 1, self, _("p must be from 0 to 1"), self.p, _("0.05 is usual; 0 keeps all tokens"))

    def __call__(self, logits: Tensor, histories: Sequence[TokenHistory]) -> Tensor:
        probs = logits.softmax(-1)
        return logits.masked_fill(probs < self.p * probs.amax(-1, keepdim=True), -torch.inf)


# ------------------------------------------------------------------------------------------- from logits to tokens


class ProcessorTrace(NamedTuple):
    """The probabilities [V] after one logits processor ("the model": before any)."""

    name: str
    probs: Tensor

    def top(self, k: int = 5) -> list[tuple[int, float]]:
        """The k most probable tokens of those that are left."""
        probs, ids = self.probs.topk(min(k, len(self.probs)))
        return [(int(token), float(prob)) for token, prob in zip(ids, probs, strict=True) if prob > 0]


class SampledToken(NamedTuple):
    """A sampled token; its log-probability and the top ones are the model's own, before any processor."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()
    trace: tuple[ProcessorTrace, ...] = ()


def sample(logits: Tensor, sequences: Sequence[SequenceState]) -> list[SampledToken | Fault]:
    """Sample one token for each sequence from logits [B, V].

    A sequence whose logits are not finite, or whose processors leave no token, gets a Fault instead.
    """
    # Sequences with equal processors are sampled together.
    groups: dict[tuple[LogitsProcessor, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        groups.setdefault(sequence.request.processors, []).append(index)

    results: list[SampledToken | Fault | None] = [None] * len(sequences)
    for processors, indices in groups.items():
        group_logits = logits if len(indices) == len(sequences) else logits[indices]
        sampled = _sample_group(group_logits.float(), [sequences[index] for index in indices], processors)
        for index, result in zip(indices, sampled, strict=True):
            results[index] = result
    assert all(result is not None for result in results)
    return results  # type: ignore[return-value]


def _sample_group(
    logits: Tensor, sequences: list[SequenceState], processors: tuple[LogitsProcessor, ...]
) -> list[SampledToken | Fault]:
    """Sample from logits [B, V] of sequences that have the same processors."""
    histories = [sequence.history for sequence in sequences]

    # Apply the processors, keeping the logits after each of them.
    stages = [logits]
    for processor in processors:
        stages.append(processor(stages[-1], histories))
    processed = stages[-1]
    logsumexp = logits.logsumexp(-1)  # [B]

    # Not finite: a NaN, an inf, or nothing but -inf.
    failed = ~logits.amax(-1).isfinite() | (processed.amax(-1) == -torch.inf)
    has_failed = failed.tolist()

    # Greedy: the argmax. Else Gumbel-max over the tokens that are left.
    deterministic = any(processor.deterministic for processor in processors)
    greedy = processed.argmax(-1).tolist() if deterministic else []
    candidates = [] if deterministic else allowed_tokens(processed)

    results: list[SampledToken | Fault] = []
    for i, sequence in enumerate(sequences):
        if has_failed[i]:
            results.append(_find_fault(logits[i : i + 1], histories[i], processors))
            continue
        if deterministic:
            token = greedy[i]
        else:
            step = len(histories[i].output_ids)
            token = gumbel_max(processed[i], candidates[i], sequence.request.seed, step)
        logprob = float(logits[i, token] - logsumexp[i])
        top_logprobs = _top_logprobs(logits[i], logsumexp[i], sequence)
        trace = _trace([stage[i] for stage in stages], processors) if sequence.request.trace else ()
        results.append(SampledToken(token, logprob, top_logprobs, trace))
    return results


def _top_logprobs(logits: Tensor, logsumexp: Tensor, sequence: SequenceState) -> tuple[tuple[int, float], ...]:
    """The most probable tokens of logits [V] with their log-probabilities, as many as the request asks for."""
    if not sequence.request.top_logprobs:
        return ()
    logprobs, ids = (logits - logsumexp).topk(sequence.request.top_logprobs)
    return tuple(zip(ids.tolist(), logprobs.tolist(), strict=True))


def _trace(stages: list[Tensor], processors: tuple[LogitsProcessor, ...]) -> tuple[ProcessorTrace, ...]:
    """stages: logits [V] before the first processor and after each of them."""
    names = ["the model", *(" ".join(repr(processor).split())[:60] for processor in processors)]
    return tuple(ProcessorTrace(name, logits.softmax(-1)) for name, logits in zip(names, stages, strict=True))


def _find_fault(logits: Tensor, history: TokenHistory, processors: tuple[LogitsProcessor, ...]) -> Fault:
    """The cause of a failure, for logits [1, V]: the model, or the first processor that left no token."""
    if not bool(logits.amax().isfinite()):
        length = len(history.prompt_ids) + len(history.output_ids)
        return CheckFailed(
            _(
                "generate: the model's logits must be numbers, got NaN or inf after token {length}; "
                "its weights are broken",
                length=length,
            )
        )
    for processor in processors:
        logits = processor(logits, [history])
        if not bool((logits > -torch.inf).any()):
            return BadSetting(
                _(
                    "{name}: at least one token must be left, got none after {num_tokens}; suppress fewer",
                    name=type(processor).__name__,
                    num_tokens=len(history.output_ids),
                )
            )
    raise AssertionError("a fault without a cause")
