"""Training on long text in segments: rows continue, the memory is in the checkpoint, resumed = uninterrupted."""

from __future__ import annotations

import numpy as np
import pytest

import headwater
from headwater.data.collate import SpecialTokens
from headwater.errors import BadSetting
from headwater.tasks.segments import SegmentDataset
from headwater.training.run_dir import RunDir
from headwater.training.state import StepEvent

SIZES = {
    "layers": 2, "d_model": 16, "heads": 2, "d_ff": 16, "context_length": 16, "tokenizer": "char", "dropout": 0.1,
    "objective": "segments", "attention": "xl:memory=24", "batch_tokens": 64, "max_steps": 12, "log_every": 1,
    "eval_every": 6, "checkpoint_steps": 4,
}  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(120)))
    return path


def dataset(tokens=101, context=5, rows=3):
    return SegmentDataset(np.arange(tokens), context, SpecialTokens(0, 1, 2), rows * context, seed=0)


def test_rows_continue_those_of_the_batch_before():
    data = dataset()
    read: list[list[int]] = [[], [], []]
    for batch, _step in zip(data.batches_from(0), range(data.num_segments), strict=False):
        arrays = data.collate(batch.indices, batch.epoch)
        assert (arrays.targets == arrays.ids + 1).all(), "the stream counts, so the next token is one more"
        for row, ids in zip(read, arrays.ids.tolist(), strict=True):
            row += ids
    for row, ids in enumerate(read):
        start = row * data.row_length
        assert ids == list(range(start, start + data.num_segments * 5))


def test_a_position_gives_the_batches_of_an_uninterrupted_run():
    data = dataset()
    batches = [batch for batch, _step in zip(data.batches_from(0), range(15), strict=False)]
    assert {batch.epoch for batch in batches} == {0, 1, 2}
    later = [batch for batch, _step in zip(data.batches_from(batches[7].start), range(8), strict=False)]
    assert all(np.array_equal(a.indices, b.indices) for a, b in zip(batches[7:], later, strict=True))
    assert [(b.epoch, b.start) for b in batches[7:]] == [(b.epoch, b.start) for b in later]


def losses(folder):
    return [line["loss"] for line in RunDir.open(folder).read_log("metrics.jsonl") if line.get("split") == "train"]


def stop_at(step):
    def listener(event):
        if isinstance(event, StepEvent) and event.step == step:
            raise KeyboardInterrupt

    return listener


def test_a_resumed_run_is_the_run_that_never_stopped(text, tmp_path, monkeypatch):
    headwater.train(text, out=tmp_path / "whole", **SIZES)
    for folder in ("cut", "forgetful"):
        with pytest.raises(KeyboardInterrupt):
            headwater.train(text, out=tmp_path / folder, callbacks=[stop_at(7)], **SIZES)
    headwater.resume(tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    monkeypatch.setattr(SegmentDataset, "load_state_arrays", lambda self, arrays: self.memories.clear())
    headwater.resume(tmp_path / "forgetful")
    assert losses(tmp_path / "forgetful") != losses(tmp_path / "whole"), "a lost memory would be seen"


def test_micro_batches_have_memories_of_their_own(text, tmp_path):
    headwater.train(text, out=tmp_path / "one", **{**SIZES, "dropout": 0.0})
    headwater.train(text, out=tmp_path / "two", micro_batch_tokens=32, **{**SIZES, "dropout": 0.0})
    np.testing.assert_allclose(losses(tmp_path / "one"), losses(tmp_path / "two"), rtol=1e-4)


def test_a_model_without_memory_is_refused(text, tmp_path):
    with pytest.raises(BadSetting, match="attention full has none; use --attention xl:memory=256"):
        headwater.train(text, out=tmp_path / "run", **{**SIZES, "attention": "full"})
