"""Laws of masks, positions and decoding: changes that must not affect the outputs; a broken mask would show."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from headwater.errors import BadFile, BadInput, BadSetting, TooLong
from headwater.reference import masks, model
from headwater.reference.attention import attend
from headwater.reference.config import Config, init_weights, shapes
from headwater.reference.decode import greedy
from headwater.reference.model import Transformer
from headwater.reference.ops import Dropout, no_dropout, softmax
from headwater.reference.positions import POSITIONS, alibi_slopes, relative_bucket

SMALL = {"d_model": 8, "heads": 2, "layers": 2, "d_ff": 12, "max_positions": 16}
IDS = np.random.default_rng(0).integers(0, 11, (2, 6))


def build(shape: str = "decoder", **changes) -> Transformer:
    c = Config(11, shape, **(SMALL | changes))
    return Transformer(c, init_weights(c, seed=3, dtype=np.float64))


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=1e-10, atol=1e-10))


def test_nothing_here_imports_torch() -> None:
    code = "import sys, headwater.reference.__main__; assert not {'torch', 'matplotlib'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------------- masks


def test_a_query_that_attends_to_nothing_gives_zeros_and_zero_gradients() -> None:
    q, k, v = (np.random.default_rng(i).normal(size=(1, 1, 3, 4)) for i in range(3))
    allowed = np.array([[True, True, False], [False] * 3, [True, True, False]])
    y, weights, backward = attend(q, k, v, allowed, np.zeros(()), no_dropout)
    assert not y[0, 0, 1].any() and not weights[0, 0, 1].any()
    dq, dk, dv, _ = backward(np.ones_like(y))
    assert not dq[0, 0, 1].any(), "the query that attends to nothing"
    assert not dk[0, 0, 2].any() and not dv[0, 0, 2].any(), "the key that no query attends to"
    assert all(np.isfinite(d).all() for d in (dq, dk, dv))


@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder_decoder"])
def test_a_row_of_padding_only_is_finite_forward_and_backward(shape: str) -> None:
    m, attention_mask = build(shape), np.array([[False] * 6, [True] * 6])
    extra = {"source": IDS, "source_attention_mask": attention_mask} if shape == "encoder_decoder" else {}
    logits, backward = m(IDS, attention_mask=attention_mask, **extra)
    gradients = backward(np.ones_like(logits))
    assert np.isfinite(logits).all() and all(np.isfinite(g).all() for g in gradients.values())


def depends_on_the_future(m: Transformer) -> bool:
    """Whether the first four outputs depend on the tokens after them."""
    other = IDS.copy()
    other[:, 4:] = (other[:, 4:] + 1) % 11
    return not np.array_equal(m(IDS)[0][:, :4], m(other)[0][:, :4])


@pytest.mark.parametrize("position", POSITIONS)
def test_a_decoder_does_not_depend_on_the_future(position: str) -> None:
    assert not depends_on_the_future(build(position=position))
    assert depends_on_the_future(build("encoder", position=position))  # an encoder does


@pytest.mark.parametrize(
    "fault", [lambda q, k: k[:, None] >= q[:, :, None], lambda q, k: k[:, None] <= q[:, :, None] + 1]
)
def test_the_leak_shows_when_the_mask_is_inverted_or_off_by_one(fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "causal_mask", fault)
    assert depends_on_the_future(build())


def pad(ids: np.ndarray, side: str, count: int = 3) -> tuple[np.ndarray, np.ndarray, slice]:
    widths = (count, 0) if side == "left" else (0, count)
    padded = np.pad(ids, ((0, 0), widths), constant_values=7)
    attention_mask = np.pad(np.ones(ids.shape, bool), ((0, 0), widths))
    return padded, attention_mask, slice(count, None) if side == "left" else slice(None, -count)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("position", POSITIONS)
def test_padding_changes_nothing(position: str, shape: str, side: str) -> None:
    m, (ids, attention_mask, real) = build(shape, position=position), pad(IDS, side)
    alone, alone_backward = m(IDS)
    padded, padded_backward = m(ids, attention_mask=attention_mask)
    assert close(padded[:, real], alone)
    d = np.zeros_like(padded)
    d[:, real] = 1
    expected, got = alone_backward(np.ones_like(alone)), padded_backward(d)
    assert all(close(got[path], expected[path]) for path in expected)
    assert not close(m(ids)[0][:, real], alone) or (shape, side) == ("decoder", "right")  # without the mask it shows


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_the_source_changes_nothing(side: str) -> None:
    m, (source, attention_mask, _) = build("encoder_decoder"), pad(IDS, side)
    alone = m(IDS, source=IDS)[0]
    assert close(m(IDS, source=source, source_attention_mask=attention_mask)[0], alone)
    assert not close(m(IDS, source=source)[0], alone)


@pytest.mark.parametrize("shape", ["decoder", "encoder"])
@pytest.mark.parametrize("position", POSITIONS)
def test_packed_documents_equal_separate_ones(position: str, shape: str) -> None:
    m, packed = build(shape, position=position), np.concatenate([IDS[:1], IDS[1:, :4]], axis=1)
    document_ids = np.array([[1] * 6 + [2] * 4])
    logits = m(packed, document_ids=document_ids)[0]
    assert close(logits[:, :6], m(IDS[:1])[0]) and close(logits[:, 6:], m(IDS[1:, :4])[0])
    assert not close(m(packed)[0][:, 6:], m(IDS[1:, :4])[0])


def test_packed_pairs_equal_separate_ones() -> None:
    m, document_ids = build("encoder_decoder"), np.array([[1, 1, 1, 2, 2, 2]])
    packed = m(IDS[:1], source=IDS[1:], document_ids=document_ids, source_document_ids=document_ids)[0]
    for half in (slice(0, 3), slice(3, 6)):
        assert close(packed[:, half], m(IDS[:1, half], source=IDS[1:, half])[0])
    with pytest.raises(BadInput, match="number both alike"):
        m(IDS[:1], source=IDS[1:], document_ids=document_ids)


def test_a_window_attends_to_the_last_tokens_only() -> None:
    m = build(window=2, layers=1)
    seen: dict[str, np.ndarray] = {}
    m(IDS, attention_weights=seen)
    i, j = np.indices((6, 6))
    weights = seen["decoder.layers.0.self_attn.kernel.weights"]
    assert ((weights > 0) == ((i - j >= 0) & (i - j < 2))).all()
    assert np.allclose(weights.sum(-1), 1)


def test_a_batch_is_its_rows() -> None:
    m = build("encoder_decoder")
    assert close(m(IDS, source=IDS)[0], np.concatenate([m(r[None], source=r[None])[0] for r in IDS]))


# ---------------------------------------------------------------------------------------------- softmax and positions


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_softmax_is_stable_and_keeps_its_dtype(dtype: type) -> None:
    scores = np.array([[3e4, 3e4, -3e4], [-3e4, -3e4, -3e4]], dtype)
    p, backward = softmax(scores, np.ones((2, 3), bool))
    assert p.dtype == dtype and np.allclose(p, [[0.5, 0.5, 0], [1 / 3] * 3], atol=1e-3)
    assert backward(np.ones_like(p)).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_computes_in_the_dtype_it_is_given(dtype: type, position: str) -> None:
    c = Config(
        11, "encoder_decoder", position=position, norm_position="sandwich", gated=True, activation="gelu", **SMALL
    )
    logits, backward = Transformer(c, init_weights(c, dtype=dtype))(IDS, source=IDS)
    gradients = backward(np.ones_like(logits))
    assert {a.dtype for a in (logits, *gradients.values())} == {np.dtype(dtype)}


@pytest.mark.parametrize("position", POSITIONS)
def test_only_absolute_positions_depend_on_the_offset(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m = build(position=position)
    before = m(IDS)[0]

    def later(*args):
        tokens = masks.prepare_tokens(*args)
        return dataclasses.replace(tokens, positions=tokens.positions + 5)

    monkeypatch.setattr(model, "prepare_tokens", later)
    assert close(m(IDS)[0], before) == (position not in ("sinusoidal", "learned"))


def test_alibi_slopes_and_t5_buckets_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2**-h for h in range(1, 9)]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert relative_bucket(np.array([0, -1, -7, 1, 7, -8, -128, -999, 128]), bidirectional=True).tolist() == [
        0,
        1,
        7,
        17,
        23,
        8,
        15,
        15,
        31,
    ]
    assert relative_bucket(np.array([0, 3, -15, -16, -127, -999]), bidirectional=False).tolist() == [
        0,
        0,
        15,
        16,
        31,
        31,
    ]


def test_dropout_keeps_the_mean_and_drops_at_its_rate() -> None:
    y, _ = Dropout(0.25, np.random.default_rng(0))(np.ones((400, 400)))
    assert abs(y.mean() - 1) < 0.01 and abs((y == 0).mean() - 0.25) < 0.01


# ------------------------------------------------------------------------------------------------- decoding and faults


def test_greedy_decoding_of_a_batch_equals_single_rows() -> None:
    m = build("decoder", tied=False)
    prompts = [[3], [4, 5, 6], [7, 8], [9], [1, 2, 3, 4]]
    unstopped = greedy(m, prompts, stop=-1, max_new_tokens=6)
    stop = next(t for row in unstopped for t in row[1:5])
    batched = greedy(m, prompts, stop, max_new_tokens=6)
    assert batched == [greedy(m, [p], stop, max_new_tokens=6)[0] for p in prompts]
    assert batched == [row[: row.index(stop)] if stop in row else row for row in unstopped]
    assert len({len(row) for row in batched}) > 1, "some row must have stopped early for this to be a test"


def test_greedy_reads_its_own_source() -> None:
    m = build("encoder_decoder", tied=False)
    source, attention_mask = np.array([[3, 4, 5], [6, 7, 0]]), np.array([[True] * 3, [True, True, False]])
    batched = greedy(m, [[1], [1]], -1, 4, source, attention_mask)
    assert batched == [greedy(m, [[1]], -1, 4, s)[0] for s in (source[:1], source[1:, :2])]


@pytest.mark.parametrize("shape", ["decoder", "encoder_decoder"])
def test_backward_can_be_called_twice(shape: str) -> None:
    logits, backward = build(shape)(IDS, **({"source": IDS} if shape == "encoder_decoder" else {}))
    first, second = backward(np.ones_like(logits)), backward(np.ones_like(logits))
    assert first.keys() == second.keys() and all(np.array_equal(first[path], second[path]) for path in first)


FAULTS = [
    (lambda: Config(9, d_ff=-4), BadSetting, "d_ff must not be negative, got -4"),
    (lambda: greedy(build("encoder_decoder"), [[1]], 2, 3), BadInput, "must be given a source, got none"),
    (lambda: Config(9, position="rotory"), BadSetting, "did you mean 'rotary'"),
    (lambda: Config(9, d_model=10, heads=4), BadSetting, "heads must divide d_model 10, got 4"),
    (lambda: Config(9, d_model=8, heads=4, kv_heads=3), BadSetting, "kv_heads must divide heads 4, got 3"),
    (lambda: Config(9, d_model=6, heads=2, position="rotary"), BadSetting, "head_dim must be even, got 3"),
    (lambda: Config(9, source_vocab=8, shared=True), BadSetting, "source_vocab to be vocab 9, got 8"),
    (lambda: Config(9, layers=0), BadSetting, "layers must be at least 1, got 0"),
    (lambda: Config(9, dropout=1.0), BadSetting, "dropout must be from 0 up to 1, got 1.0"),
    (lambda: build()(IDS + 9), BadInput, "ids must be from 0 to 10, got"),
    (lambda: build()(IDS[0]), BadInput, r"integers \[batch, length\], got int64 \[6\]"),
    (
        lambda: build()(IDS, attention_mask=np.ones((2, 5), bool)),
        BadInput,
        r"attention_mask must have the shape of ids \(2, 6\), got \(2, 5\)",
    ),
    (lambda: build()(IDS, source=IDS), BadInput, "must be given no source, got one"),
    (lambda: build("encoder_decoder")(IDS), BadInput, "must be given a source, got none"),
    (lambda: build(position="learned", max_positions=5)(IDS), TooLong, "at most 5 positions are learned, got 6"),
    (lambda: greedy(build("encoder"), [[1]], 2, 3), BadSetting, "needs a decoder, got a model of shape 'encoder'"),
    (lambda: greedy(build(), [[1], []], 2, 3), BadInput, "at least one token, got an empty one"),
    (lambda: Transformer(Config(11, "decoder", **SMALL), {}), BadFile, "must hold decoder.embed.tokens.weight"),
    (lambda: Transformer(build().config, build(tied=False).values), BadFile, "no weight head.out.weight"),
    (lambda: Transformer(build(d_ff=5).config, build().values), BadFile, r"must have shape \(5, 8\), got \(12, 8\)"),
]


@pytest.mark.parametrize(("call", "fault", "words"), FAULTS)
def test_errors_name_the_value(call, fault, words: str) -> None:
    with pytest.raises(fault, match=words) as caught:
        call()
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_the_initial_weights_are_xavier() -> None:
    c = Config(50, d_model=64, heads=4, layers=1)
    values = init_weights(c)
    assert values.keys() == shapes(c).keys() and all(v.shape == shapes(c)[p] for p, v in values.items())
    up = values["encoder.layers.0.ffn.up.weight"]
    limit = (6 / (64 + 256)) ** 0.5
    assert 0.95 * limit < np.abs(up).max() <= limit and abs(up.std() - limit / 3**0.5) < 0.01
    assert abs(values["decoder.embed.tokens.weight"].std() * 8 - 1) < 0.05
    assert (
        not values["encoder.layers.0.ffn.up.bias"].any()
        and (values["encoder.layers.0.ffn_post_norm.weight"] == 1).all()
    )
