"""Beam search with length penalty and diverse groups.

    score = log p(output) / length ** length_penalty          (length: output tokens, end-of-sequence included)

In each step all continuations of a prompt's running hypotheses compete. Of the best `width`, those that end are
finished; the best that do not end go on running. The search stops when no running hypothesis can still beat the worst
of `width` finished ones. Diverse groups: Vijayakumar et al. 2016.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.cpu.loss import TopKLogprobs, topk_logprobs
from headwater.errors import BadSetting, CheckFailed
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request, SequenceState, ValidRequest, validate_request
from headwater.generation.sampling import SampledToken, TokenHistory
from headwater.i18n import _
from headwater.parts import must, part

MAX_BATCH_ROWS = 128  # hypotheses of a forward pass; more prompts than that are searched in several batches


@part
class Beam:
    """Beam search of `width` hypotheses.

    length_penalty: above 0 favours long outputs, below 0 short ones. num_return_sequences: how many of the best to
    return. num_groups: groups that divide the width; in each step the tokens of a group cost the later groups
    diversity_penalty each, so that the outputs differ. early_stopping: stop as soon as there are `width` finished
    hypotheses, though a better one might follow; else when no running hypothesis can still win.
    """

    width: int = 4
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    num_groups: int = 1
    diversity_penalty: float = 0.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        must(1 <= self.width <= 1024, self, _("width must be from 1 to 1024"), self.width, _("4 is usual"))
        must(
            abs(self.length_penalty) <= 10,
            self,
            _("length_penalty must be from -10 to 10"),
            self.length_penalty,
            _("1 is usual"),
        )
        must(
            1 <= self.num_return_sequences <= self.width,
            self,
            _("num_return_sequences must be from 1 to the width ({width})", width=self.width),
            self.num_return_sequences,
            _("widen the beam"),
        )
        must(
            self.num_groups >= 1 and self.width % self.num_groups == 0,
            self,
            _("num_groups must divide the width ({width})", width=self.width),
            self.num_groups,
            _("choose a divisor"),
        )
        must(
            0 <= self.diversity_penalty <= 100,
            self,
            _("diversity_penalty must be from 0 to 100"),
            self.diversity_penalty,
            _("0.5 is usual"),
        )


class Hypothesis(NamedTuple):
    """A partial output: its tokens, their log-probabilities, the total after logits processors, its cache row."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total_logprob: float = 0.0
    row: int = 0


class Candidate(NamedTuple):
    """A token that may follow a hypothesis."""

    total_logprob: float
    logprob: float
    token: int
    hypothesis: Hypothesis


BY_TOTAL_LOGPROB = itemgetter(0)


class FinishedHypothesis(NamedTuple):
    """A finished hypothesis with its length-penalized score."""

    score: float
    hypothesis: Hypothesis


class BeamSearch:
    """The search of one prompt, or of one of its groups."""

    def __init__(self, request: ValidRequest, beam: Beam, row: int) -> None:
        self.request = request
        self.beam = beam
        self.width = beam.width // beam.num_groups
        self.processors = [processor for processor in request.processors if not processor.deterministic]
        self.running: list[Hypothesis] = []
        self.finished: list[FinishedHypothesis] = []
        if request.max_new_tokens:
            self.running = [Hypothesis(row=row)]
        else:
            self.finished = [FinishedHypothesis(0.0, Hypothesis())]

    @property
    def num_candidates(self) -> int:
        """As many continuations as a step can need: the best `width`, and as many that do not end."""
        return self.width * max(2, 1 + len(self.request.stop_token_ids))

    def step(self, logits: Tensor, top_tokens: TopKLogprobs | None, token_counts: Counter[int]) -> None:
        """Extend the running hypotheses by one token.

        logits [B, V] of all rows; top_tokens: the best of each row, where they decide alone. token_counts: how often
        earlier groups took each token in this step.
        """
        is_last = len(self.running[0].token_ids) + 1 == self.request.max_new_tokens
        candidates = self._candidates(logits, top_tokens, token_counts)[: self.num_candidates]
        self.running = []
        for rank, (total_logprob, logprob, token, hypothesis) in enumerate(candidates):
            extended = Hypothesis(
                (*hypothesis.token_ids, token), (*hypothesis.logprobs, logprob), total_logprob, hypothesis.row
            )
            if is_last or token in self.request.stop_token_ids:
                if rank < self.width:
                    score = self._length_penalized(total_logprob, len(extended.token_ids))
                    self.finished.append(FinishedHypothesis(score, extended))
            elif len(self.running) < self.width:
                self.running.append(extended)
        token_counts.update(hypothesis.token_ids[-1] for hypothesis in self.running)
        self._prune_finished()

    def _candidates(
        self, logits: Tensor, top_tokens: TopKLogprobs | None, token_counts: Counter[int]
    ) -> list[Candidate]:
        """The possible continuations, best first."""
        if top_tokens is None:
            return self._processed_candidates(logits, token_counts)
        candidates = [
            Candidate(hypothesis.total_logprob + logprob, logprob, token, hypothesis)
            for hypothesis in self.running
            for token, logprob in zip(top_tokens.ids[hypothesis.row], top_tokens.logprobs[hypothesis.row], strict=True)
            if logprob > -math.inf
        ]
        return sorted(candidates, key=BY_TOTAL_LOGPROB, reverse=True)  # stable: of equal ones, the first

    def _processed_candidates(self, logits: Tensor, token_counts: Counter[int]) -> list[Candidate]:
        """The same with logits processors or a diversity penalty, which need the logits of the full vocabulary."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = logits[[hypothesis.row for hypothesis in self.running]].log_softmax(-1, dtype=dtype)
        previous = logprobs.new_tensor([[hypothesis.total_logprob] for hypothesis in self.running])
        totals = self._apply_processors(logprobs) + previous  # [running, V]

        # The diversity penalty decides which candidates are taken, but does not count in their scores.
        penalized = totals.clone()
        for token, count in token_counts.items():
            penalized[:, token] -= self.beam.diversity_penalty * count

        candidates = []
        values, indices = penalized.flatten().topk(min(self.num_candidates, penalized.numel()))
        for value, index in zip(values.tolist(), indices.tolist(), strict=True):
            if value == -math.inf:
                continue
            number, token = divmod(index, penalized.shape[1])
            total_logprob = float(totals[number, token])
            logprob = float(logprobs[number, token])
            candidates.append(Candidate(total_logprob, logprob, token, self.running[number]))
        return candidates

    def _apply_processors(self, logprobs: Tensor) -> Tensor:
        histories = [TokenHistory(self.request.prompt_ids, hypothesis.token_ids) for hypothesis in self.running]
        for processor in self.processors:
            logprobs = processor(logprobs, histories)
        return logprobs

    def _length_penalized(self, total_logprob: float, length: int) -> float:
        return total_logprob / length**self.beam.length_penalty

    def _prune_finished(self) -> None:
        """Keep the best `width` finished hypotheses, and stop when no running one can beat them."""
        self.finished = sorted(self.finished, key=lambda finished: -finished.score)[: self.width]
        if len(self.finished) < self.width or not self.running:
            return
        best_length = self.request.max_new_tokens if self.beam.length_penalty > 0 else len(self.running[0].token_ids)
        best_total = max(hypothesis.total_logprob for hypothesis in self.running)
        best_score = self._length_penalized(best_total, best_length)
        if self.beam.early_stopping or best_score <= self.finished[-1].score:
            self.running = []


def beam_search(
    model: Transformer, requests: Sequence[Request], beam: Beam, context_length: int | None = None
) -> list[list[tuple[SequenceState, float]]]:
    """Beam search; for each request its best sequences with their scores, best first."""
    valid_requests = [validate_request(request, model, context_length) for request in requests]
    batch_size = max(1, MAX_BATCH_ROWS // beam.width)
    results = []
    for first in range(0, len(requests), batch_size):
        results += _search_batch(model, valid_requests[first : first + batch_size], beam)
    return results


def _search_batch(
    model: Transformer, requests: Sequence[ValidRequest], beam: Beam
) -> list[list[tuple[SequenceState, float]]]:
    """Beam search of a batch of requests over one KV cache."""
    # Prefill of the sources and the prompts.
    cache = BatchKVCache(model, range(len(requests)), max(request.max_length for request in requests))
    if requests[0].source_ids is not None:
        encode_sources(model, cache, [request.source_ids or () for request in requests])
    searches = [
        [BeamSearch(request, beam, row) for _unused in range(beam.num_groups)] for row, request in enumerate(requests)
    ]
    if any(request.max_new_tokens for request in requests):
        logits = forward_last(model, cache, [request.prompt_ids for request in requests])

    # One token for every running hypothesis in each step.
    while any(group.running for groups in searches for group in groups):
        num_candidates = max(groups[0].num_candidates for groups in searches)
        top_tokens = _check_finite(topk_logprobs(logits, min(logits.shape[1], num_candidates)))
        for groups in searches:
            token_counts: Counter[int] = Counter()
            for group in groups:
                needs_all = bool(group.processors or beam.diversity_penalty)
                if group.running:
                    group.step(logits, None if needs_all else top_tokens, token_counts)
        logits = _forward_beams(model, cache, [group for groups in searches for group in groups])
    return [_best_sequences(groups) for groups in searches]


def _forward_beams(model: Transformer, cache: BatchKVCache, searches: Sequence[BeamSearch]) -> Tensor:
    """Give each running hypothesis a cache row of its own, and forward its last token."""
    rows = [hypothesis.row for search in searches for hypothesis in search.running]
    if not rows:
        return torch.empty(0)
    cache.reorder(rows)
    new_ids = [hypothesis.token_ids[-1:] for search in searches for hypothesis in search.running]
    new_rows = iter(range(len(rows)))
    for search in searches:
        search.running = [hypothesis._replace(row=next(new_rows)) for hypothesis in search.running]
    return forward_last(model, cache, new_ids)


def _check_finite(top_tokens: TopKLogprobs) -> TopKLogprobs:
    if not all(map(math.isfinite, top_tokens.logsumexp)):
        raise CheckFailed(_("generate: the model's logits must be numbers, got NaN or inf; its weights are broken"))
    return top_tokens


def _best_sequences(groups: Sequence[BeamSearch]) -> list[tuple[SequenceState, float]]:
    """The best finished hypotheses of all groups of a prompt as sequences, with their scores."""
    request = groups[0].request
    hypotheses = [hypothesis for group in groups for hypothesis in group.finished]
    finished = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
    if not finished:
        raise BadSetting(
            _("generate: at least one token must be left in each step, the logits processors left none; suppress fewer")
        )
    results = []
    for score, hypothesis in finished[: groups[0].beam.num_return_sequences]:
        sequence = SequenceState(request, request.max_new_tokens)
        for token, logprob in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True):
            sequence.append(SampledToken(token, logprob))
        results.append((sequence, score))
    return results
