"""Training on text with transformers: Seq2SeqTrainer with its data collator, a Marian of the same size."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from plain_translator import BOS, EOS, PAD, pairs
from quality_workload import Turns
from tokenizers import Tokenizer
from train_transformers import seq2seq
from train_workload import DROPOUT_SITES, TrainOptions, Workload, count


class Counting(transformers.DataCollatorForSeq2Seq):
    """A data collator that counts real tokens without special tokens."""

    tokens = 0

    def __call__(self, features: list[dict[str, Any]], *args: Any) -> Any:
        self.tokens += sum(len(row["input_ids"]) + len(row["labels"]) - 3 for row in features)
        return super().__call__(features, *args)


class Paused(transformers.TrainerCallback):
    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turns.after_step(state.global_step)


def main() -> None:
    folder = Path(sys.argv[1])
    backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = [{"input_ids": [BOS, *source, EOS], "attention_mask": [1] * (len(source) + 2), "labels": [*target, EOS]}
            for source, target in pairs(folder, "train", backend)]  # fmt: skip
    work = Workload(256, 4, 3, 1024, backend.get_vocab_size(), 64, 512, is_encoder_decoder=True)
    model = seq2seq("marian", TrainOptions(work, 0.1, DROPOUT_SITES["residual"], False, ""))
    model.config.pad_token_id, model.config.decoder_start_token_id, model.config.eos_token_id = PAD, BOS, EOS
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    collator = Counting(tokenizer, model=model)
    with tempfile.TemporaryDirectory() as out:
        settings = transformers.Seq2SeqTrainingArguments(
            out, per_device_train_batch_size=64, max_steps=10**6, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, learning_rate=3e-4, seed=0)  # fmt: skip
        turns = Turns(lambda last: {"tokens": collator.tokens})
        trainer = transformers.Seq2SeqTrainer(
            model, settings, data_collator=collator, train_dataset=rows, callbacks=[Paused(turns)]
        )
        turns.ready(parameters=count(model), rows=len(rows))
        trainer.train()


if __name__ == "__main__":
    main()
