"""4. The config of a model, the name and shape of every weight, and their initialization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headwater.errors import BadFile, BadSetting, nearest
from headwater.i18n import _
from headwater.reference.gradients import Array

CHOICES = {
    "shape": ("encoder_decoder", "encoder", "decoder"),
    "activation": ("relu", "gelu", "gelu_tanh", "quick_gelu", "silu"),
    "norm": ("layer", "rms"),
    "norm_position": ("pre", "post", "sandwich"),
    "position": ("none", "sinusoidal", "learned", "rotary", "alibi", "relative", "xl"),
}


@dataclass(frozen=True)
class Config:
    """The config of a model. The defaults are the base model of the 2017 paper; 0 stands for the default beside it.

    dropout is applied to the embeddings, the attention weights, inside the feed-forward layer and to each branch.
    """

    vocab: int
    shape: str = "encoder_decoder"
    source_vocab: int = 0  # vocab
    d_model: int = 512
    heads: int = 8
    kv_heads: int = 0  # heads
    head_dim: int = 0  # d_model / heads
    v_head_dim: int = 0  # head_dim
    layers: int = 6
    d_ff: int = 0  # 4 · d_model
    activation: str = "relu"
    gated: bool = False
    bias: bool = True
    norm: str = "layer"
    eps: float = 0.0  # 1e-5 for layer, 1e-6 for rms
    norm_position: str = "post"
    position: str = "sinusoidal"
    max_positions: int = 512  # of learned position embeddings
    window: int = 0  # no window
    tied: bool = True  # the output projection is the token embedding
    shared: bool = False  # source and target share one token embedding
    dropout: float = 0.1

    def __post_init__(self) -> None:
        # names and sizes, each by itself
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise BadSetting(
                    _(
                        "{name} must be one of {num_known} names, got {value!r}; {nearest}",
                        name=name,
                        num_known=len(known),
                        value=value,
                        nearest=nearest(value, known),
                    )
                )
        for name in ("vocab", "d_model", "heads", "layers", "max_positions"):
            _must(
                getattr(self, name) >= 1,
                _("{name} must be at least 1", name=name),
                getattr(self, name),
                _("correct it"),
            )
        _must(
            bool(self.head_dim) or self.d_model % self.heads == 0,
            _("heads must divide d_model {d_model}", d_model=self.d_model),
            self.heads,
            _("change one of them, or give head_dim"),
        )

        # 0 stands for the default
        defaults = {
            "source_vocab": self.vocab,
            "kv_heads": self.heads,
            "head_dim": self.d_model // self.heads,
            "v_head_dim": self.head_dim or self.d_model // self.heads,
            "d_ff": 4 * self.d_model,
            "eps": 1e-5 if self.norm == "layer" else 1e-6,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        self._check_together()

    def _check_together(self) -> None:
        """Check settings against one another."""
        for name in ("source_vocab", "kv_heads", "head_dim", "v_head_dim", "d_ff", "eps", "window"):
            _must(
                getattr(self, name) >= 0,
                _("{name} must not be negative", name=name),
                getattr(self, name),
                _("use 0 for the default"),
            )
        divides = self.heads % self.kv_heads == 0
        _must(
            divides, _("kv_heads must divide heads {heads}", heads=self.heads), self.kv_heads, _("change one of them")
        )
        pairs = self.position != "rotary" or self.head_dim % 2 == 0
        _must(pairs, _("rotary positions rotate pairs: head_dim must be even"), self.head_dim, _("change it"))
        pairs = self.position != "sinusoidal" or self.d_model % 2 == 0
        _must(pairs, _("sine and cosine come in pairs: d_model must be even"), self.d_model, _("change it"))
        _must(
            not self.shared or self.source_vocab == self.vocab,
            _("a shared embedding needs source_vocab to be vocab {vocab}", vocab=self.vocab),
            self.source_vocab,
            _("leave it out"),
        )
        _must(0 <= self.dropout < 1, _("dropout must be from 0 up to 1"), self.dropout, _("0.1 is usual"))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks of the shape: encoder, decoder, or both."""
        return tuple(self.shape.split("_"))

    def table(self, stack: str) -> str:
        """The path of the token embedding of a stack; a shared one belongs to the encoder."""
        return f"{self.stacks[0] if self.shared else stack}.embed.tokens"

    @property
    def output(self) -> str:
        """The path of the output projection."""
        return self.table(self.stacks[-1]) if self.tied else "head.out"


def _must(condition: bool, requirement: str, got: object, hint: str) -> None:
    if not condition:
        raise BadSetting(_("{requirement}, got {got}; {hint}", requirement=requirement, got=got, hint=hint))


NUM_BUCKETS = 32  # of a T5 bias table
Shapes = dict[str, tuple[int, ...]]


def shapes(c: Config) -> Shapes:
    """The path and shape of every weight.

    >>> sum(math.prod(shape) for shape in shapes(Config(vocab=37000, shared=True)).values())
    63082496
    """
    shapes_by_path: Shapes = {} if c.tied else {"head.out.weight": (c.vocab, c.d_model)}
    for stack in c.stacks:
        vocab = c.vocab if stack == c.stacks[-1] else c.source_vocab
        shapes_by_path[c.table(stack) + ".weight"] = (vocab, c.d_model)
        shapes_by_path |= {f"{stack}.{name}": shape for name, shape in _positions(c).items()}
        for i in range(c.layers):
            shapes_by_path |= {f"{stack}.layers.{i}.{name}": shape for name, shape in _block(c, stack).items()}
        if c.norm_position != "post":
            shapes_by_path |= _norm(f"{stack}.final_norm", c)
    return shapes_by_path


def _positions(c: Config) -> Shapes:
    width = c.heads * c.head_dim
    per_layer = {
        "u.weight": (c.heads, c.head_dim),
        "v.weight": (c.heads, c.head_dim),
        "position_projection.weight": (width, width),
    }
    shapes_by_path: dict[str, Shapes] = {
        "learned": {"embed.position.table.weight": (c.max_positions, c.d_model)},
        "relative": {"position_encodings.0.table.weight": (NUM_BUCKETS, c.heads)},
        "xl": {f"position_encodings.{i}.{name}": s for i in range(c.layers) for name, s in per_layer.items()},
    }
    return shapes_by_path.get(c.position, {})


def _block(c: Config, stack: str) -> Shapes:
    shapes_by_path: Shapes = {}
    reads_memory = stack == "decoder" and "encoder" in c.stacks
    for role in ("self_attn", "cross_attn", "ffn") if reads_memory else ("self_attn", "ffn"):
        shapes_by_path |= _feed_forward(c) if role == "ffn" else _attention(role, c)
        for slot in {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "out_norm")}[c.norm_position]:
            shapes_by_path |= _norm(f"{role}_{slot}", c)
    return shapes_by_path


def _attention(role: str, c: Config) -> Shapes:
    maps = {
        "q": (c.heads * c.head_dim, c.d_model),
        "k": (c.kv_heads * c.head_dim, c.d_model),
        "v": (c.kv_heads * c.v_head_dim, c.d_model),
        "out": (c.d_model, c.heads * c.v_head_dim),
    }
    return _linears(role, maps, c.bias)


def _feed_forward(c: Config) -> Shapes:
    maps = {"up": (c.d_ff, c.d_model), "down": (c.d_model, c.d_ff)}
    return _linears("ffn", {**maps, "gate": maps["up"]} if c.gated else maps, c.bias)


def _linears(role: str, maps: dict[str, tuple[int, int]], bias: bool) -> Shapes:
    shapes_by_path: Shapes = {f"{role}.{name}.weight": shape for name, shape in maps.items()}
    return shapes_by_path | ({f"{role}.{name}.bias": shape[:1] for name, shape in maps.items()} if bias else {})


def _norm(path: str, c: Config) -> Shapes:
    return {f"{path}.{name}": (c.d_model,) for name in (("weight", "bias") if c.norm == "layer" else ("weight",))}


def init_weights(c: Config, seed: int = 0, dtype: type = np.float32) -> dict[str, Array]:
    """Xavier initialization: matrices are uniform within ±√(6 / (in + out)), which keeps the variance both ways.

    Token embeddings are normal with variance 1/d_model, so that an embedding times √d_model has variance 1; position
    tables are normal with standard deviation 0.02, norm weights are 1, biases 0.
    """
    rng = np.random.default_rng(seed)

    def initial_value(path: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return np.full(shape, 0 if path.endswith("bias") else 1)
        if path.endswith(("tokens.weight", "table.weight")):
            return rng.normal(0, c.d_model**-0.5 if "tokens" in path else 0.02, shape)
        limit = math.sqrt(6 / (shape[0] + shape[-1]))
        return rng.uniform(-limit, limit, shape)

    return {path: initial_value(path, shape).astype(dtype) for path, shape in shapes(c).items()}


def check_weights(c: Config, values: dict[str, Array]) -> dict[str, Array]:
    """Check that these are exactly the weights of the config: none missing, unknown or of another shape."""
    expected = shapes(c)
    for path, shape in expected.items():
        if path not in values:
            raise BadFile(
                _("the weights must hold {path}, which is missing; give the config they were trained with", path=path)
            )
        if values[path].shape != shape:
            got = values[path].shape
            raise BadFile(
                _(
                    "{path} must have shape {shape}, got {got}; give the config the weights were trained with",
                    path=path,
                    shape=shape,
                    got=got,
                )
            )
    for path in values:
        if path not in expected:
            raise BadFile(_("the config has no weight {path}; {nearest}", path=path, nearest=nearest(path, expected)))
    return values
