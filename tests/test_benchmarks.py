"""Benchmarks run: small ones here, on a model that has learnt nothing, with figures nobody keeps."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from headwater.families.gguf import save_gguf
from headwater.families.hf_folder import LoadedModel
from headwater.families.registry import FAMILIES
from headwater.text.train import train_tokenizer
from headwater.weights.hf_config import HFConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 20, "bpe", vocab_size=300)
    config = {**CONFIG, "vocab_size": len(tokenizer)}
    model = FAMILIES["llama"].read_spec(HFConfig(dict(config)), "language").build(seed=0).eval()
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return save_gguf(LoadedModel(model, tokenizer, config, Path("made"), "language"), path, "Q8_0")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A module of benchmarks/, whose tables are written elsewhere."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side

    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    yield lambda name: __import__(name)
    for name in [n for n, m in sys.modules.items() if str(BENCHMARKS) in str(getattr(m, "__file__", ""))]:
        del sys.modules[name]


def test_a_fresh_process_says_its_first_token(file, bench):
    contender = bench("first_token").fresh("ours", "headwater", str(file), "the cat")
    try:
        contender.start(threads=1)
        assert not contender.missing and contender.facts["output"]
        assert contender.go()
        assert 0 < contender.rounds[0]["seconds"] < 60
    finally:
        contender.stop()


def test_who_says_nothing_is_missing(bench, tmp_path):
    contender = bench("first_token").fresh("ours", "headwater", str(tmp_path / "no.gguf"), "the cat")
    contender.start(threads=1)
    assert "said nothing" in contender.missing


def test_an_engine_is_measured(bench, monkeypatch, tmp_path):
    engine = bench("engine")
    monkeypatch.setattr(engine, "VOCAB", 128)
    monkeypatch.setattr(engine, "SIZES", {**engine.SIZES, "d_model": 96, "heads": 3, "layers": 1, "d_ff": 96})
    small = ["--rounds", "1", "--tokens", "2", "--prompt", "3", "--threads", "1", "--weights", "int8"]
    monkeypatch.setattr("sys.argv", ["engine.py", *small])
    engine.main()
    said = json.loads((tmp_path / "engine.json").read_text())["figures"]["int8"]
    assert said["ratio"] > 0 and said["steps until admitted"] == 1


def test_agreement_counts_what_is_the_same(bench):
    report = {"facts": {"ours": {"tokens": [1, 2, 9, 4]}, "truth": {"tokens": [1, 2, 3, 4]}}}
    text = bench("decode").agreement(report, "truth")
    assert "| ours | 2 of 4 | 3 |" in text and "| truth | 4 of 4 | 4 |" in text
    report = {"facts": {"ours": {"translations": [[1], [2]]}, "truth": {"translations": [[1], [3]]}}}
    assert "| ours | 1 of 2 |" in bench("translate").agreement(report, "truth")


def measured(found: list[float], reference: list[float]) -> dict:
    """A report of two contenders: one twice as fast as the other, with these log-probabilities."""
    figures = {name: {"tokens/s": {"median": n, "low": n, "high": n, "rounds": [n]}} for name, n in SPEEDS.items()}
    facts = {"ours": {"logprobs": {"prefill": found}}, "truth": {"logprobs": {"prefill": reference}}}
    return {"figures": figures, "facts": facts, "missing": {}, "rounds": 1, "threads": 2, "load_verdict": "quiet"}


SPEEDS = {"ours": 2.0, "truth": 1.0}
REFERENCE = [-1.0, -2.0, -0.5, -4.0]


def test_right_answers_have_a_ratio(bench):
    correctness, table = bench("correctness"), bench("side_by_side").table
    report = measured([value + 1e-5 for value in REFERENCE], REFERENCE)
    correctness.judge(report, "truth", {"ours": correctness.EXACT})
    assert report["wrong"] == {} and "| 2.00 |" in table(report, "ours")
    correctness.end_if_wrong(report, "ours")


@pytest.mark.parametrize("found", [[-3.0, -0.1, -7.0, -1.0], [float("nan"), -2.0, -0.5, -4.0]])
def test_wrong_answers_have_no_ratio_and_end_the_run(found: list[float], bench):
    correctness, table = bench("correctness"), bench("side_by_side").table
    report = measured(found, REFERENCE)
    correctness.judge(report, "truth", {})
    text = table(report, "ours")
    assert "2.00" not in text and "ours: no ratio, its answers are wrong: reading is" in text
    with pytest.raises(SystemExit, match="ours: its answers are wrong"):
        correctness.end_if_wrong(report, "ours")


def test_without_a_reference_there_is_no_ratio(bench):
    report = measured(REFERENCE, REFERENCE)
    del report["facts"]["truth"]
    assert "truth was not there to compare with" in bench("correctness").judge(report, "truth", {})
    assert "2.00" not in bench("side_by_side").table(report, "ours")


def test_an_engine_that_is_wrong_is_not_measured(bench, monkeypatch):
    engine = bench("engine")
    monkeypatch.setattr(engine, "VOCAB", 128)
    monkeypatch.setattr(engine, "SIZES", {**engine.SIZES, "d_model": 96, "heads": 3, "layers": 1, "d_ff": 96})
    right = engine.logprobs
    monkeypatch.setattr(
        engine, "logprobs", lambda *given, compiled: [n + compiled * n for n in right(*given, compiled)]
    )
    monkeypatch.setattr("sys.argv", ["engine.py", "--prompt", "3", "--threads", "1", "--weights", "float32"])
    with pytest.raises(SystemExit, match="float32: no ratio, 8 streams are wrong"):
        engine.main()


def test_a_training_step_that_learns_something_else_has_no_ratio(bench):
    steps = bench("train_steps")
    work, good = steps.WORKLOADS["tiny"], [6.9, 6.8]
    report = {"facts": {"headwater": {"losses": good}, "peer": {"losses": [3.0, 2.0]}}}
    assert list(steps.wrong(report, work, good)) == ["peer"]
    assert "without the C kernels [6.9, 6.7]" in steps.wrong(report, work, [6.9, 6.7])["headwater"]


def test_rounding_beside_llama_cpp_is_compared_window_by_window(bench):
    bits = bench("bits")
    losses, kl = [2.0, 3.0, 2.5, 2.2], [0.002, 0.003, 0.0025, 0.0022]
    farther = [d + 0.0001 + 0.00001 * i for i, d in enumerate(kl)]

    def report(ours: list[float]):
        both = {"headwater": ours, "llama.cpp": kl}
        rounded = {
            who: {way: bits.Rounded([n + 0.01 for n in losses], d) for way in (bits.WRITES, bits.READS)}
            for who, d in both.items()
        }
        return {"file": bits.File(losses, rounded)}

    assert bits.costs_more(report(kl)) == []
    assert len(bits.costs_more(report(farther))) == 2
    assert "+1.01%" in bits.format_beside(report(kl)) and "0.00243" in bits.format_beside(report(kl))


def test_shares_of_a_step_are_all_of_it(bench):
    found, took = bench("shares").shares("tiny", "residual", steps=2)
    assert sum(found.values()) == pytest.approx(1.0)
    assert found["matrix products"] > 0.05 and found["attention"] > 0 and found["softmax and loss"] > 0
    assert 0 < took["at the peak"] < took["a step"]


def undeclared_arguments(source: str) -> set[str]:
    """Attributes of args that no add_argument() of the file declares."""
    declared = {"func"}
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [ast.literal_eval(each) for each in node.args if isinstance(each, ast.Constant)]
            declared |= {name.lstrip("-").replace("-", "_") for name in names}
            if not names:  # a name from a table: any may be meant
                return set()
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args":
            used.add(node.attr)
    return used - declared


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_reads_only_arguments_that_it_declares(path):
    assert undeclared_arguments(path.read_text(encoding="utf-8")) == set()


def test_an_undeclared_argument_would_be_seen():
    assert undeclared_arguments("p.add_argument('--only')\nprint(args.only, args.laws)") == {"laws"}
