"""Headwater: the training step of its Trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from train_workload import TrainOptions, parse_options, serve

import headwater
from headwater.bench import trainer_step
from headwater.core import FeedForward
from headwater.inspection.costs import meta_model, num_parameters
from headwater.parts import swap


def spec(options: TrainOptions) -> Any:
    work, p = options.workload, options.p
    sizes = {"d_model": work.d_model, "heads": work.heads, "layers": work.layers, "d_ff": work.d_ff, "dropout": p}
    sizes["attention_dropout"] = p if "attention" in options.dropout_sites else 0.0
    if work.is_encoder_decoder:
        model_spec = headwater.transformer(work.vocab, **sizes)
    else:
        model_spec = headwater.decoder(
            work.vocab, norm_position="pre", activation="gelu", position="learned", max_positions=work.length, **sizes
        )
    ffn_dropout = p if "ffn" in options.dropout_sites else 0.0
    return swap(model_spec, FeedForward, lambda ffn: replace(ffn, dropout=ffn_dropout))


def main() -> None:
    options = parse_options()
    model_spec = spec(options)
    serve(
        trainer_step(model_spec, compile=options.compiled),
        options.workload,
        options.dropout_sites,
        num_parameters(meta_model(model_spec)),
    )


if __name__ == "__main__":
    main()
