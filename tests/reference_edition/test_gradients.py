"""Every backward function against central differences in float64: L = Σ y·dy, dL/dx ≈ (L(x + h) − L(x − h)) / 2h."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headwater.reference import attention, ops
from headwater.reference.config import Config, init_weights
from headwater.reference.gradients import Parameters
from headwater.reference.loss import cross_entropy
from headwater.reference.model import Transformer
from headwater.reference.ops import ACTIVATIONS, NORMS, Dropout, feed_forward, linear, lookup, no_dropout, softmax
from headwater.reference.positions import POSITIONS

STEP = 1e-6


def draw(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def numeric_gradient(f, array: np.ndarray) -> np.ndarray:
    """dL/d(array), entry by entry."""
    result = np.zeros_like(array)
    for at in np.ndindex(array.shape):
        kept = array[at]
        array[at] = kept + STEP
        above = f()
        array[at] = kept - STEP
        result[at] = (above - f()) / (2 * STEP)
        array[at] = kept
    return result


def assert_same(result: np.ndarray, numeric: np.ndarray, what: str) -> None:
    assert result.shape == numeric.shape, what
    np.testing.assert_allclose(result, numeric, rtol=1e-5, atol=1e-7, err_msg=what)


def assert_backward(part, x: np.ndarray, values: dict[str, np.ndarray]) -> None:
    """part(x, w) -> y, backward: check the gradient of x and of every parameter."""
    w = Parameters(values)
    y, backward = part(x, w)
    dy = draw(9).normal(size=y.shape)

    def loss() -> float:
        return float((part(x, Parameters(values))[0] * dy).sum())

    dx = backward(dy)
    if np.issubdtype(x.dtype, np.floating):
        assert_same(dx, numeric_gradient(loss, x), "x")
    assert w.gradients.keys() == values.keys()
    for path, value in values.items():
        assert_same(w.gradients[path], numeric_gradient(loss, value), path)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    values = {"weight": draw().normal(size=(4, 3))} | ({"bias": draw(1).normal(size=4)} if bias else {})
    assert_backward(linear, draw(2).normal(size=(2, 5, 3)), values)


def test_lookup_adds_the_gradients_of_a_repeated_id() -> None:
    assert_backward(lookup, np.array([[1, 1, 3], [0, 1, 3]]), {"weight": draw().normal(size=(4, 3))})


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    values = {"weight": draw().normal(size=5)} | ({"bias": draw(1).normal(size=5)} if name == "layer" else {})
    assert_backward(lambda x, w: NORMS[name](x, w, 1e-5), draw(2).normal(size=(2, 3, 5)), values)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    assert_backward(lambda x, w: ACTIVATIONS[name](x), 2 * draw().normal(size=(3, 7)), {})


@pytest.mark.parametrize(("name", "gated"), [*itertools.product(ACTIVATIONS, [True, False])])
def test_feed_forward(name: str, gated: bool) -> None:
    names = ("up", "gate", "down") if gated else ("up", "down")
    shapes = {f"{n}.weight": (3, 6) if n == "down" else (6, 3) for n in names}
    values = {path: draw(i).normal(size=shape) for i, (path, shape) in enumerate(shapes.items())}
    assert_backward(lambda x, w: feed_forward(x, w, name, no_dropout), draw(5).normal(size=(2, 3, 3)), values)


def test_softmax_with_a_mask() -> None:
    allowed = np.array([[True, True, False, True], [False] * 4, [True, False, False, False]])
    assert_backward(lambda x, w: softmax(x, allowed), draw().normal(size=(2, 3, 4)), {})


def test_dropout_backward_uses_the_same_mask() -> None:
    assert_backward(lambda x, w: Dropout(0.4, draw(3))(x), draw().normal(size=(3, 7)), {})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing: float) -> None:
    logits, targets = draw().normal(size=(2, 4, 5)), np.array([[1, 2, 0, 0], [4, 3, 1, 0]])
    _, backward = cross_entropy(logits, targets, padding=0, smoothing=smoothing)
    assert_same(backward(), numeric_gradient(lambda: cross_entropy(logits, targets, 0, smoothing)[0], logits), "logits")


def attend_all(q, k, v, bias):
    allowed = np.tri(q.shape[2], k.shape[2], dtype=bool)
    allowed[0] = False  # a query that attends to nothing
    return attention.attend(q, k, v, allowed, bias, lambda p: Dropout(0.2, draw(4))(p))


def test_scaled_dot_product_attention_with_other_lengths_and_widths() -> None:
    """d_k ≠ d_v, more keys than queries, and gradients for the bias too."""
    sizes = [(2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6), (2, 2, 3, 5)]
    inputs = [draw(i).normal(size=size) for i, size in enumerate(sizes)]
    y, _, backward = attend_all(*inputs)
    dy = draw(8).normal(size=y.shape)
    for name, array, result in zip(("q", "k", "v", "bias"), inputs, backward(dy), strict=True):
        assert_same(result, numeric_gradient(lambda: float((attend_all(*inputs)[0] * dy).sum()), array), name)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("position", POSITIONS)
def test_multi_head_attention_over_a_memory(position: str, kv_heads: int) -> None:
    """Grouped heads, another head_dim, and a memory longer than the queries: dx and dmemory."""
    c = Config(
        5, "decoder", d_model=6, heads=4, kv_heads=kv_heads, head_dim=2, v_head_dim=3, layers=1, position=position
    )
    values = perturbed(init_weights(c, dtype=np.float64))
    attn_values = {p: v for p, v in values.items() if "self_attn." in p or ".position_encodings." in p}
    x, memory = draw(1).normal(size=(2, 3, 6)), draw(2).normal(size=(2, 5, 6))
    allowed, q_positions, k_positions = (
        np.ones((2, 3, 5), bool),
        np.array([[2, 3, 4], [0, 1, 2]]),
        np.array([range(5)] * 2),
    )

    def run(w: Parameters):
        at = POSITIONS[position](c, w / "decoder")
        view = attention.AttentionContext(allowed, q_positions, k_positions, at, no_dropout, {})
        return attention.multi_head(x, memory, w / "decoder.layers.0.self_attn", c.heads, view)

    w = Parameters(attn_values)
    y, backward = run(w)
    dy = draw(3).normal(size=y.shape)
    dx, dmemory = backward(dy)
    for name, array, result in [
        ("x", x, dx),
        ("memory", memory, dmemory),
        *((p, attn_values[p], w.gradients[p]) for p in attn_values),
    ]:
        assert_same(result, numeric_gradient(lambda: float((run(Parameters(attn_values))[0] * dy).sum()), array), name)


# ------------------------------------------------------------------------------------------------- complete models


def perturbed(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add noise to initial weights, whose biases are 0 and norms 1, so that no error is hidden."""
    rng = draw(7)
    return {path: value + 0.3 * rng.normal(size=value.shape) for path, value in values.items()}


def assert_model(c: Config, **call) -> None:
    """Directional derivative along a random v for each weight: (L(w + h v) − L(w − h v)) / 2h = ⟨dw, v⟩."""
    values, rng = perturbed(init_weights(c, dtype=np.float64)), draw(1)
    model = Transformer(c, values)
    ids, targets = rng.integers(0, c.vocab, (2, 6)), rng.integers(1, c.vocab, (2, 6))
    targets[0, 4:] = 0
    if c.shape == "encoder_decoder":
        call |= {
            "source": rng.integers(0, c.source_vocab, (2, 4)),
            "source_attention_mask": np.array([[1, 1, 1, 0], [1] * 4], bool),
        }

    def forward():
        logits, backward = model(ids, drop=Dropout(0.1, draw(2)), **call)
        loss, loss_backward = cross_entropy(logits, targets, padding=0, smoothing=0.1)
        return loss, backward, loss_backward

    _, backward, loss_backward = forward()
    gradients = backward(loss_backward())
    assert gradients.keys() == values.keys()
    for path, value in values.items():
        direction, kept = rng.normal(size=value.shape), value.copy()
        value += STEP * direction
        above = forward()[0]
        value -= 2 * STEP * direction
        numeric = (above - forward()[0]) / (2 * STEP)
        value[...] = kept
        assert abs(numeric - (gradients[path] * direction).sum()) < 1e-7 + 1e-5 * abs(numeric), path


SMALL = {"d_model": 6, "heads": 2, "head_dim": 4, "layers": 2, "d_ff": 7, "max_positions": 8}
SHAPES = ("encoder_decoder", "encoder", "decoder")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", POSITIONS)
def test_models_with_every_position(shape: str, position: str) -> None:
    attention_mask = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], bool)
    assert_model(Config(9, shape, position=position, activation="gelu_tanh", **SMALL), attention_mask=attention_mask)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("norm", "norm_position"), [*itertools.product(NORMS, ("pre", "post", "sandwich"))])
def test_models_with_every_norm_position(shape: str, norm: str, norm_position: str) -> None:
    c = Config(
        9, shape, norm=norm, norm_position=norm_position, kv_heads=1, gated=True, activation="silu", bias=False, **SMALL
    )
    assert_model(c)


@pytest.mark.parametrize("shape", SHAPES)
def test_models_with_untied_and_shared_tables_and_windows(shape: str) -> None:
    assert_model(Config(9, shape, tied=False, shared=True, window=2, activation="gelu", **SMALL))
    assert_model(Config(9, shape, tied=True, shared=True, norm_position="pre", **SMALL))


def test_models_with_documents() -> None:
    document_ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 2, 2]])
    assert_model(Config(9, "decoder", position="xl", **SMALL), document_ids=document_ids)


# ---------------------------------------------------------------------------------------------------- planted faults


def softmax_without_its_second_term(scores, allowed):
    p, _ = softmax(scores, allowed)
    return p, lambda dp: p * dp


def norm_with_a_constant_sigma(x, w, eps):
    y, backward = ops.layer_norm(x, w, eps)
    centred = x - x.mean(-1, keepdims=True)
    sigma = np.sqrt((centred**2).mean(-1, keepdims=True) + eps)

    def wrong(dy):
        backward(dy)
        dhat = dy * w["weight"]
        return (dhat - dhat.mean(-1, keepdims=True)) / sigma

    return y, wrong


def heads_without_their_copies(x, groups):
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // groups, groups, length, width)[:, :, 0]


FAULTS = {
    "softmax": (attention, "softmax", softmax_without_its_second_term),
    "grouped heads": (attention, "sum_groups", heads_without_their_copies),
    "relu": (None, "relu", lambda x: (np.maximum(x, 0), lambda dy: dy)),
    "norm": (None, "layer", norm_with_a_constant_sigma),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_detects(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong = FAULTS[fault]
    if module is not None:
        monkeypatch.setattr(module, name, wrong)
    else:
        monkeypatch.setitem(NORMS if name in NORMS else ACTIVATIONS, name, wrong)
    with pytest.raises(AssertionError):
        assert_model(Config(9, "decoder", kv_heads=1, **SMALL))
