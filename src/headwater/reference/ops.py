"""2. Operations: linear layer, embedding lookup, softmax, norms, activations, dropout, each with its formula.

B batch, Q tokens, D width; `...` is any number of leading axes. Weights of a linear map are [out, in].
"""

from __future__ import annotations

import math

import numpy as np

from headwater.reference.gradients import Array, Backward, Layer, Parameters, identity


def linear(x: Array, w: Parameters) -> tuple[Array, Backward]:
    """Linear layer: y = x Wᵀ + b, without b if there is no bias among the parameters."""
    weight = w["weight"]
    rows = x.reshape(-1, x.shape[-1])  # all tokens as one matrix: one large product is faster than many small ones
    y = rows @ weight.T
    if "bias" in w:
        y += w["bias"]

    def backward(dy: Array) -> Array:
        # y_o = Σ_i W_oi x_i + b_o, so dW_oi = dy_o x_i and db_o = dy_o, summed over all tokens; dx_i = Σ_o dy_o W_oi
        drows = dy.reshape(-1, dy.shape[-1])
        w.add("weight", drows.T @ rows)
        if "bias" in w:
            w.add("bias", drows.sum(axis=0))
        return (drows @ weight).reshape(x.shape)

    return y.reshape(*x.shape[:-1], -1), backward


def lookup(ids: Array, w: Parameters) -> tuple[Array, Backward]:
    """Embedding lookup: y = W[ids], one row for each id. The ids have no gradient."""
    table = w["weight"]

    def backward(dy: Array) -> None:
        gradient = np.zeros_like(table)
        np.add.at(gradient, ids, dy)  # adds for every occurrence of an id; gradient[ids] += dy would add once
        w.add("weight", gradient)

    return table[ids], backward


def softmax(scores: Array, allowed: Array) -> tuple[Array, Backward]:
    """Softmax: p_j = exp(s_j − m) / Σ_k exp(s_k − m) over the allowed j, with m = max s; p_j = 0 elsewhere.

    Subtracting m does not change p, because exp(−m) is in every term, and it keeps exp from overflowing.
    Where nothing is allowed, p is all zeros and so is its gradient.
    """
    s = np.where(allowed, scores, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)

    def backward(dp: Array) -> Array:
        # ∂p_k/∂s_j = p_k (δ_kj − p_j), so ds_j = p_j (dp_j − Σ_k p_k dp_k)
        return p * (dp - (p * dp).sum(axis=-1, keepdims=True))

    return p, backward


def layer_norm(x: Array, w: Parameters, eps: float) -> tuple[Array, Backward]:
    """LayerNorm: y = γ x̂ + β, x̂ = (x − μ) / σ, with μ = mean(x) and σ = √(mean((x − μ)²) + ε) over the width."""
    centred = x - x.mean(axis=-1, keepdims=True)
    sigma = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    hat = centred / sigma
    y = w["weight"] * hat
    if "bias" in w:
        y = y + w["bias"]

    def backward(dy: Array) -> Array:
        # μ and σ depend on every x: they remove the component of dx̂ along 1 and the component along x̂
        _add_scale_gradients(dy, hat, w)
        dhat = dy * w["weight"]
        along_one = _mean(dhat)
        along_hat = _mean(dhat * hat)
        return (dhat - along_one - hat * along_hat) / sigma

    return y, backward


def rms_norm(x: Array, w: Parameters, eps: float) -> tuple[Array, Backward]:
    """RMSNorm: y = γ x̂, x̂ = x / r, with r = √(mean(x²) + ε): a LayerNorm that does not subtract the mean."""
    r = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    hat = x / r

    def backward(dy: Array) -> Array:
        _add_scale_gradients(dy, hat, w)
        dhat = dy * w["weight"]
        return (dhat - hat * _mean(dhat * hat)) / r

    return w["weight"] * hat, backward


NORMS = {"layer": layer_norm, "rms": rms_norm}


def _mean(x: Array) -> Array:
    return x.mean(axis=-1, keepdims=True)


def _add_scale_gradients(dy: Array, hat: Array, w: Parameters) -> None:
    """Gradients of a norm's weight and bias: dγ = Σ dy x̂ and dβ = Σ dy, over all tokens."""
    tokens = tuple(range(dy.ndim - 1))
    w.add("weight", (dy * hat).sum(tokens))
    if "bias" in w:
        w.add("bias", dy.sum(tokens))


# ------------------------------------------------------------------------------------------- activations: dx = f′(x) dy


def relu(x: Array) -> tuple[Array, Backward]:
    """ReLU: max(0, x)."""
    return np.maximum(x, 0), lambda dy: dy * (x > 0)


def gelu(x: Array) -> tuple[Array, Backward]:
    """GELU: x Φ(x), with Φ the normal distribution function ½ (1 + erf(x/√2)); f′ = Φ + x φ, with φ = Φ′."""
    cdf = 0.5 * (1 + _erf(x / math.sqrt(2)))
    density = np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return x * cdf, lambda dy: dy * (cdf + x * density)


def gelu_tanh(x: Array) -> tuple[Array, Backward]:
    """GELU by tanh: ½ x (1 + t), t = tanh(u), u = √(2/π) (x + 0.044715 x³); f′ = ½ (1 + t) + ½ x (1 − t²) u′."""
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    du = c * (1 + 3 * 0.044715 * x**2)  # u′
    return 0.5 * x * (1 + t), lambda dy: dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du)


def silu(x: Array) -> tuple[Array, Backward]:
    """SiLU: x σ(x), σ the logistic function."""
    return _x_sigmoid(x, 1.0)


def quick_gelu(x: Array) -> tuple[Array, Backward]:
    """Quick GELU: x σ(1.702 x), close to GELU and cheaper."""
    return _x_sigmoid(x, 1.702)


def _x_sigmoid(x: Array, a: float) -> tuple[Array, Backward]:
    """x s with s = σ(a x) = ½ (1 + tanh(a x / 2)), which cannot overflow; f′ = s + a x s (1 − s)."""
    s = 0.5 * (1 + np.tanh(0.5 * a * x))
    return x * s, lambda dy: dy * (s + a * x * s * (1 - s))


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


ACTIVATIONS: dict[str, Layer] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
}


def feed_forward(x: Array, w: Parameters, activation: str, drop: Layer) -> tuple[Array, Backward]:
    """Feed-forward layer: y = W_down φ(W_up x + b) + b, or gated (SwiGLU, GEGLU): y = W_down (φ(W_gate x) ⊙ W_up x).

    It is gated where the parameters have a gate. Tokens are processed independently.
    """
    up, up_backward = linear(x, w / "up")
    gated = "gate.weight" in w
    gate, gate_backward = linear(x, w / "gate") if gated else (up, up_backward)
    activated, phi_backward = ACTIVATIONS[activation](gate)
    inner, drop_backward = drop(activated * up if gated else activated)
    y, down_backward = linear(inner, w / "down")

    def backward(dy: Array) -> Array:
        dhidden = drop_backward(down_backward(dy))
        if not gated:
            return up_backward(phi_backward(dhidden))
        return up_backward(dhidden * activated) + gate_backward(phi_backward(dhidden * up))  # (a b)′ = a b′ + b a′

    return y, backward


class Dropout:
    """Dropout: y = x ⊙ m / (1 − rate): m is 0 with probability `rate`, else 1; the backward pass uses the same m."""

    def __init__(self, rate: float, rng: np.random.Generator) -> None:
        self.rate = rate
        self.rng = rng

    def __call__(self, x: Array) -> tuple[Array, Backward]:
        mask = (self.rng.random(x.shape) >= self.rate).astype(x.dtype) / (1 - self.rate)
        return x * mask, lambda dy: dy * mask


def no_dropout(x: Array) -> tuple[Array, Backward]:
    """Dropout at evaluation: y = x."""
    return x, identity
