"""What study guides on the Transformer often get wrong: each test passes on ours and fails on the mistaken formula."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headwater import core as hw
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding
from headwater.errors import BadInput
from headwater.families import builders
from headwater.families.presets import preset
from headwater.tasks import losses
from headwater.training import schedules

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"d_model": 16, "heads": 4, "layers": 2, "d_ff": 24, "dropout": 0.0}


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(seed))


def weights_of(model, *args, **kwargs) -> list[torch.Tensor]:
    """What each attention layer received, in order."""
    received, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith("kernel.weights"):
            hooks.append(module.register_forward_hook(lambda *a: received.append(a[2])))
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return received


# ------------------------------------------------------------------------------------------------------------- masks


def test_a_causal_mask_shows_the_past_and_hides_the_future():
    """The mistake: an additive mask (0 / -inf) handed to code that hides where mask == 0."""
    (ours, *_) = weights_of(builders.decoder(11, **SIZES).build(seed=0), ids(2, 5))
    scores = torch.randn(5, 5)
    additive = torch.full((5, 5), -torch.inf).triu(1)
    mistaken = scores.masked_fill(additive == 0, -1e9).softmax(-1)

    def hides_the_future(weights):
        return bool((weights.triu(1) == 0).all()) and bool((weights.diagonal(dim1=-2, dim2=-1) > 0).all())

    assert hides_the_future(ours) and not hides_the_future(mistaken)


def test_one_convention_for_every_mask():
    """True = may attend, for padding as for causality; the mistake is a second helper with the opposite sense."""
    model = builders.transformer(11, **SIZES).build(seed=0).eval()
    keep, text = torch.tensor([[True, True, True, False, False]]), ids(1, 5)

    def is_padding_hidden(keep):
        weights = weights_of(model, text, source=text, source_attention_mask=keep)
        return all((w[..., 3:] == 0).all() for w in weights[:2])

    assert is_padding_hidden(keep) and not is_padding_hidden(~keep)
    with pytest.raises(BadInput, match="attention_mask must be bool, got float32 .* True = real token; use mask.bool"):
        model(text, source=text, source_attention_mask=keep.float())


def test_a_row_that_sees_nothing_gives_zeros_in_half_precision():
    """The mistake: -1e9 for minus infinity, which overflows float16 and lets a hidden row attend everywhere."""
    scores, hidden = torch.randn(1, 4), torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="overflow"):
        scores.half().masked_fill(hidden, -1e9)
    assert (scores.masked_fill(hidden, -1e9).softmax(-1) > 0.2).all(), "attends everywhere"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = builders.transformer(11, **SIZES).build(seed=0).eval().to(dtype)
        out = model(ids(2, 4), source=ids(2, 4), source_attention_mask=torch.tensor([[True] * 4, [False] * 4]))
        assert out.isfinite().all()
        received = weights_of(
            model, ids(2, 4), source=ids(2, 4), source_attention_mask=torch.tensor([[True] * 4, [False] * 4])
        )
        assert (received[-1][1] == 0).all() and (received[-1][0].sum(-1).float() - 1).abs().max() < 1e-2


# ------------------------------------------------------------------------------------------------------------ attention


def test_keys_have_their_own_length():
    """The mistake: keys and values reshaped with the length of the queries."""
    x, memory, heads = torch.randn(2, 3, 8), torch.randn(2, 5, 8), 2
    with pytest.raises(RuntimeError, match="invalid for input"):
        memory.view(2, x.shape[1], heads, 4)
    model = builders.transformer(11, **SIZES).build(seed=0)
    assert model(ids(2, 3), source=ids(2, 5)).shape == (2, 3, 11)


def test_the_last_two_axes_are_swapped_in_numpy_too():
    """The mistake: K.transpose(-2, -1) on a NumPy array, which is torch's way and raises."""
    k = np.zeros((2, 4, 3))
    with pytest.raises(ValueError, match="axes don't match array"):
        k.transpose(-2, -1)
    code = (ROOT / "src" / "headwater" / "reference").rglob("*.py")
    assert not [path.name for path in code if "transpose(-2, -1)" in path.read_text(encoding="utf-8")]
    assert np.swapaxes(k, -2, -1).shape == (2, 3, 4)


def test_softmax_is_stable():
    """The mistake: exp without subtracting the largest score."""
    scores = torch.tensor([[1000.0, 999.0]])
    mistaken = scores.exp() / scores.exp().sum(-1, keepdim=True)
    assert mistaken.isnan().any()
    kernel = hw.Attention(1, kernel=hw.Eager(), scale=1.0).build_kernel(head_dim=1)
    places = torch.arange(2)[None]
    q, k = torch.tensor([[[[1000.0], [1000.0]]]]), torch.tensor([[[[1.0], [0.999]]]])
    out = kernel(
        q, k, torch.eye(2)[None, None], AttentionMask(hw.Bidirectional(), PositionEncoding(), places, places), None
    )
    assert out.isfinite().all() and torch.allclose(out[0, 0, 0], torch.tensor([0.7311, 0.2689]), atol=1e-3)


# ------------------------------------------------------------------------------------------------------------ positions


def test_frequencies_are_not_squared():
    """The mistake: exponent 2·i/d_model with an i that already runs over the even numbers."""
    d, place = 16, 7
    position = hw.Sinusoidal().build(d)
    position.init_buffers()
    ours = position.add(torch.zeros(1, 1, d), torch.tensor([[place]]))[0, 0]
    right = torch.tensor([math.sin(place / 10000 ** (i / d)) for i in range(0, d, 2)])
    mistaken = torch.tensor([math.sin(place / 10000 ** (2 * i / d)) for i in range(0, d, 2)])
    assert (ours[0::2] - right).abs().max() < 1e-5
    assert (ours[0::2] - mistaken).abs().max() > 0.1


def test_only_the_embedding_is_scaled():
    """The mistake: (embedding + position) · √d_model."""
    model = builders.decoder(11, **SIZES).build(seed=0).eval()
    text = ids(1, 5)
    embed, places = model.decoder.embed, torch.arange(5)[None]
    token = embed.tokens(text)
    position = embed.position.add(torch.zeros(1, 5, 16), places)
    ours = embed(model.inputs(text, None, None, None, None), places)
    assert torch.allclose(ours, token * 4 + position, atol=1e-6)
    assert (ours - (token + position) * 4).abs().max() > 1


# --------------------------------------------------------------------------------------------------------------- norms


def test_layer_norm_has_the_biased_variance_and_eps_inside_the_root():
    """The mistake: (x - mean) / (unbiased std + eps)."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e-2
    norm = hw.LayerNorm(eps=1e-5).build(8)
    centred = x - x.mean(-1, keepdim=True)
    right = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    mistaken = centred / (x.std(-1, keepdim=True) + 1e-5)
    assert (norm(x) - right).abs().max() < 1e-5
    assert (norm(x) - mistaken).abs().max() > 1e-2


# -------------------------------------------------------------------------------------------------------------- counts


def test_counts_have_the_feed_forward_in_them():
    """The mistakes: layers counted by their attention alone; "about 65M" for an example that has 59.5M."""
    d, d_ff, vocab = 512, 2048, 10000
    spec = hw.Model(
        hw.LMHead(vocab, bias=True),
        builders.transformer(vocab, vocab).decoder,
        builders.transformer(vocab, vocab).encoder,
    )
    skeleton = spec.on_meta()
    attention, ffn, norm = 4 * d * d + 4 * d, 2 * d * d_ff + d + d_ff, 2 * d
    layers = 6 * (attention + ffn + 2 * norm) + 6 * (2 * attention + ffn + 3 * norm)
    right = layers + 3 * vocab * d + vocab
    without_ffn = right - 12 * ffn
    count = sum(p.numel() for p in skeleton.parameters())
    assert count == right == 59_508_496
    assert count != without_ffn and abs(count - 65e6) > 5e6


def test_the_two_models_called_large_are_named_apart():
    layers = {name: len(preset(name).encoder.layers) for name in ("big", "large")}
    assert layers == {"big": 6, "large": 24}


# ----------------------------------------------------------------------------------------------- learning and deciding


def test_label_smoothing_reads_log_probabilities_and_leaves_padding_out():
    """The mistake: KL divergence of raw logits, padded targets counted."""
    logits, targets = torch.randn(2, 4, 11) * 3, ids(2, 4, seed=1)
    targets[1, 2:] = losses.IGNORE_INDEX
    kept = targets != losses.IGNORE_INDEX
    want = F.cross_entropy(logits[kept], targets[kept], label_smoothing=0.1)
    ours = losses.cross_entropy(logits, targets, label_smoothing=0.1) / losses.count_targets(targets)
    assert torch.allclose(ours, want, atol=1e-5)
    smooth = torch.full((2, 4, 11), 0.1 / 11).scatter_(2, targets.clamp(min=0)[..., None], 0.9 + 0.1 / 11)
    mistaken = F.kl_div(logits, smooth, reduction="sum") / targets.numel()
    assert (mistaken - want).abs() > 0.1


def test_noam_and_cosine_are_two_schedules_and_rightly_named():
    """The mistake: 'warm-up and cosine' over code that is Noam."""
    noam, cosine = (
        schedules.NoamSchedule(d_model=512, warmup=10),
        schedules.CosineSchedule(peak=1.0, warmup=10, steps=100),
    )
    shares = [[schedule.at(step) for step in range(1, 101)] for schedule in (noam, cosine)]
    roots = [share * math.sqrt(step) for step, share in enumerate(shares[0], 1)]
    assert max(roots[20:]) - min(roots[20:]) < 1e-9, "Noam falls as one over the root of the step"
    assert shares[1][-1] < 1e-3 * max(shares[1]) and shares[0][-1] > 0.1 * max(shares[0])


LEARNS = """
import sys
from pathlib import Path
from headwater.reference.copy_task import SIZES, train
from headwater.reference.figures import learning_curves
report = train(SIZES["Mini"], steps=30)
learning_curves(Path(sys.argv[1]), {"Mini": report}, min_loss=0.0)
print(report.losses[0], report.losses[-1])
"""


def test_figures_need_no_display_and_there_is_a_way_back(tmp_path):
    """The mistakes: a back end that wants a display (TkAgg), and no backward pass, so that nothing is learned."""
    hidden = ("DISPLAY", "MPLBACKEND", "WAYLAND_DISPLAY")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(ROOT / "src")}
    picture = tmp_path / "curve.png"
    said = subprocess.run(
        [sys.executable, "-c", LEARNS, picture], env=environment, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    first, last = map(float, said.stdout.split())
    assert last < first - 0.2, "30 steps taught it nothing"
    assert picture.read_bytes().startswith(b"\x89PNG")
    mistaken = subprocess.run(
        [sys.executable, "-c", "import matplotlib.pyplot as p; p.switch_backend('TkAgg'); p.figure()"],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert mistaken.returncode != 0, "with the mistake there is no figure on a machine without a display"


def test_greedy_decoding_reads_each_token_once_and_rows_stop_by_themselves():
    """The mistake: everything recomputed for each new token, one sentence at a time, never stopping per row."""
    model = builders.transformer(11, **SIZES).build(seed=0).eval()
    read = []
    model.decoder.embed.register_forward_hook(lambda module, args, out: read.append(args[0].ids.numel()))
    source, keep = ids(3, 5), torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
    with torch.no_grad():
        memory, cache = model.encode(source, attention_mask=keep), hw.dynamic_cache(model)
        text = torch.ones(3, 1, dtype=torch.long)
        for _ in range(6):
            step = model.decode(text[:, -1:], memory=memory, cache=cache)[:, -1].argmax(-1, keepdim=True)
            text = torch.cat((text, step), 1)
        assert sum(read) == 3 * 6, "a token was read twice"
        mistaken = sum(3 * n for n in range(1, 7))
        assert mistaken != 3 * 6
        for row in range(3):
            alone = model.encode(source[row : row + 1, : keep[row].sum()])
            again = model.decode(text[row : row + 1, :-1], memory=alone).argmax(-1)
            assert torch.equal(again[0], text[row, 1:])
    cache.reorder(torch.tensor([0, 2]))  # row 1 has ended: the others go on without it
    with torch.no_grad():
        two = hw.ModelInputs(memory.ids[[0, 2]], keep[[0, 2]], hidden_states=memory.hidden_states[[0, 2]])
        assert model.decode(text[[0, 2], -1:], memory=two, cache=cache).shape == (2, 1, 11)
