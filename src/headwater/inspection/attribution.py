"""Attribution of an output's log probability to the input tokens: integrated gradients, input x gradient, occlusion.

integrated_gradients   x · ∫₀¹ ∇f(a x) da: the scores add up to f(x) - f(0) (Sundararajan and others, 2017)
input_x_gradient       x · ∇f(x): one backward pass, an approximation
occlusion              f(x) - f(x with one token's embedding zero): one forward pass per token, no gradients

x are the token embeddings before positions are added. A score measures what the model's output depends on, not whether
the output is correct. Deep models may be so nonlinear between 0 and x that the integral does not converge: then
completeness_gap is large, and occlusion is the better method. Attention weights are not attributions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.heads import ClassificationHeadLayer
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.inspection.inputs import ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.logit_lens import head_vocab_size, lm_head
from headwater.inspection.predictions import prediction_position
from headwater.inspection.results import InspectionResult

METHODS = ("integrated_gradients", "input_x_gradient", "occlusion")
MAX_COMPLETENESS_GAP = 0.05
MAX_STEPS = 64  # of the quadrature
TOKENS_PER_BATCH = 1 << 11


@dataclass(frozen=True, eq=False)
class Attribution(InspectionResult):
    """The contribution of each token to log p of an output: attributions of `tokens`, source_attributions of `source`.

    logprob, baseline_logprob: log p of the output, and log p with all embeddings zero. completeness_gap:
    |Σ attributions - (logprob - baseline_logprob)| over |logprob - baseline_logprob|; NaN for methods without that sum.
    """

    tokens: tuple[Token, ...]
    attributions: np.ndarray
    source: tuple[Token, ...]
    source_attributions: np.ndarray
    position: int
    output: str
    method: str
    logprob: float
    baseline_logprob: float
    completeness_gap: float
    steps: int

    def lines(self) -> list[str]:
        scores = [
            *zip(self.source, self.source_attributions, strict=True),
            *zip(self.tokens, self.attributions, strict=True),
        ]
        largest = sorted(scores, key=lambda pair: -abs(pair[1]))[:6]
        tokens = "   ".join(f"{token.text!r} {score:+.2f}" for token, score in largest)
        prob = f"{math.exp(self.logprob):.1%}"
        if math.isnan(self.completeness_gap):
            return [_("attribution of {output!r} (p = {prob}): {tokens}", output=self.output, prob=prob, tokens=tokens)]
        return [
            _(
                "attribution of {output!r} (p = {prob}; complete to {fraction:.0%}): {tokens}",
                output=self.output,
                prob=prob,
                fraction=1 - self.completeness_gap,
                tokens=tokens,
            )
        ]


def attribute(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    position: int | None = None,
    token_id: int | None = None,
    method: str = "integrated_gradients",
) -> Attribution:
    """Attribute log p of an output token at a position to the input tokens.

    token_id: the most probable token if None. position: the last one if None.
    """
    if method not in METHODS:
        raise BadSetting(
            _(
                "attribution: method must be one of {methods}, got {method!r}; {nearest}",
                methods=", ".join(METHODS),
                method=method,
                nearest=nearest(method, METHODS),
            )
        )

    # the output to explain
    inputs = tokenize_input(model, text, target)
    position = _resolve_position(inputs, position)
    with eval_mode(inputs.model):
        token_id = _resolve_output(inputs, position, token_id)

    # the scores [Q] of each stack, source first
    output = _OutputFunction(inputs, position, token_id)
    with eval_mode(inputs.model, enable_grad=True):
        scores, logprob, baseline, steps = getattr(output, method)()

    gap = _completeness_gap(scores, logprob - baseline) if method == "integrated_gradients" else math.nan
    source_scores = scores[0].numpy() if inputs.source else np.zeros(0, np.float32)
    return Attribution(
        tokens=inputs.tokens,
        attributions=scores[-1].numpy(),
        source=inputs.source,
        source_attributions=source_scores,
        position=position,
        output=output.output_text(),
        method=method,
        logprob=logprob,
        baseline_logprob=baseline,
        completeness_gap=gap,
        steps=steps,
    )


def _completeness_gap(scores: list[Tensor], difference: float) -> float:
    """The relative error of completeness: |Σ scores - (f(x) - f(0))| / |f(x) - f(0)|."""
    total = sum(float(side.sum()) for side in scores)
    return abs(total - difference) / max(abs(difference), 1e-6)


def _resolve_position(inputs: TokenizedInput, position: int | None) -> int:
    if isinstance(inputs.model.head, ClassificationHeadLayer):
        return 0
    if position is None:
        position = len(inputs.tokens) - 1 if inputs.causal else prediction_position(inputs)
    if not -len(inputs.tokens) <= position < len(inputs.tokens):
        raise BadSetting(
            _(
                "attribution: position must be below {num_tokens}, got {position}; count from 0",
                num_tokens=len(inputs.tokens),
                position=position,
            )
        )
    return position % len(inputs.tokens)


def _resolve_output(inputs: TokenizedInput, position: int, token_id: int | None) -> int:
    """The id of the output to explain: token_id, or the most probable one."""
    if not isinstance(inputs.model.head, ClassificationHeadLayer):
        size = head_vocab_size(lm_head(inputs.model))
    else:
        size = inputs.model.head.out.out_features
    if token_id is not None and not (type(token_id) is int and 0 <= token_id < size):
        raise BadSetting(
            _(
                "attribution: token_id must be from 0 to {max_id}, got {token_id!r}; see inputs.tokens",
                max_id=size - 1,
                token_id=token_id,
            )
        )
    return int(token_id) if token_id is not None else int(_logprobs(inputs, inputs.ids, position).argmax())


def _logprobs(inputs: TokenizedInput, ids: Tensor, position: int) -> Tensor:
    """log p [B, V] at a position, or [B, labels] of a classifier."""
    model = inputs.model
    memory = model.encode(inputs.model_kwargs["source"].expand(len(ids), -1)) if inputs.source else None
    model_inputs = model.inputs(ids, None, None, None, None)
    states = model.hidden_states(model_inputs, memory=memory)  # [B, Q, D]
    if isinstance(model.head, ClassificationHeadLayer):
        return model.head(states, model_inputs).float().log_softmax(-1)
    return lm_head(model)(states[:, position : position + 1], model_inputs)[:, 0].float().log_softmax(-1)


AttributionScores = tuple[list[Tensor], float, float, int]  # scores of each stack's tokens, f(x), f(0), steps


class _OutputFunction:
    """The attributed function f: log p of one output, as a function of the token embeddings of each stack."""

    def __init__(self, inputs: TokenizedInput, position: int, token_id: int) -> None:
        self.inputs = inputs
        self.position = position
        self.token_id = token_id
        self.embeddings: list[nn.Module] = []
        for stack in (inputs.model.encoder, inputs.model.decoder):
            if stack is None:
                continue
            table = getattr(stack.embed, "tokens", None)
            if not isinstance(table, nn.Module):
                raise BadInput(_("attribution: the model must have a token embedding, this one has none"))
            self.embeddings.append(table)
        ids = [*inputs.model_kwargs.values(), inputs.ids]
        with torch.no_grad():
            self.token_vectors = [  # [Q, D] of each stack
                table(side)[0].detach().clone() for table, side in zip(self.embeddings, ids, strict=True)
            ]

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.token_vectors]

    def output_text(self) -> str:
        """The output token, or the label of the class."""
        if not isinstance(self.inputs.model.head, ClassificationHeadLayer):
            return self.inputs.decode_token(self.token_id).text
        labels = self.inputs.labels
        return labels[self.token_id] if self.token_id < len(labels) else str(self.token_id)

    def logprobs(self, vectors: list[Tensor]) -> Tensor:
        """f [B] of the token embeddings [B, Q, D] of each stack."""
        with _embeddings_replaced(self.embeddings, vectors):
            ids = self.inputs.ids.expand(len(vectors[0]), -1)
            return _logprobs(self.inputs, ids, self.position)[:, self.token_id]

    def grads(self, vectors: list[Tensor]) -> list[Tensor]:
        """∇f [B, Q, D] of each stack, each row by itself."""
        vectors = [v.detach().requires_grad_() for v in vectors]
        return list(torch.autograd.grad(self.logprobs(vectors).sum(), vectors))

    def endpoints(self) -> tuple[float, float]:
        """f(x) and f(0)."""
        with torch.no_grad():
            vectors = [torch.stack((x, torch.zeros_like(x))) for x in self.token_vectors]  # [2, Q, D]
            value, baseline = self.logprobs(vectors).tolist()
        return value, baseline

    def input_x_gradient(self) -> AttributionScores:
        grads = self.grads([x[None] for x in self.token_vectors])
        scores = [(x * grad[0]).sum(-1) for x, grad in zip(self.token_vectors, grads, strict=True)]
        return scores, *self.endpoints(), 1

    def integrated_gradients(self) -> AttributionScores:
        """Gauss-Legendre quadrature, with twice the steps until the scores add up; the best result is returned."""
        value, baseline = self.endpoints()
        results: list[tuple[float, int, list[Tensor]]] = []
        for steps in (16, 32, MAX_STEPS):
            scores = self._integrate(steps)
            gap = _completeness_gap(scores, value - baseline)
            results.append((gap, steps, scores))
            if gap <= MAX_COMPLETENESS_GAP or gap > 1:  # above 1 single steps dominate: more of them do not help
                break
        _gap, steps, scores = min(results, key=lambda attempt: attempt[0])
        return scores, value, baseline, steps

    def _integrate(self, steps: int) -> list[Tensor]:
        """x · ∫₀¹ ∇f(a x) da, summed over D: [Q] of each stack."""
        nodes, weights = (torch.tensor(a, dtype=torch.float32) for a in np.polynomial.legendre.leggauss(steps))
        total = [torch.zeros_like(x) for x in self.token_vectors]
        size = max(1, TOKENS_PER_BATCH // sum(self.lengths))
        for a, w in zip(((nodes + 1) / 2).split(size), (weights / 2).split(size), strict=True):
            grads = self.grads([a[:, None, None] * x for x in self.token_vectors])
            for n, grad in enumerate(grads):
                total[n] += (w[:, None, None] * grad).sum(0) * self.token_vectors[n]
        return [scores.sum(-1) for scores in total]

    def occlusion(self) -> AttributionScores:
        """f(x) - f(x without one token) for each token."""
        value, baseline = self.endpoints()
        num_tokens = sum(self.lengths)
        size = max(1, TOKENS_PER_BATCH // num_tokens)
        scores = []
        with torch.no_grad():
            for occluded in torch.arange(num_tokens).split(size):
                vectors = torch.cat(self.token_vectors).repeat(len(occluded), 1, 1)  # [B, tokens, D]
                vectors[torch.arange(len(occluded)), occluded] = 0
                scores.append(value - self.logprobs(list(vectors.split(self.lengths, 1))))
        return list(torch.cat(scores).split(self.lengths)), value, baseline, num_tokens


@contextlib.contextmanager
def _embeddings_replaced(embeddings: list[nn.Module], vectors: list[Tensor]) -> Iterator[None]:
    """Forward hooks that replace the output of each embedding table by these vectors."""
    handles = [
        table.register_forward_hook(lambda module, inputs, output, replacement=replacement: replacement)
        for table, replacement in zip(embeddings, vectors, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
