"""Predictions of a model: next-token probabilities, and the loss of each token with the perplexity of the text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headwater.core.heads import LMHeadLayer
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _, join
from headwater.inspection.inputs import InspectedModel, ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.logit_lens import head_vocab_size, lm_head, logprobs_in_chunks
from headwater.inspection.results import InspectionResult

TOKENS_PER_BATCH = 1 << 12  # of a batch in which each row has one masked token


@dataclass(frozen=True)
class NextToken:
    """A candidate for the next token, with its probability."""

    token: Token
    prob: float


@dataclass(frozen=True, eq=False)
class NextTokens(InspectionResult):
    """The most probable tokens after `context`; position: of its last token, or of the mask token."""

    position: int
    context: tuple[Token, ...]
    candidates: tuple[NextToken, ...]
    entropy: float

    def lines(self) -> list[str]:
        candidates = "   ".join(f"{candidate.token.text!r} {candidate.prob:.1%}" for candidate in self.candidates)
        context = "".join(token.text for token in self.context if token.piece_index == 1)[-24:]
        return [
            _(
                "next token after {context!r}: {candidates}   (entropy {entropy:.1f} bits)",
                context=context,
                candidates=candidates,
                entropy=self.entropy / math.log(2),
            )
        ]


def next_tokens(
    model: ModelLike,
    text: TextLike,
    top_k: int = 10,
    target: str | Iterable[int] | None = None,
    *,
    position: int | None = None,
) -> NextTokens:
    """The top_k most probable next tokens after a text, or after another position of it.

    Encoder-decoder: after `target`, or at its start. Masked language model: at the first mask token.
    """
    if top_k < 1:
        raise BadSetting(_("next_tokens: top_k must be at least 1, got {top_k}; 10 is usual", top_k=top_k))
    inputs = text if isinstance(text, TokenizedInput) else _input_before_prediction(model, text, target)
    position = prediction_position(inputs) if position is None else range(len(inputs.tokens))[position]
    with eval_mode(inputs.model):
        states, model_inputs = inputs.hidden_states()
        logits = lm_head(inputs.model)(states[:, position : position + 1], model_inputs)[0, 0]  # [V]
        log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(top_k, log_p.numel()))
    candidates = tuple(
        NextToken(inputs.decode_token(token_id), math.exp(logprob))
        for token_id, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    )
    entropy = float(-(log_p.exp() * log_p.nan_to_num()).sum())
    return NextTokens(position, inputs.tokens[: position + 1], candidates, entropy)


def _input_before_prediction(
    model: ModelLike, text: str | Iterable[int], target: str | Iterable[int] | None
) -> TokenizedInput:
    """The input after which the next token is predicted: with all tokens of the target but its end."""
    inputs = tokenize_input(model, text, target if target is not None else _empty_target(model))
    if not inputs.source or target is None:
        return inputs
    last = inputs.next_tokens[-1]
    if last.id in InspectedModel.wrap(model).eos_ids:
        return inputs
    return replace(inputs, tokens=(*inputs.tokens, last))


def _empty_target(model: ModelLike) -> list[int] | None:
    """A target of one token for an encoder-decoder, so that the decoder input is the start token alone."""
    return [0] if InspectedModel.wrap(model).is_encoder_decoder else None


def prediction_position(inputs: TokenizedInput) -> int:
    """The position whose output predicts the next token, or the first mask token."""
    if inputs.causal:
        return len(inputs.tokens) - 1
    mask_id = getattr(inputs.tokenizer, "mask_id", None)
    masked = [n for n, token in enumerate(inputs.tokens) if token.id == mask_id]
    if not masked:
        name = _("a mask token")
        if inputs.tokenizer is not None:
            name = inputs.tokenizer.special_tokens_map.get("mask", "[MASK]")
        raise BadInput(
            _(
                "next_tokens: a bidirectional model predicts masked tokens, the text has none; put {name} into "
                "the text",
                name=name,
            )
        )
    return masked[0]


# ------------------------------------------------------------------------------------------------------ token by token


@dataclass(frozen=True, eq=False)
class TokenLosses(InspectionResult):
    """The cross-entropy loss -log p of each token, losses [T] in nats, given the context the model sees.

    ranks [T]: the number of more probable tokens. top_tokens, top_probs [T]: the most probable token.
    """

    tokens: tuple[Token, ...]
    losses: np.ndarray
    ranks: np.ndarray
    top_tokens: tuple[Token, ...]
    top_probs: np.ndarray
    method: str

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700))

    def lines(self) -> list[str]:
        worst = sorted(range(len(self.tokens)), key=lambda n: -self.losses[n])[:5]
        tokens = [
            _(
                "{token!r} {prob:.1%} (most probable: {top_token!r})",
                token=self.tokens[n].text,
                prob=math.exp(-self.losses[n]),
                top_token=self.top_tokens[n].text,
            )
            for n in worst
        ]
        return [
            _(
                "loss: {mean:.2f} nats per token, perplexity {perplexity:.1f} ({method})",
                mean=self.mean,
                perplexity=self.perplexity,
                method=self.method,
            ),
            _("highest loss: {tokens}", tokens=join("   ", tokens)),
        ]


def token_losses(model: ModelLike, text: TextLike, target: str | Iterable[int] | None = None) -> TokenLosses:
    """The loss of every token given the tokens before it; for a bidirectional model, of every token masked in turn."""
    inputs = tokenize_input(model, text, target)
    head = lm_head(inputs.model)
    with eval_mode(inputs.model):
        return _causal_losses(inputs, head) if inputs.causal else _masked_losses(inputs, head)


def _causal_losses(inputs: TokenizedInput, head: LMHeadLayer) -> TokenLosses:
    if not inputs.next_tokens:
        raise BadInput(
            _("token_losses: the text must have at least two tokens, got one; the first token has no context")
        )
    states, model_inputs = inputs.hidden_states()
    ids = torch.tensor([token.id for token in inputs.next_tokens])
    stats = [
        _token_stats(log_p, ids[first : first + len(log_p)])
        for first, log_p in logprobs_in_chunks(head, states[:, : len(ids)], model_inputs, head_vocab_size(head))
    ]
    return _build_losses(inputs, inputs.next_tokens, stats, _("each token given the tokens before it"))


def _masked_losses(inputs: TokenizedInput, head: LMHeadLayer) -> TokenLosses:
    """Pseudo-log-likelihood (Salazar and others, 2020): each token that is not special is masked in its own row."""
    mask_id = getattr(inputs.tokenizer, "mask_id", None)
    if mask_id is None:
        raise BadInput(_("token_losses: a bidirectional model needs a mask token, its tokenizer has none"))
    ids = inputs.ids[0]
    positions = [n for n, token in enumerate(inputs.tokens) if token.text not in inputs.tokenizer.special_tokens]
    batch_size = max(1, TOKENS_PER_BATCH // len(inputs.tokens))
    stats = []
    for masked in torch.tensor(positions).split(batch_size):
        rows = torch.arange(len(masked))
        batch = ids.repeat(len(masked), 1)  # [B, L], one mask token per row
        batch[rows, masked] = mask_id
        model_inputs = inputs.model.inputs(batch, None, None, None, None)
        states = inputs.model.hidden_states(model_inputs)[rows, masked]  # [B, D]
        targets = ids[masked]
        stats += [
            _token_stats(log_p, targets[first : first + len(log_p)])
            for first, log_p in logprobs_in_chunks(head, states[None], model_inputs, head_vocab_size(head))
        ]
    return _build_losses(inputs, tuple(inputs.tokens[n] for n in positions), stats, _("each token masked in turn"))


def _token_stats(log_p: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """From log p [T, V]: the loss and rank of each id, the most probable token and its probability."""
    logprobs = log_p.gather(1, ids[:, None])
    top_logprobs, top_ids = log_p.max(1)
    return -logprobs[:, 0], (log_p > logprobs).sum(1), top_ids, top_logprobs.exp()


def _build_losses(
    inputs: TokenizedInput, tokens: tuple[Token, ...], stats: list[tuple[Tensor, ...]], method: str
) -> TokenLosses:
    losses, ranks, top_ids, top_probs = (torch.cat(column).numpy() for column in zip(*stats, strict=True))
    top_tokens = tuple(inputs.decode_token(int(n)) for n in top_ids)
    return TokenLosses(tokens, losses, ranks, top_tokens, top_probs, method)
