"""Divergence: a loss or a gradient norm far above where it started, said once with what to change.

The median of the last steps is compared, so that one odd batch is no divergence.
"""

from __future__ import annotations

from statistics import median

from headwater.training.records import Progress

WINDOW = 9  # steps whose median is compared
LOSS_FACTOR, LOSS_MARGIN = 1.5, 1.0  # diverged: above factor · first loss + margin (in nats)
NORM_FACTOR = 100.0  # diverged: above factor · max(first norm, 1)
USUAL_LR = 0.1  # above this, AdamW and Muon move every weight by more than it is large


def record(p: Progress, loss: float, norm: float) -> None:
    """Remember the first and the last losses of steps that were applied. The last norms are in p.norms."""
    p.first_loss = loss if p.first_loss is None else p.first_loss
    p.first_norm = norm if p.first_norm is None else p.first_norm
    p.losses = [*p.losses[1 - WINDOW :], loss]


def diverged(p: Progress, lr: float) -> str:
    """What to say after a step, at most once for the loss and once for the gradient norm. lr: the setting."""
    if p.first_loss is None or p.first_norm is None or len(p.losses) < WINDOW:
        return ""
    step, loss, norm = p.step, median(p.losses), median(p.norms[-WINDOW:])
    if "loss" not in p.warned and loss > LOSS_FACTOR * p.first_loss + LOSS_MARGIN:
        p.warned = [*p.warned, "loss", "norm"]  # the norm explodes with the loss: one word is enough
        return f"loss rose from {p.first_loss:.3g} to {loss:.3g} at step {step}: lower --lr (now {lr:g})"
    if "norm" not in p.warned and norm > NORM_FACTOR * max(p.first_norm, 1.0):
        p.warned = [*p.warned, "norm"]
        return f"gradient norm rose from {p.first_norm:.3g} to {norm:.3g} at step {step}: lower --lr (now {lr:g})"
    return ""


def lr_warning(method: str, peak: float) -> str:
    """What to say before training of a learning rate that hardly any model survives. peak: of the schedule."""
    if peak <= USUAL_LR:
        return ""
    return (
        f"the learning rate reaches {peak:.2g}, {method} usually takes 1e-4 to 1e-2: the loss will probably diverge; "
        "lower --lr"
    )
