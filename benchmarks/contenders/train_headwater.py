"""Headwater: its own Trainer, given the work as a source of lessons; every step is the Trainer's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from train_work import Asked, asked, serve

import headwater
from headwater.bench import trainer_step
from headwater.core import FeedForward
from headwater.inspection.costs import meta_model, num_parameters
from headwater.parts import swap


def spec(asked: Asked) -> Any:
    work, p = asked.work, asked.p
    sizes = {"d_model": work.d_model, "heads": work.heads, "layers": work.layers, "d_ff": work.d_ff, "dropout": p}
    sizes["attention_dropout"] = p if "attention" in asked.places else 0.0
    if work.is_encoder_decoder:
        made = headwater.transformer(work.vocab, **sizes)
    else:
        made = headwater.decoder(
            work.vocab, norm_position="pre", activation="gelu", position="learned", max_positions=work.length, **sizes
        )
    inside = p if "ffn" in asked.places else 0.0
    return swap(made, FeedForward, lambda ffn: replace(ffn, dropout=inside))


def main() -> None:
    given = asked()
    made = spec(given)
    serve(trainer_step(made, compile=given.compiled), given.work, given.places, num_parameters(meta_model(made)))


if __name__ == "__main__":
    main()
