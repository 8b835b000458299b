"""Common mistakes of tutorials, each next to the correct form: a test that the mistake is detected."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headwater.reference import masks, model
from headwater.reference.attention import AttentionContext, multi_head
from headwater.reference.config import Config, init_weights, shapes
from headwater.reference.gradients import Parameters
from headwater.reference.loss import cross_entropy, log_softmax
from headwater.reference.masks import prepare_tokens
from headwater.reference.model import Transformer
from headwater.reference.ops import layer_norm, no_dropout, softmax
from headwater.reference.optimizer import noam, warmup_cosine
from headwater.reference.positions import NoPosition, sinusoid

RNG = np.random.default_rng(0)


def test_an_additive_mask_is_not_mistaken_for_a_boolean_one() -> None:
    """0 / −inf read as `mask == 0 means masked` attends to the future and masks the past."""
    allowed = masks.causal_mask(np.arange(4)[None], np.arange(4)[None])[0]
    p, _ = softmax(RNG.normal(size=(4, 4)), allowed)
    assert not np.triu(p, 1).any() and (np.tril(p)[np.tril_indices(4)] > 0).all()
    additive = np.where(allowed, 0.0, -np.inf)
    mistaken, _ = softmax(RNG.normal(size=(4, 4)), additive != 0)
    assert np.triu(mistaken, 1).any() and not np.tril(mistaken).any()


def test_padding_has_one_convention_true_is_real() -> None:
    c = Config(9, "encoder", d_model=8, heads=2, layers=1)
    m, ids, attention_mask = Transformer(c), np.array([[3, 4, 5, 0, 0]]), np.array([[True, True, True, False, False]])
    alone = m(ids[:, :3])[0]
    assert np.allclose(m(ids, attention_mask=attention_mask)[0][:, :3], alone, atol=1e-6)
    assert not np.allclose(m(ids, attention_mask=~attention_mask)[0][:, :3], alone, atol=1e-3)


def test_keys_keep_their_own_length() -> None:
    """Three queries over five keys: a reshape with the length of the queries has 5·8 numbers for 3·8 elements."""
    c = Config(9, "decoder", d_model=8, heads=2, layers=1)
    w = Parameters(init_weights(c)) / "decoder.layers.0.self_attn"
    x, memory = RNG.normal(size=(1, 3, 8)), RNG.normal(size=(1, 5, 8))
    view = AttentionContext(
        np.ones((1, 3, 5), bool), np.zeros((1, 3)), np.zeros((1, 5)), NoPosition(c, w), no_dropout, {}
    )
    assert multi_head(x, memory, w, 2, view)[0].shape == (1, 3, 8)
    with pytest.raises(ValueError, match="reshape"):
        memory.reshape(1, x.shape[1], 2, 4)


def test_the_last_two_axes_are_swapped() -> None:
    """On an array transpose(-2, -1) names two axes of four, and raises."""
    k = RNG.normal(size=(1, 2, 3, 4))
    assert k.swapaxes(-1, -2).shape == (1, 2, 4, 3)
    with pytest.raises(ValueError, match="axes"):
        k.transpose(-2, -1)


def test_the_exponent_of_the_sinusoid_is_i_over_d() -> None:
    """The squared frequencies of 2i/d would make the slowest wave rotate 10000 times too slowly."""
    d, position = 8, 5
    row = sinusoid(np.array([position]), d)[0]
    for i in range(0, d, 2):
        assert math.isclose(row[i], math.sin(position / 10000 ** (i / d)), abs_tol=1e-12)
        assert math.isclose(row[i + 1], math.cos(position / 10000 ** (i / d)), abs_tol=1e-12)
    assert not math.isclose(row[2], math.sin(position / 10000 ** (2 * 2 / d)), abs_tol=1e-2)


def test_only_the_embedding_is_scaled() -> None:
    """With an embedding of zeros the result is the position encoding itself, not √d times it."""
    c = Config(9, "decoder", d_model=16, heads=2, layers=1)
    run = model.ForwardContext(c, Parameters({"decoder.embed.tokens.weight": np.zeros((9, 16))}), no_dropout, {})
    x, _ = model.embed(prepare_tokens(np.array([[1, 2, 3]])), "decoder", run)
    assert np.allclose(x[0], sinusoid(np.arange(3), 16))
    assert not np.allclose(x[0], 4 * sinusoid(np.arange(3), 16))
    run.w.values["decoder.embed.tokens.weight"] += 1
    assert np.allclose(model.embed(prepare_tokens(np.array([[1, 2, 3]])), "decoder", run)[0] - x, 4)


def test_label_smoothing_takes_log_probabilities() -> None:
    """A constant added to all logits changes no probability; computed from logits, the loss would change."""
    logits, targets = RNG.normal(size=(1, 3, 5)), np.array([[1, 2, 3]])
    loss = cross_entropy(logits, targets, padding=0, smoothing=0.1)[0]
    assert math.isclose(loss, cross_entropy(logits + 100, targets, 0, 0.1)[0], rel_tol=1e-9)
    target_probs = np.full((3, 5), 0.02) + 0.9 * np.eye(5)[targets[0]]
    assert math.isclose(loss, -(target_probs * log_softmax(logits[0])).sum() / 3, rel_tol=1e-9)
    loss_of_logits = -(target_probs * (logits[0] + 100)).sum() / 3
    assert abs(loss_of_logits - loss) > 10


def test_padded_targets_are_not_counted() -> None:
    logits, targets = RNG.normal(size=(1, 4, 5)), np.array([[1, 2, 0, 0]])
    loss, backward = cross_entropy(logits, targets, padding=0, smoothing=0.1)
    assert math.isclose(loss, cross_entropy(logits[:, :2], targets[:, :2], 0, 0.1)[0], rel_tol=1e-9)
    assert not backward()[0, 2:].any()
    assert not math.isclose(loss, cross_entropy(logits, targets, padding=-1, smoothing=0.1)[0], rel_tol=1e-3)
    assert cross_entropy(logits, np.zeros((1, 4), int), padding=0)[0] == 0.0


def test_noam_and_warmup_cosine_are_two_things() -> None:
    rates = [noam(step, d_model=512, warmup=4000) for step in (1, 2000, 4000, 16000)]
    assert math.isclose(rates[2], 512**-0.5 * 4000**-0.5) and math.isclose(rates[1], rates[2] / 2)
    assert math.isclose(rates[3], rates[2] / 2), "after the peak it decays with the inverse square root of the step"
    factors = [warmup_cosine(step, warmup=100, steps=300) for step in (0, 50, 100, 200, 300, 400)]
    assert np.allclose(factors, [0, 0.5, 1, 0.5, 0, 0]), "a cosine ends at zero"


def test_layer_norm_has_the_biased_variance_and_eps_inside_the_root() -> None:
    x, w = np.array([[1.0, 2.0, 4.0]]), Parameters({"weight": np.ones(3), "bias": np.zeros(3)})
    centred, variance = x - x.mean(), x.var()
    right = centred / np.sqrt(variance + 0.5)
    assert np.allclose(layer_norm(x, w, 0.5)[0], right)
    assert not np.allclose(centred / (np.sqrt(variance) + 0.5), right, atol=1e-2), "eps outside"
    assert not np.allclose(centred / np.sqrt(x.var(ddof=1) + 0.5), right, atol=1e-2), "unbiased"


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_softmax_subtracts_the_maximum() -> None:
    x = np.array([1000.0, 1000.0])
    assert np.allclose(softmax(x, np.ones(2, bool))[0], 0.5)
    assert np.isnan(np.exp(x) / np.exp(x).sum()).all()


@pytest.mark.filterwarnings("ignore:overflow")
def test_minus_infinity_is_not_a_large_number() -> None:
    """−1e9 is −inf in float16, and where a query attends to nothing it makes the weights equal instead of zero."""
    scores, nothing = np.array([1.0, 2.0, 3.0]), np.zeros(3, bool)
    assert not softmax(scores, nothing)[0].any()
    hidden = np.where(nothing, scores, -1e9)
    mistaken = np.exp(hidden - hidden.max()) / np.exp(hidden - hidden.max()).sum()
    assert np.allclose(mistaken, 1 / 3)
    assert np.isinf(np.float32(-1e9).astype(np.float16))
    assert not softmax(scores.astype(np.float16), nothing)[0].any()


def test_the_parameter_count_includes_the_feed_forward_layers() -> None:
    """Base, one shared table of 37000: exactly the published layers (44.1 M) and the table (18.9 M)."""
    c = Config(37000, shared=True)
    count = {path: math.prod(shape) for path, shape in shapes(c).items()}
    attention, ffn, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 512
    layers = 6 * (attention + ffn + 2 * norm) + 6 * (2 * attention + ffn + 3 * norm)
    assert sum(count.values()) == layers + 37000 * 512 == 63_082_496
    assert sum(n for path, n in count.items() if ".ffn." in path) == 12 * ffn
