"""headwater bench: its FLOPs, its load monitor and its output; both training steps learn the batch."""

from __future__ import annotations

import json
import time

import pytest
import torch

from headwater import bench, cli
from headwater.cli.bench import verdict

TINY = bench.Workload(32, 2, 1, 64, 50, 2, 8, is_encoder_decoder=True)
TINY_GPT = TINY._replace(is_encoder_decoder=False)


@pytest.mark.parametrize("work", [TINY, TINY_GPT], ids=["two stacks", "one"])
@pytest.mark.parametrize("make", [bench.headwater_step, bench.torch_step], ids=["ours", "theirs"])
def test_both_steps_reduce_the_loss(make, work):
    torch.manual_seed(0)
    step, batch = make(work), work.random_batch()
    losses = [step(batch) for _ in range(60)]
    assert losses[-1] < losses[0] - 0.01


def test_flops_equal_those_of_count():
    from headwater.families.builders import transformer
    from headwater.inspection.costs import count

    work = bench.WORKLOADS["small"]
    spec = transformer(work.vocab, d_model=work.d_model, heads=work.heads, layers=work.layers, d_ff=work.d_ff)
    expected = count(spec, work.batch_size, work.seq_length).flops["training"] * work.batch_size * work.seq_length
    assert work.flops_per_step == pytest.approx(expected, rel=0.05)


def test_contenders_take_turns():
    order = []
    times = bench.time_interleaved({name: lambda batch, name=name: order.append(name) for name in "ab"}, TINY, 3)
    assert order == ["a", "b"] * 5 and [len(t) for t in times.values()] == [3, 3]


def test_a_busy_machine_is_reported(monkeypatch):
    result = {"rounds": 3, "threads": 1, "other_load": 0.4, "quiet": False}
    assert "do not trust" in verdict(result) and "40%" in verdict(result)
    assert "quiet" in verdict({**result, "other_load": 0.0, "quiet": True})
    assert "unknown on this system" in verdict({**result, "other_load": None, "quiet": None})
    monkeypatch.setattr(
        bench, "busy_cpu_seconds", iter([100.0, 103.0]).__next__
    )  # planted: three seconds of other work
    monitor = bench.LoadMonitor()
    time.sleep(0.05)
    assert monitor.other_load() > 1


def test_bench_writes_what_it_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.WORKLOADS, "small", TINY)
    assert cli.main(["bench", "--workload", "small", "--rounds", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "torch.nn.Transformer ms" in printed and printed == (tmp_path / "bench.md").read_text()
    result = json.loads((tmp_path / "bench.json").read_text())
    assert set(result["training"]) == {"small"} and result["limits"]["matmul fp32 GFLOP/s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--workload", "smal"], "did you mean 'small'"), (["--rounds", "0"], "--rounds must be at least 1")],
)
def test_invalid_arguments_are_reported(words, message, capsys):
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_step_is_not_slower_than_that_of_torch():
    """A guard against regressions, not a measurement: CPU time, and three tries, because machines are noisy."""
    work, ratios = bench.WORKLOADS["small"], []
    for _ in range(3):
        steps = {"ours": bench.headwater_step(work), "theirs": bench.torch_step(work)}
        cpu_seconds = dict.fromkeys(steps, 0.0)
        timed = {name: _counted(step, name, cpu_seconds) for name, step in steps.items()}
        bench.time_interleaved(timed, work, 15)
        ratios.append(cpu_seconds["theirs"] / cpu_seconds["ours"])
        if ratios[-1] >= 1.0:
            return
    pytest.fail(f"our training step must not be slower than torch.nn.Transformer's; ratios {ratios}")


def _counted(step, name, cpu_seconds):
    def run(batch):
        start = time.process_time()
        step(batch)
        cpu_seconds[name] += time.process_time() - start

    return run
