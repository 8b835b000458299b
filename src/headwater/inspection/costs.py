"""Parameters, memory and FLOPs of a model, in closed form from a model on the meta device.

weights       parameters · element size                element size: 4 bytes for fp32, 2 for bf16 and fp16
gradients     parameters · element size
optimizer     AdamW: two fp32 moments per parameter, and an fp32 copy of weights that are stored in 16 bits
activations   an estimate of what training saves for the backward pass (see saved_activations)
KV cache      exact: batch · length · element size · Σ over attention layers of kv_heads · (head_dim + v_head_dim)
FLOPs         exact for matrix products: 2 per weight; attention: 2 · heads · (head_dim + v_head_dim) per query and key
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from torch import nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.feedforward import FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.model import Model, Transformer
from headwater.core.stack import BlockLayer
from headwater.cpu.build import unavailable_reason
from headwater.errors import BadSetting, TooLong, nearest
from headwater.i18n import _
from headwater.inspection.formulas import Dimensions, Term, format_formula, known_dimensions, symbol_values, tensor_term

ELEMENT_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
DEFAULT_LENGTH = 1024


@dataclass(frozen=True)
class ModelCosts:
    """The module tree of a model, its parameters by group, and its costs at one batch size, length and dtype."""

    tree: ModuleNode
    parameters: int
    groups: dict[str, int]
    symbols: dict[str, list[int]]
    settings: dict[str, Any]
    bytes: dict[str, int]
    flops: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "groups": self.groups,
            "symbols": self.symbols,
            "settings": self.settings,
            "bytes": self.bytes,
            "flops": self.flops,
            "tree": self.tree.to_dict(),
        }


def count(model: Model | Transformer, batch: int = 1, length: int | None = None, dtype: str = "fp32") -> ModelCosts:
    """Count parameters, memory and FLOPs of a model from its spec, without allocating it.

    model   a spec or a built model
    batch   sequences in a batch
    length  tokens of a sequence, of source and target alike; by default the model's maximum, at most DEFAULT_LENGTH
    dtype   of weights and activations: one of ELEMENT_SIZES
    """
    if dtype not in ELEMENT_SIZES:
        raise BadSetting(
            _(
                "dtype must be one of {dtypes}, got {dtype!r}; {nearest}",
                dtypes=", ".join(ELEMENT_SIZES),
                dtype=dtype,
                nearest=nearest(dtype, ELEMENT_SIZES),
            )
        )
    if batch < 1 or (length is not None and length < 1):
        raise BadSetting(
            _("batch and length must be at least 1, got {batch} and {length}; correct them", batch=batch, length=length)
        )
    built = meta_model(model) if isinstance(model, Model) else model
    if not isinstance(built, Transformer):
        raise BadSetting(
            _(
                "count takes a headwater model or spec, got {name}; module_tree takes any module",
                name=type(model).__name__,
            )
        )
    length = _resolve_length(built.spec, length)
    return ModelCosts(
        tree=module_tree(built),
        parameters=num_parameters(built),
        groups=parameters_by_group(built),
        symbols=symbol_values(built),
        settings={"batch": batch, "length": length, "dtype": dtype},
        bytes=memory_bytes(built, batch, length, ELEMENT_SIZES[dtype]),
        flops=flops_per_token(built, length),
    )


def _resolve_length(spec: Model, length: int | None) -> int:
    limit = spec.max_positions
    if length is None:
        return min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise TooLong(
            _(
                "length: the position table has {limit} positions, got {length}; give at most {limit}",
                limit=limit,
                length=length,
            )
        )
    return length


# ------------------------------------------------------------------------------------------------------------- memory


def memory_bytes(model: Transformer, batch: int, length: int, element_size: int) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state, activations and KV cache."""
    parameters = num_parameters(model)
    saved_bytes = element_size * saved_activations(model) + 4 * _saved_logits(model)  # per token
    return {
        "weights": parameters * element_size,
        "gradients": parameters * element_size,
        "optimizer": parameters * (8 if element_size == 4 else 12),
        "activations": batch * length * saved_bytes,
        "kv_cache": batch * element_size * kv_cache_elements(model, length),
    }


def saved_activations(model: Transformer) -> int:
    """Elements that training saves for the backward pass, per token of each stack.

    A linear layer saves its input; q, k and v share one. A norm saves its output, which the layer after it saves anyway
    (without the C kernels its input too). Fused attention saves q, k, v and its output, which is the input of `out`.
    An activation saves its input, a product both factors, dropout its mask (none in the C kernels). Attention that is
    not fused (some back ends do not fuse dropout) saves heads · length more elements per layer.
    """
    return sum(_saved_by_module(module) for part in _executed_modules(model) for module in part.modules())


def _saved_by_module(module: nn.Module) -> int:
    """Elements that one module saves per token."""
    match module:
        case AttentionLayer():
            h = module.heads
            g = module.kv_heads
            k = module.head_dim
            v = module.v_head_dim
            return h * k + g * (k + v) - 2 * module.q.in_features
        case GatedFeedForwardLayer():
            return 3 * module.up.out_features - module.up.in_features + _dropout_mask_size(module.dropout, module.up)
        case FeedForwardLayer():
            saved_input = 0 if module.act.__name__ == "relu" else module.up.out_features  # ReLU saves its output
            return saved_input + _dropout_mask_size(module.dropout, module.up)
        case BlockLayer():
            layers = [branch.layer for branch in module.branches]
            outputs = [getattr(layer, "out", getattr(layer, "down", None)) for layer in layers]
            return sum(_dropout_mask_size(module.dropout, output) for output in outputs)
        case nn.Linear():
            return module.in_features
        case nn.LayerNorm() | nn.RMSNorm():
            return module.normalized_shape[0] if unavailable_reason() else 0
    return 0


def _dropout_mask_size(dropout: nn.Dropout, linear: Any) -> int:
    """Elements of the dropout mask on the output of a linear layer."""
    return linear.out_features if dropout.p and isinstance(linear, nn.Linear) else 0


def _saved_logits(model: Transformer) -> int:
    """fp32 elements of the loss per token: the log-probabilities and their gradient."""
    return 2 * getattr(model.spec.head, "vocab", 0)


def kv_cache_elements(model: Transformer, length: int) -> int:
    """Elements of the KV cache of one sequence: keys and values of self-attention and cross-attention, and states."""
    if model.decoder is None:
        return 0
    self_attention = 0
    for group in range(len(model.decoder.mask_groups)):
        if not model.decoder.mask_groups[group].is_recurrent:
            for kv_heads, head_dim, v_head_dim in model.decoder.kv_shapes(group).values():
                self_attention += kv_heads * (head_dim + v_head_dim)
    cross_attention = sum(
        a.kv_heads * (a.head_dim + a.v_head_dim) for a in _attention_layers(model) if _is_cross_attention(a)
    )
    recurrent = [a for a in _attention_layers(model) if a.is_recurrent]
    states = sum(a.kv_heads * (a.spec.kernel.state_elements(a.head_dim, a.v_head_dim) or 0) for a in recurrent)
    return length * self_attention + states + _memory_length(model, length) * cross_attention


def _memory_length(model: Transformer, length: int) -> int:
    return -(-length // getattr(model.spec.bridge, "factor", 1))


# -------------------------------------------------------------------------------------------------------------- FLOPs


def flops_per_token(model: Transformer, length: int) -> dict[str, int]:
    """FLOPs per target token; for an encoder-decoder with one source token. Training costs three forward passes.

    Attention is counted over all keys in the window of a query at this length, those above the causal diagonal
    included: a fused kernel may compute half of them.
    """
    linear = 2 * sum(
        m.in_features * m.out_features for part in _executed_modules(model) for m in part.modules() if _is_linear(m)
    )
    pooled = length - _memory_length(model, length)  # source positions removed by the bridge
    cross_kv = 2 * sum(
        a.q.in_features * (a.k.out_features + a.v.out_features)
        for a in _attention_layers(model)
        if _is_cross_attention(a)
    )
    linear -= cross_kv * pooled // length
    attention = sum(
        2 * a.heads * (a.head_dim + a.v_head_dim) * _num_keys(a, model, length) for a in _attention_layers(model)
    )
    return {
        "linear": linear,
        "attention": attention,
        "forward": linear + attention,
        "training": 3 * (linear + attention),
    }


def _num_keys(attention: AttentionLayer, model: Transformer, length: int) -> int:
    is_cross = _is_cross_attention(attention)
    keys = _memory_length(model, length) if is_cross else attention.spec.keys_per_query(length)
    return attention.spec.kernel.equivalent_keys(keys, attention.head_dim)


def _executed_modules(model: Transformer) -> Iterator[nn.Module]:
    """The modules of a forward pass; a shared layer once for each time it runs."""
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            yield from (stack.embed, *(stack.layers[index] for index in stack.order), stack.final_norm)
    yield model.head


def _attention_layers(model: Transformer) -> Iterator[AttentionLayer]:
    return (m for part in _executed_modules(model) for m in part.modules() if isinstance(m, AttentionLayer))


def _is_cross_attention(attention: nn.Module) -> bool:
    return isinstance(attention, CrossAttentionLayer)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear)


# ---------------------------------------------------------------------------------------------------------- parameters

PARAMETER_GROUPS = ("embeddings", "encoder", "decoder", "output", "other")


@dataclass(frozen=True)
class ModuleNode:
    """A module with its parameters. Consecutive equal layers are one node with `repeats`.

    parameters: of all repeats together. formula: of one. tied_to: the path where a shared tensor is counted.
    """

    name: str
    path: str
    kind: str
    parameters: int
    formula: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    tied_to: str = ""
    repeats: int = 1
    children: tuple[ModuleNode, ...] = ()
    terms: Counter[Term] = field(default_factory=Counter, repr=False, compare=False)

    def signature(self) -> tuple[Any, ...]:
        """What two nodes must have in common to be collapsed into one."""
        return self.kind, self.parameters, self.formula, self.shapes, tuple(c.signature() for c in self.children)

    def to_dict(self) -> dict[str, Any]:
        node: dict[str, Any] = {"name": self.name, "path": self.path, "kind": self.kind, "parameters": self.parameters}
        optional = {
            "formula": self.formula,
            "shapes": [list(shape) for shape in self.shapes],
            "tied_to": self.tied_to,
            "repeats": self.repeats if self.repeats > 1 else None,
            "children": [child.to_dict() for child in self.children],
        }
        return node | {name: value for name, value in optional.items() if value}


def meta_model(spec: Model) -> Transformer:
    """Build the model on the meta device: shapes without memory."""
    return spec.on_meta()


def module_tree(model: nn.Module) -> ModuleNode:
    """The tree of a model's modules, with their parameters; modules without any are left out."""
    root = _build_node(model, "", "", {}, {})
    assert root is not None or not list(model.parameters())
    return root or ModuleNode("model", "", type(model).__name__, 0)


def _build_node(
    module: nn.Module, name: str, path: str, dimensions: Dimensions, tensor_owners: dict[int, str]
) -> ModuleNode | None:
    """The node of a module with its children; None for a module without parameters."""
    # its own tensors; a tensor that an earlier module owns is tied to that module
    dimensions = known_dimensions(module, dimensions)
    terms: Counter[Term] = Counter()
    shapes: list[tuple[int, ...]] = []
    total = 0
    tied_to = ""
    for parameter_name, tensor in module.named_parameters(recurse=False):
        shapes.append(tuple(tensor.shape))
        name_path = path or parameter_name
        owner = tensor_owners.setdefault(id(tensor), name_path)
        if owner != name_path:
            tied_to = owner
            continue
        number, factors = tensor_term(_formula_name(name, path), tuple(tensor.shape), dimensions)
        terms[factors] += number
        total += tensor.numel()

    # the children, equal layers collapsed
    nodes = [
        _build_node(child, n, f"{path}.{n}" if path else n, dimensions, tensor_owners)
        for n, child in module.named_children()
    ]
    children = _collapse_repeats([node for node in nodes if node])
    for child in children:
        total += child.parameters
        for factors, number in child.terms.items():
            terms[factors] += number * child.repeats

    if not (shapes or children):
        return None
    if len(children) == 1 and not shapes:
        (child,) = children
        if child.repeats > 1 and isinstance(module, nn.ModuleList):  # a list of equal layers: layers ×12
            return replace(child, name=name)
        if path:
            return replace(child, name=f"{name}.{child.name}")
    return ModuleNode(
        name=name or "model",
        path=path,
        kind=type(module).__name__,
        parameters=total,
        formula=format_formula(terms),
        shapes=tuple(shapes),
        tied_to=tied_to,
        children=tuple(children),
        terms=terms,
    )


def _formula_name(name: str, path: str) -> str:
    """The name under which DIMENSION_NAMES lists a module: the output of a head has the size of the vocabulary."""
    if path == "head.out":
        return "tokens"
    return "buckets" if ".position_encodings." in path else name


def _collapse_repeats(nodes: list[ModuleNode]) -> list[ModuleNode]:
    """Collapse consecutive equal nodes of a list (0, 1, 2 …) into one."""
    collapsed: list[ModuleNode] = []
    for node in nodes:
        last = collapsed[-1] if collapsed else None
        numbered = last is not None and node.name.isdigit() and last.name[:1].isdigit()
        if last is None or not numbered or _single(last).signature() != node.signature():
            collapsed.append(node)
            continue
        first = last.name.partition("…")[0]
        collapsed[-1] = replace(
            last, name=f"{first}…{node.name}", repeats=last.repeats + 1, parameters=last.parameters + node.parameters
        )
    return collapsed


def _single(node: ModuleNode) -> ModuleNode:
    return replace(node, parameters=node.parameters // node.repeats)


def parameters_by_group(model: nn.Module) -> dict[str, int]:
    """Parameters of the embeddings (with their positions), encoder, decoder and output; "other" for the rest."""
    groups = dict.fromkeys(PARAMETER_GROUPS, 0)
    for path, tensor in model.named_parameters():  # lists a shared tensor once
        first, _, rest = path.partition(".")
        group = first if first in ("encoder", "decoder") else "other"
        if first == "head":
            group = "output"
        if rest.startswith("embed."):
            group = "embeddings"
        groups[group] += tensor.numel()
    return {name: number for name, number in groups.items() if number}


def num_parameters(model: nn.Module) -> int:
    """The number of parameters; a shared tensor counts once."""
    return sum(tensor.numel() for tensor in model.parameters())
