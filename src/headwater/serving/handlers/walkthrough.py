"""Handler for the walkthrough: one forward pass of one layer and head, as formulas with matrices.

The numbers are those of the model's own modules, captured by forward hooks; only scores, mask and softmax, which fused
attention never stores, are computed separately. Each name denotes one matrix throughout the walkthrough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.core.feedforward import FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.modules import eval_mode
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.inspection.inputs import TokenizedInput
from headwater.inspection.logit_lens import has_lm_head, lm_head
from headwater.inspection.results import to_jsonable
from headwater.serving.handlers.attention import token_dicts
from headwater.serving.handlers.walkthrough_steps import (
    ROLE_SUFFIXES,
    AttentionSteps,
    NamedMatrix,
    activation_name,
    linear_formula,
    norm_formula,
    record_activations,
    scaled_formula,
)
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import WalkthroughRequest, tokenize_request
from headwater.variants.parallel_block import ParallelBlockLayer

MAX_TOKENS = 12
MAX_CANDIDATES = 8


def walkthrough(open_model: OpenModel, request: WalkthroughRequest) -> dict[str, Any]:
    """The steps of one forward pass through one layer and head."""
    inputs = _truncate(tokenize_request(open_model, request))
    model = inputs.model
    side = "decoder" if model.decoder is not None else "encoder"
    stack = getattr(model, side)
    if not 0 <= request.layer < len(stack.order):
        n = len(stack.order)
        raise BadInput(_("the {side} has {n} layers, got {layer}", side=side, n=n, layer=request.layer))
    attention = stack.layers[stack.order[request.layer]].self_attn
    if not 0 <= request.head < attention.heads:
        n = attention.heads
        raise BadInput(_("the layer has {n} heads, got {head}", n=n, head=request.head))
    with eval_mode(model), torch.inference_mode():
        builder = WalkthroughBuilder(inputs, stack, request.layer, request.head)
        builder.build()
    sizes = {
        "side": side,
        "layers": len(stack.order),
        "heads": attention.heads,
        "head_dim": attention.head_dim,
        "d_model": stack.spec.d_model,
    }
    return {
        "tokens": token_dicts(inputs.tokens),
        "source": token_dicts(inputs.source),
        "sizes": sizes,
        "steps": builder.steps,
        "top_tokens": builder.top_tokens,
    }


def _truncate(inputs: TokenizedInput) -> TokenizedInput:
    """The first MAX_TOKENS tokens, so that the matrices are readable."""
    return replace(
        inputs,
        tokens=inputs.tokens[:MAX_TOKENS],
        source=inputs.source[:MAX_TOKENS],
        next_tokens=inputs.next_tokens[:MAX_TOKENS],
    )


class WalkthroughBuilder:
    """Builds the steps in execution order. Each method adds those of one module and returns the name of its output."""

    def __init__(self, inputs: TokenizedInput, stack: Any, layer: int, head: int) -> None:
        self.inputs = inputs
        self.stack = stack
        self.layer = layer
        self.head = head
        self.activations = record_activations(inputs, stack, layer)
        self.steps: list[dict[str, Any]] = []
        self.top_tokens: list[dict[str, Any]] = []
        self.sent_names: set[str] = set()
        self.num_norms = 0

    def build(self) -> None:
        """All steps: the embedding (or the previous layer's output), the block, the output."""
        if self.activations.previous_block is None:
            self.add_embedding()
        else:
            previous = f"y_{self.layer - 1}"
            matrices = (
                NamedMatrix(previous, self.activations.previous_block.output[0]),
                NamedMatrix("x", self.activations.block.inputs[0][0]),
            )
            self.add_step("residual_stream", [f"x = {previous}"], matrices, layer=self.layer - 1)
        self.add_block()
        self.add_output()

    def add_step(
        self,
        step_type: str,
        formulas: list[str],
        matrices: Sequence[NamedMatrix],
        weights: Sequence[NamedMatrix] = (),
        **details: Any,
    ) -> None:
        """Add a step; key names it in a URL. A matrix that was sent with an earlier step is not sent again."""
        count = sum(step["type"] == step_type for step in self.steps)
        self.steps.append(
            {
                "type": step_type,
                "key": f"{step_type}-{count + 1}" if count else step_type,
                "formulas": formulas,
                "matrices": self.unsent(matrices),
                "weights": self.unsent(weights),
                **details,
            }
        )

    def unsent(self, matrices: Sequence[NamedMatrix]) -> list[dict[str, Any]]:
        """Matrices that no earlier step has sent, as JSON."""
        new = [matrix for matrix in matrices if matrix.name not in self.sent_names]
        self.sent_names |= {matrix.name for matrix in new}
        return [matrix.to_dict() for matrix in new]

    def add_norm(self, result: str, x: str, module: nn.Module, *matrices: NamedMatrix) -> None:
        self.num_norms += 1
        formula = norm_formula(x, module, self.num_norms)
        self.add_step("norm", [f"{result} = {formula.text}"], matrices, formula.weights)

    # ------------------------------------------------------------------------------------------------- embedding

    def add_embedding(self) -> None:
        """Token embedding: table[id] · scale plus token types, then position, norm and projection."""
        embed = self.stack.embed
        ids = self.inputs.ids

        # E = table[id] · scale + token type
        looked_up = embed.tokens(ids)[0]  # [Q, D]
        text = scaled_formula("table[id]", embed.scale)
        x = looked_up * embed.scale
        matrices = [NamedMatrix("table[id]", looked_up)]
        if embed.token_types is not None:
            token_type = embed.token_types(torch.zeros_like(ids))[0]
            text = f"{text} + type"
            x = x + token_type
            matrices.append(NamedMatrix("type", token_type))
        self.add_step("embedding", [f"E = {text}"], [*matrices, NamedMatrix("E", x)])

        has_norm = not isinstance(embed.norm, nn.Identity)
        has_projection = not isinstance(embed.projection, nn.Identity)
        name = self.add_embedding_position(x, "e" if has_norm or has_projection else "x")
        x = x + self.position_vectors(x)
        if has_norm:
            name = "e_n" if has_projection else "x"
            x = embed.norm(x)
            self.add_norm(name, "e", embed.norm, NamedMatrix(name, x))
        if has_projection:
            formula = linear_formula(name, embed.projection, "p")
            projected = NamedMatrix("x", embed.projection(x))
            self.add_step("embedding_projection", [f"x = {formula.text}"], [projected], formula.weights)

    def position_vectors(self, x: Tensor) -> Tensor:
        """What the position encoding adds to the embedding [Q, D]."""
        positions = torch.arange(len(self.inputs.tokens))[None]
        return self.stack.embed.position.add(torch.zeros_like(x)[None], positions)[0]

    def add_embedding_position(self, x: Tensor, result: str) -> str:
        """result = E + P, or E where the embedding has no position."""
        position_type = type(self.stack.spec.embed.position).__name__
        added = self.position_vectors(x)
        matrices = [NamedMatrix(result, x + added)]
        text = f"{result} = E"
        if position_type != "NoPosition":
            matrices.insert(0, NamedMatrix("P", added))
            text = f"{result} = E + P"
        self.add_step("position", [text], matrices, kind=position_type)
        return result

    # ------------------------------------------------------------------------------------------------- the block

    def add_block(self) -> None:
        """Branch by branch in the block's own order: norm, layer, out_norm, the sum, post_norm."""
        block = self.activations.module
        block_output = f"y_{self.layer}"
        parallel = isinstance(block, ParallelBlockLayer)
        x = "x"
        terms = ["x"]
        for number, (role, norm, out_norm, post_norm) in enumerate(block.names, 1):
            suffix = ROLE_SUFFIXES.get(role, f"_{number}")
            branch_input = self.add_optional_norm(f"n{suffix}", x, norm)
            branch_output = self.add_branch(role, number, branch_input)
            branch_output = self.add_optional_norm(f"o{suffix}", branch_output, out_norm)
            terms.append(branch_output)
            if not parallel:
                result = block_output if number == len(block.names) else f"x_{number}"
                x = self.add_residual(result, x, branch_output, post_norm)
        if parallel:
            output = NamedMatrix(block_output, self.activations.block.output[0])
            self.add_step("residual_add", [f"{block_output} = {' + '.join(terms)}"], [output])

    def add_optional_norm(self, result: str, x: str, path: str) -> str:
        """A norm of the block; x itself where it is the identity."""
        module = getattr(self.activations.module, path)
        if isinstance(module, nn.Identity):
            return x
        self.add_norm(result, x, module, NamedMatrix(result, self.activations.output(path)))
        return result

    def add_residual(self, result: str, x: str, branch_output: str, post_norm: str) -> str:
        """The residual sum, and the norm on it in a post-norm block."""
        call = self.activations.by_path[post_norm]
        module = getattr(self.activations.module, post_norm)
        if isinstance(module, nn.Identity):
            self.add_step("residual_add", [f"{result} = {x} + {branch_output}"], [NamedMatrix(result, call.output[0])])
            return result
        total = f"a_{result.partition('_')[2]}" if result.startswith("x_") else "a"
        residual_sum = NamedMatrix(total, call.inputs[0][0] + call.inputs[1][0])
        self.add_step("residual_add", [f"{total} = {x} + {branch_output}"], [residual_sum])
        self.add_norm(result, total, module, NamedMatrix(result, call.output[0]))
        return result

    def add_branch(self, role: str, number: int, input_name: str) -> str:
        """Attention, feed-forward, or only the output of a layer without a formula."""
        layer = getattr(self.activations.module, role)
        if isinstance(layer, AttentionLayer):
            return AttentionSteps(self, role, layer, input_name).build()
        if isinstance(layer, (FeedForwardLayer, GatedFeedForwardLayer)):
            return self.add_feed_forward(role, layer, input_name)
        out = f"f_{number}"
        self.add_step(
            "layer",
            [f"{out} = {type(layer).__name__}({input_name})"],
            [NamedMatrix(out, self.activations.output(role))],
        )
        return out

    def add_feed_forward(self, role: str, layer: Any, input_name: str) -> str:
        """h = act(x W_up), or act(x W_gate) · (x W_up) where it is gated; f = h W_down."""
        suffix = "" if role == "ffn" else f"_{role}"
        h = f"h{suffix}"
        f = f"f{suffix}"
        up = linear_formula(input_name, layer.up, f"up{suffix}")
        down = linear_formula(h, layer.down, f"down{suffix}")
        act = activation_name(layer.act)
        text = f"{h} = {act}({up.text})"
        weights = [*up.weights, *down.weights]
        if isinstance(layer, GatedFeedForwardLayer):
            gate = linear_formula(input_name, layer.gate, f"gate{suffix}")
            text = f"{h} = {act}({gate.text}) · ({up.text})"
            weights = [*gate.weights, *weights]
        matrices = [
            NamedMatrix(h, self.activations.by_path[f"{role}.down"].inputs[0][0]),
            NamedMatrix(f, self.activations.output(role)),
        ]
        self.add_step("ffn", [text, f"{f} = {down.text}"], matrices, weights)
        return f

    # ---------------------------------------------------------------------------------------------------- output

    def add_output(self) -> None:
        """Final norm, head transform and logits, where the model has a language-modeling head."""
        name = f"y_{len(self.stack.order) - 1}"
        call = self.activations.final_norm
        final_input = NamedMatrix(name, call.inputs[0][0])
        x = call.output[0]
        if not isinstance(self.stack.final_norm, nn.Identity):
            self.add_norm("s", name, self.stack.final_norm, final_input, NamedMatrix("s", x))
            name = "s"
        if not has_lm_head(self.inputs.model):
            return
        head: Any = lm_head(self.inputs.model)
        transform = head.transform
        if not isinstance(transform, nn.Identity):
            formula = linear_formula(name, transform.dense, "t")
            text = f"d = {activation_name(transform.act)}({formula.text})"
            x = transform.act(transform.dense(x))
            self.add_step("mlm_transform", [text], [final_input, NamedMatrix("d", x)], formula.weights)
            name = "d_n"
            x = transform.norm(x)
            self.add_norm(name, "d", transform.norm, NamedMatrix(name, x))
        self.add_logits(head, scaled_formula(name, head.scale), final_input, head.out(x * head.scale).float())

    def add_logits(self, head: Any, x: str, final_input: NamedMatrix, logits: Tensor) -> None:
        """Logits [Q, V] of the most probable tokens at the last position, and the softmax over the full vocabulary."""
        vocab_size = logits.shape[-1]
        top = logits[-1].softmax(-1).topk(min(MAX_CANDIDATES, vocab_size))
        formula = linear_formula(x, head.out, "out", top.indices)
        normalizer = logits.logsumexp(-1, keepdim=True)  # [Q, 1]
        top_logits = logits[:, top.indices]  # [Q, candidates]
        matrices = [
            final_input,
            NamedMatrix("l", top_logits, columns="vocab"),
            NamedMatrix("c", normalizer),
            NamedMatrix("p", (top_logits - normalizer).exp(), columns="vocab"),
        ]
        candidates = [token_dicts([self.inputs.decode_token(i)])[0] for i in top.indices.tolist()]
        formulas = [f"l = {formula.text}", "p = exp(l − c)"]
        self.add_step("logits", formulas, matrices, formula.weights, candidates=candidates, vocab_size=vocab_size)
        self.top_tokens = [
            {**candidate, "prob": to_jsonable(prob)}
            for candidate, prob in zip(candidates, top.values.tolist(), strict=True)
        ]
