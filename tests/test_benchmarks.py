"""Benchmarks: each runs on a small untrained model, and wrong outputs get no ratio."""

from __future__ import annotations

import ast
import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

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
    return save_gguf(LoadedModel(model, tokenizer, config, Path("memory"), "language"), path, "Q8_0")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A function that imports a module of benchmarks/; results are written to a temporary directory."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side

    monkeypatch.setattr(side_by_side, "RESULTS", tmp_path)
    yield lambda name: __import__(name)
    for name in [n for n, m in sys.modules.items() if str(BENCHMARKS) in str(getattr(m, "__file__", ""))]:
        del sys.modules[name]


def test_a_fresh_process_reports_its_first_token(file, bench):
    contender = bench("first_token").fresh_process("ours", "headwater", str(file), "the cat")
    try:
        contender.start(threads=1)
        assert not contender.missing and contender.facts["output"]
        assert contender.run_round()
        assert 0 < contender.rounds[0]["seconds"] < 60
    finally:
        contender.stop()


def test_a_contender_without_output_is_missing(bench, tmp_path):
    contender = bench("first_token").fresh_process("ours", "headwater", str(tmp_path / "no.gguf"), "the cat")
    contender.start(threads=1)
    assert "printed nothing" in contender.missing


def test_the_engine_benchmark_reports_its_ratio(bench, monkeypatch, tmp_path):
    engine = bench("engine")
    monkeypatch.setattr(engine, "VOCAB", 128)
    monkeypatch.setattr(engine, "SIZES", {**engine.SIZES, "d_model": 96, "heads": 3, "layers": 1, "d_ff": 96})
    small = ["--rounds", "1", "--tokens", "2", "--prompt", "3", "--threads", "1", "--weights", "int8"]
    monkeypatch.setattr("sys.argv", ["engine.py", *small])
    engine.main()
    report = json.loads((tmp_path / "engine.json").read_text())["figures"]["int8"]
    assert report["ratio"] > 0 and report["steps_until_admitted"] == 1


def test_agreement_counts_equal_tokens_and_translations(bench):
    report = {"facts": {"ours": {"tokens": [1, 2, 9, 4]}, "reference": {"tokens": [1, 2, 3, 4]}}}
    text = bench("decode").agreement(report, "reference")
    assert "| ours | 2 of 4 | 3 |" in text and "| reference | 4 of 4 | 4 |" in text
    report = {"facts": {"ours": {"translations": [[1], [2]]}, "reference": {"translations": [[1], [3]]}}}
    assert "| ours | 1 of 2 |" in bench("translate").agreement(report, "reference")


def build_report(logprobs: list[float], reference: list[float]) -> dict:
    """A report of two contenders: one twice as fast as the other, with these log-probabilities."""
    figures = {name: {"tokens/s": {"median": n, "low": n, "high": n, "rounds": [n]}} for name, n in SPEEDS.items()}
    facts = {"ours": {"logprobs": {"prefill": logprobs}}, "reference": {"logprobs": {"prefill": reference}}}
    return {"figures": figures, "facts": facts, "missing": {}, "rounds": 1, "threads": 2, "load_verdict": "quiet"}


SPEEDS = {"ours": 2.0, "reference": 1.0}
REFERENCE = [-1.0, -2.0, -0.5, -4.0]


def test_correct_outputs_have_a_ratio(bench):
    correctness, table = bench("correctness"), bench("side_by_side").table
    report = build_report([value + 1e-5 for value in REFERENCE], REFERENCE)
    correctness.judge(report, "reference", {"ours": correctness.EXACT})
    assert report["wrong"] == {} and "| 2.00 |" in table(report, "ours")
    correctness.end_if_wrong(report, "ours")


@pytest.mark.parametrize("logprobs", [[-3.0, -0.1, -7.0, -1.0], [float("nan"), -2.0, -0.5, -4.0]])
def test_wrong_outputs_have_no_ratio_and_fail_the_run(logprobs: list[float], bench):
    correctness, table = bench("correctness"), bench("side_by_side").table
    report = build_report(logprobs, REFERENCE)
    correctness.judge(report, "reference", {})
    text = table(report, "ours")
    assert "2.00" not in text and "ours: no ratio, its outputs are wrong: prefill is" in text
    with pytest.raises(SystemExit, match="ours: its outputs are wrong"):
        correctness.end_if_wrong(report, "ours")


def test_without_a_reference_there_is_no_ratio(bench):
    report = build_report(REFERENCE, REFERENCE)
    del report["facts"]["reference"]
    assert "reference is missing, nothing to compare with" in bench("correctness").judge(report, "reference", {})
    assert "2.00" not in bench("side_by_side").table(report, "ours")


def test_an_engine_with_wrong_outputs_is_not_timed(bench, monkeypatch):
    engine = bench("engine")
    monkeypatch.setattr(engine, "VOCAB", 128)
    monkeypatch.setattr(engine, "SIZES", {**engine.SIZES, "d_model": 96, "heads": 3, "layers": 1, "d_ff": 96})
    correct_logprobs = engine.logprobs

    def wrong_logprobs(*args, compiled: bool) -> list[float]:
        return [n + compiled * n for n in correct_logprobs(*args, compiled)]

    monkeypatch.setattr(engine, "logprobs", wrong_logprobs)
    monkeypatch.setattr("sys.argv", ["engine.py", "--prompt", "3", "--threads", "1", "--weights", "float32"])
    with pytest.raises(SystemExit, match="float32: no ratio, 8 streams are wrong"):
        engine.main()


def test_a_training_step_with_wrong_losses_has_no_ratio(bench):
    steps = bench("train_steps")
    workload = steps.WORKLOADS["tiny"]
    losses = [6.9, 6.8]
    report = {"facts": {"headwater": {"losses": losses}, "peer": {"losses": [3.0, 2.0]}}}
    assert list(steps.wrong(report, workload, losses)) == ["peer"]
    assert "without the C kernels [6.9, 6.7]" in steps.wrong(report, workload, [6.9, 6.7])["headwater"]


def test_quantization_error_is_compared_with_llama_cpp_window_by_window(bench):
    benchmark = bench("quantization_error")
    losses = [2.0, 3.0, 2.5, 2.2]
    kl = [0.002, 0.003, 0.0025, 0.0022]
    larger_kl = [d + 0.0001 + 0.00001 * i for i, d in enumerate(kl)]

    def report(ours: list[float]):
        kl_by_contender = {"headwater": ours, "llama.cpp": kl}
        rounded = {
            contender: {
                mode: benchmark.Rounded([n + 0.01 for n in losses], values)
                for mode in (benchmark.DECODE, benchmark.PREFILL)
            }
            for contender, values in kl_by_contender.items()
        }
        return {"file": benchmark.File(losses, rounded)}

    assert benchmark.larger_errors(report(kl)) == []
    assert len(benchmark.larger_errors(report(larger_kl))) == 2
    table = benchmark.format_comparison(report(kl))
    assert "+1.01%" in table
    assert "0.00243" in table


def test_the_fractions_of_a_step_sum_to_one(bench):
    fractions, milliseconds = bench("step_profile").step_profile("tiny", "residual", steps=2)
    assert sum(fractions.values()) == pytest.approx(1.0)
    assert fractions["matrix products"] > 0.05
    assert fractions["attention"] > 0
    assert fractions["softmax and loss"] > 0
    assert 0 < milliseconds["matmul_at_peak"] < milliseconds["step"]


def test_training_in_turns_prints_nothing_but_json(bench, tmp_path):
    """stdout is the protocol of a contender: the plan of headwater.train must not appear in it."""
    train_text = bench("train_text")
    for name in ("train", "valid"):
        for side in ("en", "de"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{name} {n}\n" for n in range(70)), encoding="utf-8")
    tokens = train_text.train_common_tokenizer(tmp_path, 300)
    contender = train_text.Contender("ours", "text_headwater.py", (str(tmp_path), str(tokens)))
    try:
        contender.start(threads=1)
        assert contender.facts["rows"] == 70
        assert contender.run_round("0.01")
        assert contender.rounds[0]["tokens"] > 0
    finally:
        contender.stop()


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


OURS = [
    "window 256",
    "longformer 256",
    "bigbird",
    "linear, causal",
    "linear",
    "performer, causal",
    "performer",
    "linformer",
    "lsh, 2 rounds",
    "longt5 local",
]


@pytest.mark.parametrize("name", OURS)
def test_an_attention_that_is_timed_is_its_formula(name, bench, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "contenders"))
    attentions = bench("long_attentions")
    inputs = attentions.Inputs.draw(768, needs_grad=False)
    run, reference = attentions.BUILDERS[name](inputs)
    with torch.no_grad():
        rows = run().view(768, attentions.HEADS, attentions.WIDTH)
    for row in (0, 300, 767):
        torch.testing.assert_close(rows[row].double(), reference(row), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(rows[300].double(), reference(299), rtol=1e-2)


def test_a_crossover_lies_where_both_take_equally_long(bench):
    long = bench("long")
    points = {}
    for n, full, window in ((1024, 1.0, 2.0), (2048, 4.0, 4.0), (4096, 16.0, 8.0)):
        points["full, causal", n, "forward"] = {"seconds": full}
        points["window 256", n, "forward"] = {"seconds": window}
    lengths = [1024, 2048, 4096]
    assert long.crossover(points, "window 256", lengths[:1], "forward", "seconds") == "above 1,024"
    assert long.crossover(points, "window 256", [1024, 4096], "forward", "seconds") == "2,048"
    assert long.crossover(points, "window 256", [4096], "forward", "seconds") == "below 4,096"
    points["window 256", 4096, "forward"]["wrong"] = "its output is wrong"
    assert long.ratio(points, "window 256", "full, causal", 4096, "forward", "seconds") is None


def test_recall_has_its_answers_in_its_tokens(bench):
    """The value of each question is the token type of the one token behind the questions that has its id."""
    quality = bench("long_quality")
    rows = quality.TASKS["recall"].draw(5, 256, torch.Generator().manual_seed(0))
    again = quality.TASKS["recall"].draw(5, 256, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
    assert (rows.labels >= 0).sum(1).tolist() == [quality.QUESTIONS] * 5
    for ids, labels, types in zip(*rows, strict=True):
        for question in range(quality.QUESTIONS):
            (place,) = (ids[quality.QUESTIONS :] == ids[question]).nonzero()[:, 0] + quality.QUESTIONS
            assert types[question] == 0 and types[place] - 1 == labels[question]


def test_an_expression_of_listops_is_computed(bench):
    quality = bench("long_quality")
    ids, labels, _types = quality.TASKS["listops"].draw(20, 64, torch.Generator().manual_seed(0))
    for row, values in zip(ids, labels, strict=True):
        words = [quality.WORDS[i] for i in row if i]
        assert value(words) == values[0] and 16 <= len(words) <= 64
        assert [word.startswith("[") for word in words] == (values[: len(words)] >= 0).tolist()
    assert value(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"]) == 9
    assert value(["[SM", "8", "7", "[MED", "1", "5", "9", "]", "]"]) == 0


def value(words):
    """The value of an expression, with a stack of operators and their arguments."""
    compute = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}
    stack = [[]]
    for word in words:
        if word in compute:
            stack.append([word])
        elif word == "]":
            operator, *numbers = stack.pop()
            stack[-1].append(compute[operator](numbers))
        else:
            stack[-1].append(int(word))
    return stack[0][0]
