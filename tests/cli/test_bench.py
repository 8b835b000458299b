"""The small bench: it measures what it says, tells a busy machine, and our step learns as the plain one does."""

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
def test_both_steps_learn_the_same_batch(make, work):
    torch.manual_seed(0)
    step, given = make(work), work.random_batch()
    losses = [step(given) for _ in range(60)]
    assert losses[-1] < losses[0] - 0.01


def test_the_operations_are_those_show_counts():
    from headwater.core import transformer
    from headwater.inspection.costs import count

    work = bench.WORKLOADS["small"]
    spec = transformer(work.vocab, d_model=work.d_model, heads=work.heads, layers=work.layers, d_ff=work.d_ff)
    shown = count(spec, work.batch_size, work.seq_length).flops["training"] * work.batch_size * work.seq_length
    assert work.flops_per_step == pytest.approx(shown, rel=0.05)


def test_contenders_take_turns():
    order = []
    times = bench.time_interleaved({name: lambda given, name=name: order.append(name) for name in "ab"}, TINY, 3)
    assert order == ["a", "b"] * 5 and [len(t) for t in times.values()] == [3, 3]


def test_a_busy_machine_is_reported(monkeypatch):
    result = {"rounds": 3, "threads": 1, "other_load": 0.4, "quiet": False}
    assert "do not trust" in verdict(result) and "40%" in verdict(result)
    assert "quiet" in verdict({**result, "other_load": 0.0, "quiet": True})
    assert "does not tell" in verdict({**result, "other_load": None, "quiet": None})
    monkeypatch.setattr(
        bench, "busy_cpu_seconds", iter([100.0, 103.0]).__next__
    )  # planted: three seconds of other work
    watch = bench.LoadMonitor()
    time.sleep(0.05)
    assert watch.other_load() > 1


def test_bench_writes_what_it_prints(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.WORKLOADS, "small", TINY)
    assert cli.main(["bench", "--work", "small", "--rounds", "2", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "torch.nn.Transformer ms" in said and said == (tmp_path / "bench.md").read_text()
    result = json.loads((tmp_path / "bench.json").read_text())
    assert set(result["training"]) == {"small"} and result["limits"]["matmul fp32 GFLOP/s"] > 0


@pytest.mark.parametrize(
    ("words", "said"), [(["--work", "smal"], "did you mean 'small'"), (["--rounds", "0"], "--rounds of 1")]
)
def test_mistakes_are_named(words, said, capsys):
    assert cli.main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_our_step_is_no_slower_than_torchs_own():
    """A guard against regressions, not a measurement: processor time, and three tries, for machines are noisy."""
    work, ratios = bench.WORKLOADS["small"], []
    for _ in range(3):
        made = {"ours": bench.headwater_step(work), "theirs": bench.torch_step(work)}
        spent = dict.fromkeys(made, 0.0)
        timed = {name: _counted(step, name, spent) for name, step in made.items()}
        bench.time_interleaved(timed, work, 15)
        ratios.append(spent["theirs"] / spent["ours"])
        if ratios[-1] >= 1.0:
            return
    pytest.fail(f"our training step must not be slower than torch.nn.Transformer's; ratios {ratios}")


def _counted(step, name, spent):
    def run(given):
        began = time.process_time()
        step(given)
        spent[name] += time.process_time() - began

    return run
