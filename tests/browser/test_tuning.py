"""Tuned runs on the page: what an adapter changed, token by token, and the curves of preferences and rewards."""

from __future__ import annotations

import json
import os

import pytest
import torch

import headwater
from headwater.serving.model_store import StoredModel

TEXT = "".join(f"the {a} {b} sees a {c}.\n" for a in ("old", "red", "big") for b in ("cat", "dog") for c in "abcdefg")
SETTINGS = {"batch_tokens": 200, "max_steps": 4, "eval_every": 2, "eval_examples": 4, "log_every": 1, "quiet": True,
            "checkpoint_steps": 2, "lr": 1e-2}  # fmt: skip
ROLLOUTS = {"rollouts": 4, "minibatch": 4, "ppo_epochs": 1, "answer_tokens": 8}
INPUT = "the old cat sees"
RUNS = ("base", "lora", "dpo", "ppo")

READ = """() => Object.fromEntries([...document.querySelectorAll("[data-metric]")].map(figure => {
    const chart = figure.querySelector("svg.chart"), ticks = [...chart.querySelectorAll("[data-tick]")].slice(-2);
    const [[a, pa], [b, pb]] = ticks.map(n => [Number(n.dataset.tick), Number(n.getAttribute("y"))]);
    const ends = path => path.getAttribute("d").slice(1).split("L").map(p => Number(p.split(",")[1]));
    const curves = [...chart.querySelectorAll("path")].map(path =>
        [path.dataset.curve, ends(path).map(p => a + (p - pa) * (b - a) / (pb - pa))]);
    return [figure.dataset.metric, Object.fromEntries(curves)];
}))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, and runs of LoRA on its text, on preferences and on rewards."""
    root = tmp_path_factory.mktemp("tuned")
    (root / "text.txt").write_text(TEXT * 6)
    animals = [{"prompt": f"the {a}", "chosen": f" cat sees {c}.", "rejected": f" dog sees {c}."}
               for a in ("old", "red", "big") for c in "abcdefg"]  # fmt: skip
    for name, rows in (("pairs", animals), ("prompts", [{"prompt": row["prompt"]} for row in animals])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(
        "def vowels(completions):\n    return [float(c.count('e')) for c in completions]\n"
    )
    tuned = {"init_from": root / "base", "tune": "lora", "chat_template": "none", **SETTINGS}
    small = {"d_model": 32, "heads": 2, "layers": 2, "d_ff": 64, "context_length": 32, "tokenizer": "char"}
    text = {"task": "language-model", **SETTINGS}
    headwater.train(root / "text.txt", out=root / "base", **small, **text)
    headwater.train(root / "text.txt", out=root / "lora", init_from=root / "base", tune="lora", **text)
    headwater.train(root / "pairs.jsonl", out=root / "dpo", **tuned)
    reward = f"{root}/rewards.py:vowels"
    headwater.train(root / "prompts.jsonl", out=root / "ppo", task="ppo", reward=reward, **ROLLOUTS, **tuned)
    return root


@pytest.fixture(scope="module")
def tuned_address(runs, start_server):
    with start_server([StoredModel(name, "run", runs / name) for name in RUNS]) as address:
        yield address


@pytest.fixture
def open_page(visit, tuned_address):
    def make(**options):
        one = visit(**options)
        one.address = tuned_address
        return one

    return make


@torch.no_grad()
def token_logprobs(folder):
    """ln p of each token of INPUT after those before it."""
    loaded = headwater.load(folder)
    ids = torch.tensor([loaded.tokenizer.encode(INPUT, add_special_tokens=False)])
    logprobs = loaded.model(ids[:, :-1]).log_softmax(-1)
    return logprobs.gather(2, ids[:, 1:, None])[0, :, 0]


def test_a_tuned_run_is_compared_with_its_base_token_by_token(open_page, runs):
    page = open_page().go("compare", model="lora@base", text=INPUT)
    page.wait_for_selector(".token-changes")
    assert page.locator("select[aria-label='compared with']").input_value() == "lora"
    shown = [x for x in json.loads(page.get_attribute(".token-changes", "data-changes")) if x is not None]
    want = token_logprobs(runs / "lora") - token_logprobs(runs / "base")
    assert want.abs().max() > 0.05
    assert shown == pytest.approx(want.tolist(), abs=1e-3)
    assert 0 < page.locator("table.changes tbody tr").count() <= 8

    page.click("#swap")
    page.wait_for_function("() => location.hash.includes('model=lora&')")
    page.wait_for_selector("[aria-busy=true]", state="detached")
    page.wait_for_selector(".token-changes")
    back = [x for x in json.loads(page.get_attribute(".token-changes", "data-changes")) if x is not None]
    assert back == pytest.approx([-x for x in shown], abs=1e-6)


@pytest.mark.parametrize(
    ("run", "metrics"),
    [
        ("dpo", ("margin", "accuracy", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")),
        ("ppo", ("reward", "kl", "ended", "length", "clipped")),
    ],
)
def test_the_curves_of_feedback_are_what_was_measured(open_page, runs, run, metrics):
    page = open_page().go("training", run=run)
    page.wait_for_selector("[data-metric] svg")
    drawn = page.evaluate(READ)
    lines = [json.loads(line) for line in (runs / run / "metrics.jsonl").read_text().splitlines()]
    for name in metrics:
        (group,) = (group for group in drawn if name in group.split())
        want = [line[name] for line in lines if line.get("split") == "train" and name in line]
        curves = [values for values in drawn[group].values() if len(values) == len(want)]
        near = max(0.02, 0.02 * (max(want) - min(want)))
        assert any(values == pytest.approx(want, abs=near) for values in curves), (name, want, drawn[group])
    assert page.locator(f"a[href*='compare?model={run}%40base']").count() == 1


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_tuned_runs_are_shown_in_both_languages(open_page, language):
    one = open_page(locale=language)
    views = [("training", {"run": run}, "[data-metric] svg, .charts svg") for run in ("dpo", "ppo", "lora")]
    views += [("compare", {"model": "lora@base", "compare": "lora", "text": INPUT}, ".token-changes")]
    for view, params, mark in views:
        page = one.go(view, **params)
        page.wait_for_selector(mark)
        assert page.locator(".notice.bad").count() == 0
        titles = page.locator("svg.chart text, h2, h3").all_text_contents()
        assert not any("_" in title or "e-" in title for title in titles), titles
        if where := os.environ.get("HEADWATER_SHOTS"):
            page.screenshot(path=f"{where}/{language}-{view}-{params.get('run', '')}.png", full_page=True)
