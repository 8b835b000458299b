"""The logit lens (nostalgebraist, 2020): the LM head on the residual stream after each layer; the loss of a text.

The final norm and the head are applied to the residual stream after each layer. A pre-norm stack has a final norm,
which the stream of every layer needs before the head; in a post-norm stack the stream of each layer is normalized
already, and the final norm is the identity. At the last layer the lens gives the model's own predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core.embeddings import ModelInputs
from headwater.core.heads import ClassificationHeadLayer, LMHeadLayer, TokenClassificationHeadLayer
from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.inspection.inputs import ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.results import InspectionResult
from headwater.tasks.losses import cross_entropy
from headwater.variants.multi_task_head import MultiTaskHeadLayer


@dataclass(frozen=True, eq=False)
class LogitLens(InspectionResult):
    """Predictions after each layer. Row 0 is the embedding, row n the stream after layer n - 1. L layers, P positions.

    top_ids, top_probs [L + 1, P, K]: the most probable tokens. entropy [L + 1, P] in nats. prediction [P]: the model's
    final prediction; prediction_probs, prediction_ranks [L + 1, P]: its probability and rank after each layer.
    """

    tokens: tuple[Token, ...]
    positions: tuple[int, ...]
    layers: tuple[str, ...]
    top_ids: np.ndarray
    top_probs: np.ndarray
    entropy: np.ndarray
    prediction: tuple[Token, ...]
    prediction_probs: np.ndarray
    prediction_ranks: np.ndarray
    top_tokens: tuple[tuple[Token, ...], ...]  # [L + 1][P]: the most probable token as text

    def converged_layer(self, column: int) -> int:
        """The first row from which on the model's prediction stays the most probable token."""
        other_layers = np.flatnonzero(self.prediction_ranks[:, column] > 0)
        return int(other_layers[-1]) + 1 if len(other_layers) else 0

    def lines(self) -> list[str]:
        lines: list[str] = [_("logit lens, at the last position:")]
        for row, name in enumerate(self.layers):
            lines.append(f"  {name:<12} {self.top_tokens[row][-1].text!r:<16} {self.top_probs[row, -1, 0]:.1%}")
        return lines


def lens(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    top_k: int = 5,
    positions: Iterable[int] | None = None,
) -> LogitLens:
    """The logit lens: the predictions after each layer, at all positions or at the selected ones."""
    inputs = tokenize_input(model, text, target)
    if top_k < 1:
        raise BadSetting(_("lens: top_k must be at least 1, got {top_k}; 5 is usual", top_k=top_k))
    length = len(inputs.tokens)
    selected = list(range(length)) if positions is None else [int(n) % length for n in positions]
    with eval_mode(inputs.model):
        head = lm_head(inputs.model)
        streams = torch.cat(residual_streams(inputs))[:, selected]
        states = inputs.model.output_stack.final_norm(streams)  # [L + 1, P, D]
        predicted = torch.cat([log_p.argmax(1) for _, log_p in _logprobs(inputs, head, states[-1:])])  # [P]
        stats = _lens_stats(inputs, head, states, predicted, top_k)
    top_ids, top_probs, entropy, probs, ranks = (t.unflatten(0, states.shape[:2]).numpy() for t in stats)
    return LogitLens(
        tokens=inputs.tokens,
        positions=tuple(selected),
        layers=("embedding", *(f"layer {n}" for n in range(len(states) - 1))),
        top_ids=top_ids,
        top_probs=top_probs,
        entropy=entropy,
        prediction=tuple(inputs.decode_token(int(n)) for n in predicted),
        prediction_probs=probs,
        prediction_ranks=ranks,
        top_tokens=tuple(tuple(inputs.decode_token(int(n)) for n in row[:, 0]) for row in top_ids),
    )


def residual_streams(inputs: TokenizedInput) -> list[Tensor]:
    """The residual stream [1, Q, D] after the embedding and after each layer of the stack before the head."""
    stack = inputs.model.output_stack
    captured: list[Tensor] = []
    modules = [stack.embed, *stack.layers]
    handles = [module.register_forward_hook(lambda m, i, output: captured.append(output)) for module in modules]
    try:
        inputs.hidden_states()
    finally:
        for handle in handles:
            handle.remove()
    return captured


def _logprobs(inputs: TokenizedInput, head: LMHeadLayer, states: Tensor) -> Iterator[tuple[int, Tensor]]:
    """log p [positions, V] in chunks over all layers and positions: a quantized head is dequantized once per chunk."""
    model_inputs = inputs.model.inputs(inputs.ids, None, None, None, None)
    yield from logprobs_in_chunks(head, states.flatten(0, 1)[None], model_inputs, head_vocab_size(head))


def _lens_stats(
    inputs: TokenizedInput, head: LMHeadLayer, states: Tensor, prediction: Tensor, top_k: int
) -> list[Tensor]:
    """For each of (L + 1) · P states: the top ids and probabilities, the entropy, the prediction's prob and rank."""
    predictions = prediction.repeat(len(states))
    chunks = []
    for first, log_p in _logprobs(inputs, head, states):
        top = log_p.topk(min(top_k, log_p.shape[1]))
        predicted = log_p.gather(1, predictions[first : first + len(log_p), None])
        probs = log_p.exp()
        entropy = -torch.special.xlogy(probs, probs).sum(1)
        chunks.append((top.indices, top.values.exp(), entropy, predicted[:, 0].exp(), (log_p > predicted).sum(1)))
    return [torch.cat(column) for column in zip(*chunks, strict=True)]


# ------------------------------------------------------------------------------------------------------- the LM head

LOGITS_PER_CHUNK = 1 << 24  # 64 MB


def lm_head(model: Transformer) -> LMHeadLayer:
    """The LM head of a model; raises BadInput if it has none."""
    heads = list(model.head.values()) if isinstance(model.head, MultiTaskHeadLayer) else [model.head]
    head = next((head for head in heads if isinstance(head, LMHeadLayer)), None)
    if head is None:
        kind = type(model.head).__name__
        raise BadInput(
            _("this needs a language-modeling head, the model has {kind}; load it with head='language'", kind=kind)
        )
    return head


def has_lm_head(model: Transformer) -> bool:
    heads = list(model.head.values()) if isinstance(model.head, MultiTaskHeadLayer) else [model.head]
    return any(isinstance(head, LMHeadLayer) for head in heads)


def logprobs_in_chunks(
    head: LMHeadLayer, states: Tensor, inputs: ModelInputs, vocab: int
) -> Iterator[tuple[int, Tensor]]:
    """(first position, log p [positions, V] in float32) for each chunk of the states [1, Q, D]."""
    size = max(1, LOGITS_PER_CHUNK // vocab)
    for first in range(0, states.shape[1], size):
        yield first, head(states[:, first : first + size], inputs)[0].float().log_softmax(-1)


def head_vocab_size(head: LMHeadLayer) -> int:
    return int(head.out.out_features)


# ------------------------------------------------------------------------------------------------------------- the loss


def text_loss(inputs: TokenizedInput) -> tuple[Tensor, str]:
    """The loss of a text, with its gradient, and its name.

    Causal language model: the mean cross-entropy of the next tokens. Masked: that of every seventh token, masked.
    Classifier: the cross-entropy of the predicted label. Without a head: half the mean square of the hidden states.
    """
    if inputs.causal:
        return _causal_lm_loss(inputs), _("mean cross-entropy of the tokens")
    mask_id = getattr(inputs.tokenizer, "mask_id", None)
    if has_lm_head(inputs.model) and mask_id is not None:
        return _masked_lm_loss(inputs, mask_id), _("mean cross-entropy of every seventh token, masked")
    output = inputs.forward()
    if isinstance(inputs.model.head, (ClassificationHeadLayer, TokenClassificationHeadLayer)):
        return _mean_cross_entropy(output, output.argmax(-1)), _("cross-entropy of the predicted label")
    states = _token_logits(output)
    return states.float().square().mean() / 2, _("half the mean square of the hidden states")


def _causal_lm_loss(inputs: TokenizedInput) -> Tensor:
    lm_head(inputs.model)
    ids = torch.tensor([[token.id for token in inputs.next_tokens]])
    if not ids.shape[1]:
        raise BadInput(_("a loss needs at least two tokens, got one; give a longer text"))
    return _mean_cross_entropy(_token_logits(inputs.forward())[:, : ids.shape[1]], ids)


def _masked_lm_loss(inputs: TokenizedInput, mask_id: int) -> Tensor:
    ids = inputs.ids
    masked = slice(1, None, 7) if len(inputs.tokens) > 1 else slice(0, 1)
    targets = ids[:, masked].clone()
    ids[:, masked] = mask_id
    return _mean_cross_entropy(_token_logits(inputs.model(ids))[:, masked], targets)


def _token_logits(output: Any) -> Tensor:
    """The logits over tokens; of several heads, those of the LM head."""
    return max(output.values(), key=lambda t: t.shape[-1]) if isinstance(output, dict) else output


def _mean_cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits, ids) / ids.numel()
