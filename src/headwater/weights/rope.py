"""Rotary settings of a config.json, in both published generations.

old    "rope_theta": 500000.0, "rope_scaling": {"rope_type" or "type": "llama3", "factor": 8.0, ...}
new    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.weights.settings import Settings

# What each kind of scaling is told: needed numbers, then optional ones.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": ((), ("factor", "attention_factor", "original_max_position_embeddings")),
}


@dataclass(frozen=True)
class Rope:
    """theta, the part of each head that turns, and the scaling: its kind and its numbers as given."""

    theta: float
    partial: float = 1.0
    kind: str = "default"
    numbers: tuple[tuple[str, float], ...] = ()
    short: tuple[float, ...] = ()  # longrope's factors per dimension, up to the trained length and beyond it
    long: tuple[float, ...] = ()


def read_rope(c: Settings, theta: float = 10_000.0, partial: float = 1.0, layer_kind: str = "") -> Rope:
    """The rotary settings, with a family's defaults; `layer_kind` picks one of several (Gemma 3: "full_attention")."""
    new = c.part("rope_parameters")
    if layer_kind and layer_kind in new:
        new = new.part(layer_kind)
    old = c.part("rope_scaling")
    theta = c.number("rope_theta", "rotary_emb_base", default=theta)
    partial = c.number("partial_rotary_factor", "rotary_pct", most=1.0, default=partial)
    theta = new.number("rope_theta", default=theta)
    partial = new.number("partial_rotary_factor", most=1.0, default=partial)
    told = new if "rope_type" in new or "factor" in new else old
    kind = told.word("rope_type", "type", known=KINDS, default="default")
    needed, optional = KINDS[kind]
    numbers = [(name, told.number(name)) for name in needed] + [
        (name, told.number(name)) for name in optional if name in told
    ]
    told.read_by_now("rope_theta", "truncate")
    short, long = (tuple(told.items(f"{side}_factor", float, [])) for side in ("short", "long"))
    return Rope(theta, partial, kind, tuple(numbers), short, long)
