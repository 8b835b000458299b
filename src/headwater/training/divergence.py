"""Divergence: a loss or a gradient norm far above where it started, said once with what to change.

The median of the last steps is compared, so that one odd batch is no divergence.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from headwater.training.records import Progress

WINDOW = 9  # steps whose median is compared
LOSS_FACTOR, LOSS_MARGIN = 1.5, 1.0  # diverged: above factor · first loss + margin (in nats)
NORM_FACTOR = 100.0  # diverged: above factor · max(first norm, 1)
USUAL_LR = 0.1  # above this, AdamW and Muon move every weight by more than it is large


class Warned(NamedTuple):
    text: str
    zh: str


def record(p: Progress, loss: float, norm: float) -> None:
    """Remember the first and the last losses of steps that were applied. The last norms are in p.norms."""
    p.first_loss = loss if p.first_loss is None else p.first_loss
    p.first_norm = norm if p.first_norm is None else p.first_norm
    p.losses = [*p.losses[1 - WINDOW :], loss]


def diverged(p: Progress, lr: float) -> Warned | None:
    """What to say after a step, at most once for the loss and once for the gradient norm. lr: the setting."""
    if p.first_loss is None or p.first_norm is None or len(p.losses) < WINDOW:
        return None
    step, loss, norm = p.step, median(p.losses), median(p.norms[-WINDOW:])
    if "loss" not in p.warned and loss > LOSS_FACTOR * p.first_loss + LOSS_MARGIN:
        p.warned = [*p.warned, "loss", "norm"]  # the norm explodes with the loss: one word is enough
        return Warned(
            f"loss rose from {p.first_loss:.3g} to {loss:.3g} at step {step}: lower --lr (now {lr:g})",
            f"第 {step} 步时损失从 {p.first_loss:.3g} 升到 {loss:.3g}：请调低 --lr（现为 {lr:g}）",
        )
    if "norm" not in p.warned and norm > NORM_FACTOR * max(p.first_norm, 1.0):
        p.warned = [*p.warned, "norm"]
        return Warned(
            f"gradient norm rose from {p.first_norm:.3g} to {norm:.3g} at step {step}: lower --lr (now {lr:g})",
            f"第 {step} 步时梯度范数从 {p.first_norm:.3g} 升到 {norm:.3g}：请调低 --lr（现为 {lr:g}）",
        )
    return None


def lr_warning(method: str, peak: float) -> Warned | None:
    """What to say before training of a learning rate that hardly any model survives. peak: of the schedule."""
    if peak <= USUAL_LR:
        return None
    return Warned(
        f"the learning rate reaches {peak:.2g}, {method} usually takes 1e-4 to 1e-2: the loss will probably diverge; "
        "lower --lr",
        f"学习率将达到 {peak:.2g}，而 {method} 通常取 1e-4 到 1e-2：损失很可能发散；请调低 --lr",
    )
