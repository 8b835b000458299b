"""The same in transformers: Marian, with the plain step."""

from __future__ import annotations

from memory_work import measured
from train_transformers import seq2seq
from train_work import asked, plain_step

if __name__ == "__main__":
    given = asked()

    def made():
        model = seq2seq(given.kind or "marian", given).train()
        return plain_step(
            model, lambda batch: model(input_ids=batch.source, decoder_input_ids=batch.ids, labels=batch.targets).loss
        )

    measured(made, given.work)
