"""Inference engine with continuous batching, chunked prefill and speculative decoding.

    engine = Engine(model)
    sequence = engine.submit(Request(prompt_ids))   # an invalid request is rejected here
    while engine.step(): ...                        # each step appends a token to every running sequence
    sequence.text, sequence.finish_reason

Requests are scheduled first come, first served. In each step at most max_prefill_tokens tokens of new prompts are
prefilled, so that one long prompt does not hold up the running sequences. The KV cache never exceeds max_num_seqs ×
max_seq_len positions. The output of a request does not depend on the other requests. An error ends its own sequence
alone. After an interruption (Ctrl-C) the next step goes on as if nothing had happened: what the KV cache has beyond a
sequence's tokens is cropped before anything is computed.

With a drafter (PromptLookup(), see speculative.py) a few tokens of each sequence are drafted before a step and verified
in it: those that the model samples anyway are appended in the same step. A forward pass of MAX_SPECULATED tokens takes
much less time than as many steps, so that number is divided among the sequences; where more than half as many run, none
is drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.errors import Fault, TooLong, Unavailable
from headwater.generation.forward import encode_sources, forward_each, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request, SequenceState, TokenEvent, validate_request
from headwater.generation.sampling import sample
from headwater.generation.speculative import Drafter, check_same_vocab
from headwater.i18n import _
from headwater.parts import must
from headwater.tuning.batches import adapter_of_each_row, check_can_share_batch

MAX_SPECULATED = 8  # tokens of a step at most, where some of them are drafted


class Prefill:
    """The prefill of new sequences in a KV cache of its own: several short prompts at once, or a long one in chunks."""

    def __init__(self, model: Transformer, sequences: Sequence[SequenceState]) -> None:
        self.model = model
        self.sequences = sequences
        prefix = sequences[0].request.prefix
        if prefix:
            self.cache = prefix.copy_cache(sequences[0], sequences[0].request.prompt_ids)
        else:
            self.cache = BatchKVCache(model, sequences)
        self.logits: Tensor | None = None

    def forward_chunk(self, token_budget: int) -> bool:
        """Prefill the next chunk; True when the prompts are complete."""
        with adapter_of_each_row(self.model, [sequence.request.adapter for sequence in self.sequences]):
            return self._forward_chunk(token_budget)

    def _forward_chunk(self, token_budget: int) -> bool:
        if self.sequences[0].request.source_ids is not None and self.cache.source_mask is None:
            encode_sources(self.model, self.cache, [sequence.request.source_ids or () for sequence in self.sequences])
        prompts = [sequence.request.prompt_ids for sequence in self.sequences]
        self.cache.crop(len(prompt) - 1 for prompt in prompts)  # removes something only after an interruption
        limit = token_budget if len(self.sequences) == 1 and not self.cache.rereads else None
        chunks = [prompt[length:][:limit] for prompt, length in zip(prompts, self.cache.lengths, strict=True)]
        self.logits = forward_last(self.model, self.cache, chunks)
        return self.cache.lengths == [len(prompt) for prompt in prompts]


class Engine:
    """Runs requests with continuous batching over one KV cache.

    max_num_seqs: sequences that run at a time. max_seq_len: tokens of a sequence, prompt and output together.
    max_prefill_tokens: prompt tokens of a step. context_length: the model's own limit. max_queue_size: requests that
    may wait. drafter, num_draft_tokens: speculative decoding, and tokens drafted for a sequence in a step.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        max_num_seqs: int = 8,
        max_seq_len: int = 4096,
        max_prefill_tokens: int = 512,
        context_length: int | None = None,
        max_queue_size: int = 1024,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 5,
    ) -> None:
        must(
            1 <= num_draft_tokens <= 64,
            "Engine",
            _("num_draft_tokens must be from 1 to 64"),
            num_draft_tokens,
            _("5 is usual"),
        )
        for name, value in (
            ("max_num_seqs", max_num_seqs),
            ("max_seq_len", max_seq_len),
            ("max_prefill_tokens", max_prefill_tokens),
            ("max_queue_size", max_queue_size),
        ):
            must(
                type(value) is int and 1 <= value <= 2**24,
                "Engine",
                _("{name} must be from 1 to 2**24", name=name),
                value,
                _("correct it"),
            )
        if drafter is not None:
            check_same_vocab(drafter, model)
        self.model = model
        self.context_length = context_length
        self.max_num_seqs = max_num_seqs
        self.max_seq_len = max_seq_len
        self.max_prefill_tokens = max_prefill_tokens
        self.max_queue_size = max_queue_size
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.cache = BatchKVCache(model, max_columns=max_seq_len)
        must(
            drafter is None or not self.cache.rereads,
            "Engine",
            _("a drafter needs a model with a KV cache"),
            type(drafter).__name__,
            _("leave it out; this attention reads whole rows again"),
        )
        self.waiting: deque[SequenceState] = deque()
        self.prefill: Prefill | None = None

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> SequenceState:
        """Queue a request, or reject it at once."""
        valid_request = validate_request(request, self.model, self.context_length)
        length = valid_request.max_length
        if length > self.max_seq_len:
            raise TooLong(
                _(
                    "Engine: a sequence may have {max_seq_len} tokens, got a request for {length}; "
                    "ask for fewer tokens",
                    max_seq_len=self.max_seq_len,
                    length=length,
                )
            )
        if len(self.waiting) >= self.max_queue_size:
            raise Unavailable(
                _(
                    "Engine: at most {max_queue_size} requests may wait, got one more; try again later",
                    max_queue_size=self.max_queue_size,
                )
            )
        must(
            request.prefix is None or request.prefix.model is self.model,
            "Engine",
            _("a prefix must be computed by the same model"),
            "another's",
            _("build it with this model"),
        )
        if request.adapter is not None:
            check_can_share_batch(self.model, request.adapter)
            must(
                request.prefix is None,
                "Engine",
                _("a request with an adapter must have no prefix"),
                request.adapter,
                _("a prefix was computed without it"),
            )
        sequence = SequenceState(valid_request, valid_request.max_new_tokens)
        if not sequence.finish_reason:
            self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: SequenceState) -> None:
        """End a sequence; its row of the KV cache is free in the next step."""
        sequence.cancelled = True

    @property
    def running(self) -> list[SequenceState]:
        return [row.owner for row in self.cache.rows]

    # ------------------------------------------------------------------------------------------------- decoding

    def step(self) -> bool:
        """One decode step: a token for each running sequence (and its accepted drafts), then a chunk of prefill.

        Returns False when there is nothing left to do.
        """
        self._evict_finished()
        running = self.running
        if running:
            self._decode_step(running)
        self._schedule_prefill()
        return bool(self.waiting) or any(not sequence.finish_reason for sequence in self.running)

    def run(self) -> None:
        """Step until all requests are finished."""
        while self.step():
            pass

    def stream(self) -> Iterator[tuple[SequenceState, TokenEvent]]:
        """Step until all requests are finished; yields each event once, with its sequence."""
        num_yielded: dict[int, int] = {}
        has_more = True
        while has_more:
            sequences = [*self.running, *self.waiting]
            has_more = self.step()
            for sequence in sequences:
                key = id(sequence)
                for event in sequence.events[num_yielded.get(key, 0) :]:
                    num_yielded[key] = num_yielded.get(key, 0) + 1
                    yield sequence, event

    def _decode_step(self, sequences: list[SequenceState]) -> None:
        self.cache.crop(len(sequence) - 1 for sequence in sequences)  # removes rejected drafts, and an interrupted step
        lengths = self.cache.lengths
        new_ids = [sequence.tokens_from(length) for sequence, length in zip(sequences, lengths, strict=True)]

        drafts = [list(self._propose(sequence, len(sequences))) for sequence in sequences]
        adapters = adapter_of_each_row(self.model, [sequence.request.adapter for sequence in sequences])
        if not any(drafts):
            with adapters:
                next_logits = forward_last(self.model, self.cache, new_ids)
            self._append_tokens(next_logits, sequences)
            return
        with_drafts = [[*ids, *draft] for ids, draft in zip(new_ids, drafts, strict=True)]
        with adapters:
            logits = forward_each(self.model, self.cache, with_drafts, [1 + len(draft) for draft in drafts])
        self._verify_drafts(logits, sequences, drafts)

    def _propose(self, sequence: SequenceState, batch_size: int) -> Sequence[int]:
        """Draft tokens for a sequence; none where speculation does not pay."""
        max_tokens = min(
            self.num_draft_tokens,
            max(MAX_SPECULATED, 1 + self.num_draft_tokens) // batch_size - 1,
            sequence.max_new_tokens - len(sequence.events) - 1,
        )
        if self.drafter is None or max_tokens < 1 or not sequence.acceptance_tracker.should_draft():
            return ()
        return self.drafter.propose(sequence, max_tokens)

    def _verify_drafts(self, logits: list[Tensor], sequences: list[SequenceState], drafts: list[list[int]]) -> None:
        """Append sampled tokens to each sequence while they equal its draft; logits [1 + len(draft), V] of each."""
        active = list(zip(sequences, logits, drafts, strict=True))
        position = 0
        while active:
            step_logits = torch.stack([sampled[position] for _, sampled, _ in active])  # [B, V]
            self._append_tokens(step_logits, [sequence for sequence, _, _ in active])
            still_active = []
            for sequence, sampled, draft in active:
                accepted = sequence.output_ids[-1:] == draft[position : position + 1]
                if accepted and not sequence.finish_reason:
                    still_active.append((sequence, sampled, draft))
                else:
                    sequence.acceptance_tracker.update(len(draft), position + accepted)
            active = still_active
            position += 1

    def _append_tokens(self, logits: Tensor, sequences: Sequence[SequenceState]) -> None:
        for sequence, sampled in zip(sequences, sample(logits, sequences), strict=True):
            if isinstance(sampled, Fault):
                sequence.fault = sampled
            else:
                sequence.append(sampled)

    def _evict_finished(self) -> None:
        for row in reversed(range(len(self.cache.rows))):
            if self.cache.rows[row].owner.finish_reason:
                self.cache.remove_row(row)

    # ------------------------------------------------------------------------------------------------- prefill

    def _schedule_prefill(self) -> None:
        """Prefill prompts in order, up to the token budget, while the KV cache has free rows."""
        budget = self.max_prefill_tokens
        while budget > 0 and (group := self._next_prefill_batch(budget)):
            if self.prefill is None or list(self.prefill.sequences) != group:
                self.prefill = Prefill(self.model, group)
            budget -= max(len(sequence.request.prompt_ids) for sequence in group) * len(group)
            if self._run_prefill(self.prefill):
                self.prefill = None
        self._drop_started()

    def _drop_started(self) -> None:
        """Remove finished and running sequences from the head of the queue."""
        running = {id(sequence) for sequence in self.running}
        while self.waiting and (self.waiting[0].finish_reason or id(self.waiting[0]) in running):
            self.waiting.popleft()

    def _next_prefill_batch(self, token_budget: int) -> list[SequenceState]:
        """The sequences to prefill next: as many of the first waiting ones as the budget allows, one at least."""
        self._drop_started()
        if self.prefill is not None and self.waiting and self.prefill.sequences[0] is self.waiting[0]:
            return list(self.prefill.sequences)
        group: list[SequenceState] = []
        width = 0  # of the padded batch
        for sequence in self.waiting:
            request = sequence.request
            width = max(width, len(request.prompt_ids), len(request.source_ids or ()))
            has_prefix = request.prefix is not None
            is_full = len(self.cache.rows) + len(group) >= self.max_num_seqs
            if is_full or sequence.finish_reason:
                break
            if group and (has_prefix or width * (len(group) + 1) > token_budget):
                break
            group.append(sequence)
            if has_prefix:
                break
        return group

    def _run_prefill(self, prefill: Prefill) -> bool:
        """Run one chunk; True when the sequences run in the batch, or have ended with an error."""
        try:
            if not prefill.forward_chunk(self.max_prefill_tokens):
                return False
        except Fault as fault:
            if len(prefill.sequences) == 1:
                prefill.sequences[0].fault = fault
                return True
            for sequence in prefill.sequences:
                self._run_prefill(Prefill(self.model, [sequence]))
            return True
        self.cache.append_rows(prefill.cache)
        assert prefill.logits is not None
        self._append_tokens(prefill.logits, prefill.sequences)
        return True
