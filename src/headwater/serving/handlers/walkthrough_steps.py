"""Steps of the walkthrough: activations of a layer, formulas with the matrices they name, attention step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.feedforward import ACTIVATIONS
from headwater.core.modules import eval_mode
from headwater.core.norms import LayerNormLayer, RMSNormLayer
from headwater.core.positions import RotaryEncoding
from headwater.inspection.attention_weights import keys_and_values
from headwater.inspection.inputs import TokenizedInput
from headwater.inspection.results import to_jsonable
from headwater.variants.transformer_xl import TransformerXLBias

if TYPE_CHECKING:
    from headwater.serving.handlers.walkthrough import WalkthroughBuilder


# --------------------------------------------------------------------------------------------------
# Inputs and outputs of the modules of one layer, captured by forward hooks.


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its positional inputs and its output [B, ...]."""

    inputs: tuple[Any, ...]
    output: Tensor


@dataclass(frozen=True)
class LayerActivations:
    """Calls recorded in one pass. by_path: those of the layer's modules; final_norm: that of the stack."""

    module: Any
    by_path: dict[str, ModuleCall]
    block: ModuleCall
    previous_block: ModuleCall | None
    final_norm: ModuleCall

    def output(self, path: str) -> Tensor:
        """The output of a module without the batch dimension."""
        return self.by_path[path].output[0]


def record_activations(inputs: TokenizedInput, stack: Any, layer: int) -> LayerActivations:
    """Run the model once and record the module calls of one layer, also if other layers share its weights."""
    block = stack.layers[stack.order[layer]]
    calls_by_path: dict[str, list[ModuleCall]] = {path: [] for path, _module in block.named_modules()}
    block_calls: list[ModuleCall] = []
    final_norm_calls: list[ModuleCall] = []
    with eval_mode(inputs.model), torch.inference_mode(), contextlib.ExitStack() as hooks:
        for path, module in block.named_modules():
            hooks.enter_context(_recording_hook(module, calls_by_path[path]))
        for module in stack.layers:
            hooks.enter_context(_recording_hook(module, block_calls))
        hooks.enter_context(_recording_hook(stack.final_norm, final_norm_calls))
        inputs.hidden_states()

    call_index = stack.order[:layer].count(stack.order[layer])
    by_path = {path: calls[call_index] for path, calls in calls_by_path.items() if len(calls) > call_index}
    previous_block = block_calls[layer - 1] if layer else None
    return LayerActivations(block, by_path, block_calls[layer], previous_block, final_norm_calls[-1])


@contextlib.contextmanager
def _recording_hook(module: nn.Module, calls: list[ModuleCall]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, inputs, output: calls.append(ModuleCall(inputs, output)))
    try:
        yield
    finally:
        handle.remove()


# --------------------------------------------------------------------------------------------------
# Formulas of the walkthrough as text, with the matrices they name.
#
# A small grammar, printed by the page unchanged and parsed by the tests, which evaluate every formula:
#
#     q = n W_q + b_q                                     a matrix product is two factors side by side
#     n = (x − mean(x)) / √(var(x) + 1e-05) · γ1 + β1     · and / act element by element; mean, var are of a row
#     q_r = q · cos + rot(q) · sin                        rot(a, b) = (−b, a) on the two halves of each row
#     S_m = S where M = 1, else −∞
#     A = softmax(S_m)                                    of each row


MAX_SENT_SIDE = 64  # rows and columns
ROLE_SUFFIXES = {"self_attn": "", "cross_attn": "_c", "ffn": "_f"}  # of the names of a branch's matrices


@dataclass(frozen=True)
class NamedMatrix:
    """A matrix with a name. rows, columns: the axes (tokens, source, vocab or dims)."""

    name: str
    values: Tensor
    rows: str = "tokens"
    columns: str = "dims"

    def to_dict(self) -> dict[str, Any]:
        """The values, of a large matrix its first rows and columns; shape is that of the full matrix. −∞ is null."""
        matrix = torch.atleast_2d(self.values.detach().float())
        values = to_jsonable(matrix[:MAX_SENT_SIDE, :MAX_SENT_SIDE].numpy())
        return {
            "name": self.name,
            "shape": list(matrix.shape),
            "rows": self.rows,
            "columns": self.columns,
            "values": values,
        }


@dataclass(frozen=True)
class Formula:
    """The right-hand side of a formula, and the weights in it."""

    text: str
    weights: tuple[NamedMatrix, ...] = ()


def linear_formula(x: str, layer: Any, name: str, rows: slice | Tensor = slice(None)) -> Formula:
    """x W_name + b_name, for some of the layer's output features."""
    weight = NamedMatrix(f"W_{name}", _weight_rows(layer, rows).T, "dims")
    if layer.bias is None:
        return Formula(f"{x} W_{name}", (weight,))
    return Formula(f"{x} W_{name} + b_{name}", (weight, NamedMatrix(f"b_{name}", layer.bias[rows], "dims")))


def _weight_rows(layer: Any, rows: slice | Tensor) -> Tensor:
    """Rows of a weight; of a quantized layer only those are dequantized."""
    if not hasattr(layer, "dequantize_rows"):
        return layer.weight[rows]
    if isinstance(rows, slice):
        first, last, _ = rows.indices(layer.rows)
        return layer.dequantize_rows(first, last)
    return torch.cat([layer.dequantize_rows(n, n + 1) for n in rows.tolist()])


def norm_formula(x: str, module: nn.Module, index: int) -> Formula:
    """The formula of a norm with its eps; index distinguishes its weights from those of other norms."""
    scale_name = f"γ{index}"
    if isinstance(module, RMSNormLayer):
        text = f"{x} / √(mean({x}²) + {module.eps or 0:g}) · {scale_name}"
        return Formula(text, (NamedMatrix(scale_name, module.gain(), "dims"),))
    if isinstance(module, LayerNormLayer):
        text = f"({x} − mean({x})) / √(var({x}) + {module.eps:g}) · {scale_name}"
        weights = (NamedMatrix(scale_name, module.weight, "dims"),)
        bias: Tensor | None = module.bias
        if bias is None:
            return Formula(text, weights)
        return Formula(f"{text} + β{index}", (*weights, NamedMatrix(f"β{index}", bias, "dims")))
    return Formula(f"{type(module).__name__}({x})")


def activation_name(function: Callable[[Tensor], Tensor]) -> str:
    """The name of an activation function."""
    return next(name for name, known in ACTIVATIONS.items() if known is function)


def scaled_formula(x: str, factor: float) -> str:
    """x · factor, or x if the factor is one."""
    return x if factor == 1 else f"{x} · {factor:.8g}"


# --------------------------------------------------------------------------------------------------
# Steps of an attention layer in the walkthrough: projections, positions, scores, mask, softmax, output projection.


class AttentionSteps:
    """Builds the steps of one attention layer, self or cross, for one of its heads."""

    def __init__(self, builder: WalkthroughBuilder, role: str, layer: AttentionLayer, input_name: str) -> None:
        self.builder = builder
        self.role = role
        self.layer = layer
        self.input_name = input_name
        self.suffix = ROLE_SUFFIXES.get(role, f"_{role}")
        self.is_cross = isinstance(layer, CrossAttentionLayer)
        self.head = min(builder.head, layer.heads - 1)
        self.kv_head = self.head * layer.kv_heads // layer.heads
        self.key_axis = "source" if self.is_cross else "tokens"
        self.kernel_call = builder.activations.by_path[f"{role}.kernel"]
        self.all_k, self.all_v = keys_and_values(self.kernel_call.inputs)

    def build(self) -> str:
        """All steps; returns the name of the layer's output."""
        self.add_projections()
        q, k = self.add_head_norms(f"q{self.suffix}", f"k{self.suffix}")
        q, k = self.add_positions(q, k)
        k, v = self.add_virtual_tokens(k, f"v{self.suffix}")
        self.add_attention_weights(q, k)
        return self.add_output_projection(v)

    def add_projections(self) -> None:
        """q from the residual stream; k and v from it too, or from the encoder output m."""
        layer = self.layer
        activations = self.builder.activations
        kv_input = "m" if self.is_cross else self.input_name
        projections = {  # name -> input, head, width of a head, axis of the rows
            "q": (self.input_name, self.head, layer.head_dim, "tokens"),
            "k": (kv_input, self.kv_head, layer.head_dim, self.key_axis),
            "v": (kv_input, self.kv_head, layer.v_head_dim, self.key_axis),
        }
        formulas: list[str] = []
        weights: list[NamedMatrix] = []
        matrices: list[NamedMatrix] = []
        if self.is_cross:
            memory = activations.by_path[f"{self.role}.k"].inputs[0][0]
            matrices.append(NamedMatrix("m", memory, self.key_axis))
        for name, (x, head, width, rows) in projections.items():
            columns = slice(head * width, (head + 1) * width)
            formula = linear_formula(x, getattr(layer, name), name + self.suffix, columns)
            formulas.append(f"{name}{self.suffix} = {formula.text}")
            output = activations.output(f"{self.role}.{name}")[:, columns]
            matrices.append(NamedMatrix(name + self.suffix, output, rows))
            weights += formula.weights
        self.builder.add_step("cross_qkv" if self.is_cross else "qkv", formulas, matrices, weights)

    def add_head_norms(self, q: str, k: str) -> tuple[str, str]:
        """Norms on each head's q and k, where the model has them."""
        if isinstance(self.layer.q_norm, nn.Identity):
            return q, k
        calls = self.builder.activations.by_path
        q_normed = calls[f"{self.role}.q_norm"].output[0, self.head]
        k_normed = calls[f"{self.role}.k_norm"].output[0, self.kv_head]
        self.builder.add_norm(f"{q}_n", q, self.layer.q_norm, NamedMatrix(f"{q}_n", q_normed))
        self.builder.add_norm(f"{k}_n", k, self.layer.k_norm, NamedMatrix(f"{k}_n", k_normed, self.key_axis))
        return f"{q}_n", f"{k}_n"

    def add_positions(self, q: str, k: str) -> tuple[str, str]:
        """The position encoding on q and k: rotary rotates both, Transformer-XL adds u to q."""
        all_q, all_k, _values, mask, *_rest = self.kernel_call.inputs  # [B, H, Q, D], [B, H_kv, S, D]
        query = all_q[0, self.head]
        key = all_k[0, self.kv_head]
        if isinstance(mask.position, TransformerXLBias):
            u = NamedMatrix("u", mask.position.u.weight[self.head], "dims")
            self.builder.add_step("query_bias", [f"{q}_u = {q} + u"], [NamedMatrix(f"{q}_u", query)], [u])
            return f"{q}_u", k
        if not isinstance(mask.position, RotaryEncoding):
            return q, k

        cos, sin = (angles[0, 0] for angles in mask.position.cos_sin(mask.q_positions, all_q.dtype))  # [Q, pairs]
        num_unrotated = query.shape[-1] - 2 * cos.shape[-1]
        cos = torch.cat((cos, cos, torch.ones(len(cos), num_unrotated)), -1)  # [Q, D]
        sin = torch.cat((sin, sin, torch.zeros(len(sin), num_unrotated)), -1)
        formulas = [f"{name}_r = {name} · cos + rot({name}) · sin" for name in (q, k)]
        matrices = [
            NamedMatrix("cos", cos),
            NamedMatrix("sin", sin),
            NamedMatrix(f"{q}_r", query),
            NamedMatrix(f"{k}_r", key),
        ]
        self.builder.add_step("rotary", formulas, matrices, rotary_dims=query.shape[-1] - num_unrotated)
        return f"{q}_r", f"{k}_r"

    def add_virtual_tokens(self, k: str, v: str) -> tuple[str, str]:
        """Keys and values that an adapter has put before those of the tokens."""
        count = self.all_k.shape[2] - self.kernel_call.inputs[1].shape[2]
        if not count:
            return k, v
        self.key_axis = "keys"
        matrices = []
        for name, of_all in ((k, self.all_k), (v, self.all_v)):
            values = of_all[0, self.kv_head]
            matrices += [NamedMatrix(f"P_{name}", values[:count], "virtual"), NamedMatrix(f"{name}_p", values, "keys")]
        self.builder.add_step("virtual_tokens", [f"{name}_p = [P_{name}; {name}]" for name in (k, v)], matrices)
        return f"{k}_p", f"{v}_p"

    def add_attention_weights(self, q: str, k: str) -> None:
        """Scores, mask and softmax: the attention weights [Q, S]."""
        all_q, _k, _v, mask, *_rest = self.kernel_call.inputs
        kernel: Any = self.layer.kernel
        scores = kernel.transform_scores(kernel.scale * (all_q[0, self.head] @ self.all_k[0, self.kv_head].mT))
        bias, allowed = _split_mask(kernel.dense_mask(all_q, mask), self.head, scores)

        # S = q kᵀ · scale, soft-capped or biased where the model does
        text = f"{q} {k}ᵀ · {kernel.scale:.8g}"
        matrices: list[NamedMatrix] = []
        cap = getattr(kernel, "cap", None)
        if cap is not None:
            text = f"{cap:g} · tanh({text} / {cap:g})"
        if bool(bias.any()):
            text = f"{text} + B{self.suffix}"
            scores = scores + bias
            matrices.append(self.score_matrix("B", bias))
        matrices.append(self.score_matrix("S", scores))
        is_standard_scale = abs(kernel.scale * self.layer.head_dim**0.5 - 1) < 1e-6
        self.builder.add_step("scores", [f"S{self.suffix} = {text}"], matrices, is_standard_scale=is_standard_scale)

        # S_m: −∞ where the mask does not allow attention
        masked = scores.masked_fill(~allowed, -torch.inf)
        s = f"S{self.suffix}"
        m = f"M{self.suffix}"
        matrices = [self.score_matrix("M", allowed.float()), NamedMatrix(f"{s}_m", masked, "tokens", self.key_axis)]
        mask_name = type(self.layer.spec.mask).__name__
        self.builder.add_step("mask", [f"{s}_m = {s} where {m} = 1, else −∞"], matrices, mask=mask_name)

        # A = softmax(S_m); a row that is masked completely is 0
        weights = torch.nan_to_num(masked.softmax(-1))
        self.builder.add_step("softmax", [f"A{self.suffix} = softmax({s}_m)"], [self.score_matrix("A", weights)])

    def score_matrix(self, name: str, values: Tensor) -> NamedMatrix:
        return NamedMatrix(name + self.suffix, values, "tokens", self.key_axis)

    def add_output_projection(self, v: str) -> str:
        """The weighted sum of the values of this head, then all heads concatenated and projected."""
        layer = self.layer
        suffix = self.suffix
        heads_output = self.kernel_call.output[0]  # [H, Q, D_v]
        z = NamedMatrix(f"z{suffix}", heads_output[self.head])
        self.builder.add_step("weighted_values", [f"z{suffix} = A{suffix} {v}"], [z])

        formula = linear_formula(f"Z{suffix}", layer.out, f"o{suffix}")
        matrices = [
            NamedMatrix(f"Z{suffix}", heads_output.transpose(0, 1).flatten(1)),  # [Q, H · D_v]
            NamedMatrix(f"out{suffix}", self.builder.activations.output(f"{self.role}.out")),
        ]
        head_columns = [self.head * layer.v_head_dim, (self.head + 1) * layer.v_head_dim]
        self.builder.add_step(
            "output_projection",
            [f"out{suffix} = {formula.text}"],
            matrices,
            formula.weights,
            head_columns=head_columns,
            heads=layer.heads,
        )
        return f"out{suffix}"


def _split_mask(mask: Tensor | None, head: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """A mask as the bias it adds to the scores of one head [Q, S], and where it allows attention [Q, S]."""
    if mask is None:
        return torch.zeros_like(scores), torch.ones_like(scores, dtype=torch.bool)
    while mask.dim() > 2:
        mask = mask[head if mask.dim() == 3 and mask.shape[0] > 1 else 0]
    mask = mask.expand_as(scores)
    if mask.dtype == torch.bool:
        return torch.zeros_like(scores), mask
    return mask.masked_fill(mask == -torch.inf, 0), mask > -torch.inf
