"""4. The sizes and choices of one model, and the name and shape of every weight that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headwater.errors import BadFile, BadSetting, nearest
from headwater.reference.gradients import Array

CHOICES = {
    "shape": ("encoder_decoder", "encoder", "decoder"),
    "activation": ("relu", "gelu", "gelu_tanh", "quick_gelu", "silu"),
    "norm": ("layer", "rms"),
    "placement": ("pre", "post", "sandwich"),
    "position": ("none", "sinusoidal", "learned", "rotary", "alibi", "relative", "xl"),
}


@dataclass(frozen=True)
class Config:
    """The defaults are the base model of the 2017 paper. A size of 0 stands for the usual one, written beside it.

    dropout acts on the embeddings, on attention weights, inside the feed-forward layer and on what each layer adds.
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
    placement: str = "post"
    position: str = "sinusoidal"
    longest: int = 512  # places in a learned table
    window: int = 0  # no window
    tied: bool = True  # the last map is the table of the embedding
    shared: bool = False  # source and target have one table
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise BadSetting(f"{name} must be one of {len(known)} names, got {value!r}; {nearest(value, known)}")
        for name in ("vocab", "d_model", "heads", "layers", "longest"):
            _must(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name), "correct it")
        fits = bool(self.head_dim) or self.d_model % self.heads == 0
        _must(fits, f"heads must divide d_model {self.d_model}", self.heads, "change one of them, or give head_dim")
        usual = {
            "source_vocab": self.vocab,
            "kv_heads": self.heads,
            "head_dim": self.d_model // self.heads,
            "v_head_dim": self.head_dim or self.d_model // self.heads,
            "d_ff": 4 * self.d_model,
            "eps": 1e-5 if self.norm == "layer" else 1e-6,
        }
        for name, value in usual.items():
            object.__setattr__(self, name, getattr(self, name) or value)
        self._check_together()

    def _check_together(self) -> None:
        for name in ("source_vocab", "kv_heads", "head_dim", "v_head_dim", "d_ff", "eps", "window"):
            _must(getattr(self, name) >= 0, f"{name} must not be negative", getattr(self, name), "0 is the usual one")
        divides = self.heads % self.kv_heads == 0
        _must(divides, f"kv_heads must divide heads {self.heads}", self.kv_heads, "change one of them")
        pairs = self.position != "rotary" or self.head_dim % 2 == 0
        _must(pairs, "rotary positions turn pairs: head_dim must be even", self.head_dim, "change it")
        pairs = self.position != "sinusoidal" or self.d_model % 2 == 0
        _must(pairs, "sine and cosine come in pairs: d_model must be even", self.d_model, "change it")
        one = not self.shared or self.source_vocab == self.vocab
        _must(one, f"a shared table needs source_vocab to be vocab {self.vocab}", self.source_vocab, "leave it out")
        _must(0 <= self.dropout < 1, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")

    @property
    def stacks(self) -> tuple[str, ...]:
        return tuple(self.shape.split("_"))

    def table(self, stack: str) -> str:
        """Where the token table of a stack is kept; a shared one is kept once, with the encoder."""
        return f"{self.stacks[0] if self.shared else stack}.embed.tokens"

    @property
    def output(self) -> str:
        """Where the last map is kept."""
        return self.table(self.stacks[-1]) if self.tied else "head.out"


def _must(holds: bool, law: str, came: object, remedy: str) -> None:
    if not holds:
        raise BadSetting(f"{law}, got {came}; {remedy}")


BUCKETS = 32  # of a T5 bias table
Shapes = dict[str, tuple[int, ...]]


def shapes(c: Config) -> Shapes:
    """The path and shape of every weight: what a file must hold, and an exact count of parameters.

    >>> sum(math.prod(shape) for shape in shapes(Config(vocab=37000, shared=True)).values())
    63082496
    """
    found: Shapes = {} if c.tied else {"head.out.weight": (c.vocab, c.d_model)}
    for stack in c.stacks:
        vocab = c.vocab if stack == c.stacks[-1] else c.source_vocab
        found[c.table(stack) + ".weight"] = (vocab, c.d_model)
        found |= {f"{stack}.{name}": shape for name, shape in _positions(c).items()}
        for i in range(c.layers):
            found |= {f"{stack}.layers.{i}.{name}": shape for name, shape in _block(c, stack).items()}
        if c.placement != "post":
            found |= _norm(f"{stack}.final_norm", c)
    return found


def _positions(c: Config) -> Shapes:
    width = c.heads * c.head_dim
    per_layer = {"u": (c.heads, 1, c.head_dim), "v": (c.heads, 1, c.head_dim), "distance.weight": (width, width)}
    found: dict[str, Shapes] = {
        "learned": {"embed.position.table.weight": (c.longest, c.d_model)},
        "relative": {"positions.0.table.weight": (BUCKETS, c.heads)},
        "xl": {f"positions.{i}.{name}": s for i in range(c.layers) for name, s in per_layer.items()},
    }
    return found.get(c.position, {})


def _block(c: Config, stack: str) -> Shapes:
    found: Shapes = {}
    reads_memory = stack == "decoder" and "encoder" in c.stacks
    for role in ("self_attn", "cross_attn", "ffn") if reads_memory else ("self_attn", "ffn"):
        found |= _feed_forward(c) if role == "ffn" else _attention(role, c)
        for slot in {"pre": ("norm",), "post": ("post_norm",), "sandwich": ("norm", "out_norm")}[c.placement]:
            found |= _norm(f"{role}_{slot}", c)
    return found


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
    found: Shapes = {f"{role}.{name}.weight": shape for name, shape in maps.items()}
    return found | ({f"{role}.{name}.bias": shape[:1] for name, shape in maps.items()} if bias else {})


def _norm(path: str, c: Config) -> Shapes:
    return {f"{path}.{name}": (c.d_model,) for name in (("weight", "bias") if c.norm == "layer" else ("weight",))}


def initial(c: Config, seed: int = 0, dtype: type = np.float32) -> dict[str, Array]:
    """Xavier: maps are uniform within ±√(6 / (in + out)), which keeps the variance the same forwards and backwards.

    The token table is normal with variance 1/d_model, so that an embedding times √d_model has variance 1; the tables of
    positions start near nothing, norms as 1, biases as 0.
    """
    chance = np.random.default_rng(seed)

    def start(path: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return np.full(shape, 0 if path.endswith("bias") else 1)
        if path.endswith(("tokens.weight", "table.weight")):
            return chance.normal(0, c.d_model**-0.5 if "tokens" in path else 0.02, shape)
        limit = math.sqrt(6 / (shape[0] + shape[-1]))
        return chance.uniform(-limit, limit, shape)

    return {path: start(path, shape).astype(dtype) for path, shape in shapes(c).items()}


def checked(c: Config, values: dict[str, Array]) -> dict[str, Array]:
    """Exactly the weights the config asks for; one that is missing, unknown or of another shape is a fault."""
    wanted = shapes(c)
    for path, shape in wanted.items():
        if path not in values:
            raise BadFile(f"the weights must hold {path}, which is missing; give the config they were made with")
        if values[path].shape != shape:
            came = values[path].shape
            raise BadFile(f"{path} must have shape {shape}, got {came}; give the config the weights were made with")
    for path in values:
        if path not in wanted:
            raise BadFile(f"the config has no place for {path}; {nearest(path, wanted)}")
    return values
