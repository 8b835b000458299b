"""Peak memory of training steps of transformers' Marian, with the plain training step."""

from __future__ import annotations

from memory_workload import measure
from train_transformers import seq2seq
from train_workload import parse_options, plain_step

if __name__ == "__main__":
    options = parse_options()

    def build_step():
        model = seq2seq(options.kind or "marian", options).train()
        return plain_step(
            model, lambda batch: model(input_ids=batch.source, decoder_input_ids=batch.ids, labels=batch.targets).loss
        )

    measure(build_step, options.workload)
