"""The losses equal their plain formulas, and do not count what is not asked."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headwater.data.collate import IGNORE_INDEX
from headwater.families.builders import decoder
from headwater.quantization.layers import quantize
from headwater.tasks import logprobs, losses
from headwater.tasks.language_model import lm_loss
from headwater.tasks.logprobs import target_logprobs
from headwater.tasks.losses import chunked_cross_entropy, count_targets, cross_entropy, span_loss
from headwater.tuning import LoRA, tune


def formula(logits, labels, smoothing):
    """Spelled out from log-probabilities, token by token."""
    total = torch.zeros((), dtype=logits.dtype)
    for row, label in zip(logits.flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label != IGNORE_INDEX:
            log_p = row - torch.logsumexp(row, 0)
            total = total - (1 - smoothing) * log_p[label] - smoothing * log_p.mean()
    return total


def case(seed=0, rows=3, length=7, width=8, vocab=11, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, width, generator=draw, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, width, generator=draw, dtype=dtype, requires_grad=True)
    b = torch.randn(vocab, generator=draw, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (rows, length), generator=draw)
    labels[torch.rand(rows, length, generator=draw) < 0.3] = IGNORE_INDEX
    return x, w, b, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_the_formula(smoothing):
    x, w, b, labels = case()
    logits = x @ w.T + b
    torch.testing.assert_close(
        cross_entropy(logits, labels, smoothing).double(), formula(logits, labels, smoothing), atol=1e-5, rtol=1e-6
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_the_chunked_loss_is_the_plain_one_with_its_gradients(smoothing, bias, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk)
    x, w, b, labels = case(dtype=torch.float32)
    given = [x, w, b] if bias else [x, w]
    plain = formula(x @ w.T + (b if bias else 0), labels, smoothing)
    ours = chunked_cross_entropy(x, w, b if bias else None, labels, smoothing)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-6)
    wanted = torch.autograd.grad(3 * plain, given)
    got = torch.autograd.grad(3 * ours, given)
    for a, e in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, e, atol=1e-5, rtol=1e-5)


def test_the_check_would_see_raw_scores_in_place_of_log_probabilities():
    x, w, b, labels = case(dtype=torch.float32)
    logits = x @ w.T + b
    wrong = (
        -0.9
        * logits.flatten(0, 1)[torch.arange(21), labels.flatten().clamp(min=0)][labels.flatten() != IGNORE_INDEX].sum()
    )
    assert abs(float((wrong - formula(logits, labels, 0.1)).detach())) > 1


def test_without_gradients_only_the_loss_is_worked_out():
    x, w, b, labels = case(dtype=torch.float32)
    with torch.no_grad():
        loss = chunked_cross_entropy(x, w, b, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, chunked_cross_entropy(x, w, b, labels).detach())


def test_a_frozen_table_gets_no_gradient_and_states_do():
    x, w, _, labels = case(dtype=torch.float32)
    chunked_cross_entropy(x, w.detach(), None, labels).backward()
    assert x.grad is not None and w.grad is None


def test_a_tied_table_collects_both_gradients():
    table = torch.randn(11, 8, requires_grad=True)
    ids, labels = torch.randint(11, (2, 5)), torch.randint(11, (2, 5))
    plain = F.cross_entropy((F.embedding(ids, table) @ table.T).flatten(0, 1), labels.flatten(), reduction="sum")
    ours = chunked_cross_entropy(F.embedding(ids, table), table, None, labels)
    torch.testing.assert_close(*(torch.autograd.grad(loss, table)[0] for loss in (ours, plain)), atol=1e-5, rtol=1e-5)


def test_padding_counts_nowhere():
    x, w, b, labels = case(dtype=torch.float32)
    longer = F.pad(labels, (0, 4), value=IGNORE_INDEX)
    padded = F.pad(x, (0, 0, 0, 4), value=7.0)
    torch.testing.assert_close(
        chunked_cross_entropy(padded, w, b, longer, 0.1), chunked_cross_entropy(x, w, b, labels, 0.1)
    )
    assert count_targets(longer) == count_targets(labels) == (labels != IGNORE_INDEX).sum()


def test_nothing_asked_gives_zero_and_zero_gradients():
    x, w, b, labels = case(dtype=torch.float32)
    loss = chunked_cross_entropy(x, w, b, torch.full_like(labels, IGNORE_INDEX))
    loss.backward()
    assert loss == 0 and not w.grad.any() and not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in C", "in torch"])
def test_no_more_than_a_chunk_of_scores_exists(monkeypatch, dtype):
    monkeypatch.setattr(losses, "CHUNK_ROWS", 4)
    seen = []

    def received(real):
        return lambda t, *rest, **more: seen.append(t.shape[0]) or real(t, *rest, **more)

    monkeypatch.setattr(losses.F, "log_softmax", received(F.log_softmax))
    monkeypatch.setattr(losses, "cross_entropy_grad_", received(losses.cross_entropy_grad_))
    x, w, b, labels = case(dtype=dtype)
    chunked_cross_entropy(x, w, b, labels).backward()
    assert max(seen) == 4 and sum(seen) == int(count_targets(labels))


def test_its_gradients_are_given_away_once():
    loss = chunked_cross_entropy(*case(dtype=torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be gone back through once"):
        loss.backward()


def test_a_span_is_two_choices_among_the_places_that_may_be_chosen():
    scores = torch.randn(2, 5, 2)
    starts, ends = torch.tensor([1, 2]), torch.tensor([3, 2])
    keep = torch.tensor([[True] * 5, [True, True, True, False, False]])
    masked = scores.masked_fill(~keep[..., None], -torch.inf)
    wanted = sum(-masked[i, :, s].log_softmax(0)[at[i]] for i in (0, 1) for s, at in ((0, starts), (1, ends))) / 2
    torch.testing.assert_close(span_loss(scores, starts, ends, keep), wanted)


@pytest.mark.parametrize("kind", ["quantized", "LoRA", "LoRA over quantized"])
def test_a_head_with_an_adapter_or_in_few_bits_gives_the_same_in_chunks(kind, monkeypatch):
    """The loss and the log-probabilities, with their gradients; all logits are never there at one time."""
    monkeypatch.setattr(losses, "RECOMPUTED_ROWS", 5)
    monkeypatch.setattr(logprobs, "RECOMPUTED_ROWS", 5)
    model = decoder(48, d_model=32, heads=2, layers=1, d_ff=32, dropout=0.0).build(seed=0)
    if "quantized" in kind:
        quantize(model, "int8", ["head.out"])
    if "LoRA" in kind:
        tune(model, LoRA(r=2, target=("*attn.q", "head.out")))
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(4))
    ids = torch.randint(0, 48, (3, 7), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1).masked_fill(torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.4, -100)
    batch = {"ids": ids, "targets": targets}
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def check(got, want):
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(each, learned.values(), allow_unused=True) for each in (got, want)),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)

    widest = 0

    def keep_widest(module, inputs, output):
        nonlocal widest
        widest = max(widest, output.flatten(0, -2).shape[0])

    hook = model.head.out.register_forward_hook(keep_widest)
    loss, chosen = lm_loss(model, batch, 0.1), target_logprobs(model, batch, 0.7)
    assert widest == 5
    hook.remove()
    check(loss, cross_entropy(model(ids), targets, 0.1))
    log_p = torch.log_softmax(model(ids) / 0.7, -1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    weights = torch.randn(3, 7, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(chosen, log_p.masked_fill(targets == IGNORE_INDEX, 0))
    check((chosen * weights).sum(), (log_p.masked_fill(targets == IGNORE_INDEX, 0) * weights).sum())
