"""Ablation of attention heads: the head's slice of the input of the output projection is set to zero."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.inspection.attention_weights import AttentionSite, select_sites
from headwater.inspection.inputs import ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.logit_lens import head_vocab_size, lm_head
from headwater.inspection.predictions import prediction_position
from headwater.inspection.results import InspectionResult

LOGITS_PER_BATCH = 1 << 25  # logits of one forward pass


@dataclass(frozen=True)
class AblatedToken:
    """A token with its probability before and after the ablation."""

    token: Token
    prob: float
    ablated_prob: float


@dataclass(frozen=True, eq=False)
class Ablation(InspectionResult):
    """Predictions with and without one head. candidates: the most probable tokens of both at the position.

    loss, ablated_loss: the mean over the text; NaN for a single token. kl_divergence [Q]: between the two
    distributions at each position, in nats.
    """

    kind: str
    layer: int
    head: int
    tokens: tuple[Token, ...]
    candidates: tuple[AblatedToken, ...]
    loss: float
    ablated_loss: float
    kl_divergence: np.ndarray

    def lines(self) -> list[str]:
        tokens = "   ".join(f"{c.token.text!r} {c.prob:.1%} → {c.ablated_prob:.1%}" for c in self.candidates[:5])
        change: str = ""
        if not math.isnan(self.loss):
            change = _("loss {loss:.3f} → {ablated_loss:.3f}   ", loss=self.loss, ablated_loss=self.ablated_loss)
        return [
            _(
                "without {kind} {layer}.{head}: {change}{tokens}",
                kind=self.kind,
                layer=self.layer,
                head=self.head,
                change=change,
                tokens=tokens,
            )
        ]


def ablate(
    model: ModelLike,
    text: TextLike,
    layer: int,
    head: int,
    target: str | Iterable[int] | None = None,
    *,
    kind: str | None = None,
    position: int | None = None,
    top_k: int = 10,
) -> Ablation:
    """Predictions without one attention head, at a position (the last if None; of a masked model the mask token).

    kind: if None, decoder.self_attn; of an encoder, encoder.self_attn.
    """
    inputs = tokenize_input(model, text, target)
    site = _resolve_site(inputs, kind, layer, head)
    lm_head(inputs.model)

    # log p with the head and without it, each [Q, V]
    with eval_mode(inputs.model):
        before = _logprobs(inputs, 1)[0]
        with heads_ablated(inputs.model, [(site, head)]):
            after = _logprobs(inputs, 1)[0]

    # the most probable tokens of both at one position
    if position is None:
        masked = not inputs.causal and _has_mask_token(inputs)
        position = prediction_position(inputs) if masked else len(inputs.tokens) - 1
    top_ids = torch.cat((before[position].topk(top_k).indices, after[position].topk(top_k).indices)).unique()
    candidates = [
        AblatedToken(inputs.decode_token(int(n)), math.exp(before[position, n]), math.exp(after[position, n]))
        for n in top_ids
    ]
    candidates.sort(key=lambda candidate: -max(candidate.prob, candidate.ablated_prob))
    return Ablation(
        kind=site.kind,
        layer=site.layer,
        head=head,
        tokens=inputs.tokens,
        candidates=tuple(candidates),
        loss=_mean_loss(inputs, before),
        ablated_loss=_mean_loss(inputs, after),
        kl_divergence=(before.exp() * (before - after)).sum(-1).numpy(),
    )


def _has_mask_token(inputs: TokenizedInput) -> bool:
    mask_id = getattr(inputs.tokenizer, "mask_id", None)
    return any(token.id == mask_id for token in inputs.tokens)


def _resolve_site(inputs: TokenizedInput, kind: str | None, layer: int, head: int) -> AttentionSite:
    if kind is None:
        kind = "decoder.self_attn" if inputs.causal else "encoder.self_attn"
    return select_sites(inputs.model, [kind], [layer], [head])[0]


def _logprobs(inputs: TokenizedInput, batch_size: int) -> Tensor:
    """log p [B, Q, V] of batch_size equal rows."""
    model = inputs.model
    size = batch_size * len(inputs.tokens) * head_vocab_size(lm_head(model))
    if size > 16 * LOGITS_PER_BATCH:
        raise BadInput(
            _(
                "ablate: the logits of {num_tokens} tokens do not fit into memory; shorten the text",
                num_tokens=len(inputs.tokens),
            )
        )
    memory = model.encode(inputs.model_kwargs["source"].expand(batch_size, -1)) if inputs.source else None
    model_inputs = model.inputs(inputs.ids.expand(batch_size, -1), None, None, None, None)
    states = model.hidden_states(model_inputs, memory=memory)
    return lm_head(model)(states, model_inputs).float().log_softmax(-1)


def _mean_loss(inputs: TokenizedInput, log_p: Tensor) -> float:
    """The mean loss of the next tokens, from log_p [Q, V]; for a bidirectional model that of the tokens themselves."""
    tokens = inputs.next_tokens if inputs.causal else inputs.tokens
    ids = torch.tensor([token.id for token in tokens])
    return float(-log_p[: len(ids)].gather(1, ids[:, None]).mean()) if len(ids) else math.nan


HeadIndex = tuple[AttentionSite, int]  # attention layer, head


@contextlib.contextmanager
def heads_ablated(model: nn.Module, ablated: list[HeadIndex]) -> Iterator[None]:
    """Ablate the head ablated[r] in row r of the batch; a single head is ablated in every row."""
    with contextlib.ExitStack() as hooks:
        for path in {site.path for site, _ in ablated}:
            attention: Any = model.get_submodule(path)
            handle = attention.out.register_forward_pre_hook(_zero_heads_hook(path, attention.heads, ablated))
            hooks.callback(handle.remove)
        yield


def _zero_heads_hook(path: str, num_heads: int, ablated: list[HeadIndex]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward pre-hook of the output projection that sets the slices of the ablated heads to zero."""
    num_calls = 0

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal num_calls
        heads = inputs[0].unflatten(-1, (num_heads, -1)).clone()  # [B, Q, H, V]
        for row, (site, head) in enumerate(ablated):
            if (site.path, site.call_index) == (path, num_calls):
                rows = slice(row, row + 1) if len(ablated) > 1 else slice(None)
                heads[rows, :, head] = 0
        num_calls += 1
        return (heads.flatten(2), *inputs[1:])

    return hook


# ------------------------------------------------------------------------------------------------- importance of heads


@dataclass(frozen=True, eq=False)
class HeadImportance(InspectionResult):
    """The change of the mean loss when a head is ablated: loss_change [layers, heads], NaN where there is no head."""

    kind: str
    loss: float
    loss_change: np.ndarray

    def lines(self) -> list[str]:
        order = np.argsort(-np.nan_to_num(self.loss_change, nan=-np.inf), axis=None)[:5]
        best = [np.unravel_index(n, self.loss_change.shape) for n in order]
        heads = "   ".join(f"{layer}.{head} {self.loss_change[layer, head]:+.3f}" for layer, head in best)
        return [
            _(
                "most important heads of {kind} (loss {loss:.3f}, change when ablated): {heads}",
                kind=self.kind,
                loss=self.loss,
                heads=heads,
            )
        ]


def head_importance(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    kind: str | None = None,
    layers: list[int] | None = None,
) -> HeadImportance:
    """The loss with each head ablated in turn, of these layers or of all; each row of a batch ablates another head."""
    # the heads, and how many fit into one forward pass
    inputs = tokenize_input(model, text, target)
    sites = select_sites(inputs.model, [_resolve_site(inputs, kind, 0, 0).kind], layers)
    heads = [(site, head) for site in sites for head in range(site.heads)]
    loss_change = np.full((1 + sites[-1].layer, max(site.heads for site in sites)), np.nan, np.float32)
    batch_size = max(1, LOGITS_PER_BATCH // (len(inputs.tokens) * head_vocab_size(lm_head(inputs.model))))

    # the loss with all heads, then without each
    with eval_mode(inputs.model):
        loss = _mean_loss(inputs, _logprobs(inputs, 1)[0])
        if math.isnan(loss):
            raise BadSetting(_("head_importance: the text must have at least two tokens, got one; give a longer one"))
        for first in range(0, len(heads), batch_size):
            ablated = heads[first : first + batch_size]
            with heads_ablated(inputs.model, ablated):
                log_p = _logprobs(inputs, len(ablated))  # [B, Q, V]
            for (site, head), row in zip(ablated, log_p, strict=True):
                loss_change[site.layer, head] = _mean_loss(inputs, row) - loss
    return HeadImportance(sites[0].kind, loss, loss_change)
