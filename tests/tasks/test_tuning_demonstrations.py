"""The six demonstrations of tuning in small: the claims of benchmarks/tune_*.py, on a model of 90,000 weights.

The base writes sentences such as "the old cat likes a man ." Each claim stands beside what it is measured against.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest

import headwater
from headwater.data.conversations import ChatTurn
from headwater.data.metrics import chrf
from headwater.quantization.layers import quantize
from headwater.tasks.chat import answer_prompts
from headwater.training.run_dir import RunDir
from headwater.tuning.base import trained_parameters
from headwater.weights.native import save_native

ADJECTIVES = ("old", "red", "big", "wet", "shy", "odd", "new", "sad")
FRIENDS = {"cat": "man", "dog": "boy", "cow": "bee", "hen": "fox", "pig": "rat", "owl": "man"}
KIND, UNKIND = ("likes", "helps", "feeds"), ("hates", "bites", "kicks")
OTHERS = ("man", "boy", "fox", "bee", "rat")
PROMPTS = [f"the {adjective}" for adjective in ADJECTIVES]
MAX_TOKENS = 30  # of an answer
COMMON = {"quiet": True, "log_every": 1, "dropout": 0.0, "optimizer": "adamw"}
REWARDS = """
def cats(completions):
    return [float(text.split().count("cat")) for text in completions]

def short(completions):
    return [float(text.count(".") == 1) for text in completions]
"""


def sentences(count: int) -> list[tuple[str, str]]:
    """(sentence, label)"""
    every = list(itertools.product(ADJECTIVES, FRIENDS, KIND + UNKIND, OTHERS))
    random.Random(0).shuffle(every)
    return [(f"the {a} {b} {c} a {d} .", "kind" if c in KIND else "unkind") for a, b, c, d in every[:count]]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demonstrations")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def base(files):
    """A language model of the sentences, two layers of 64."""
    rows = write_rows(files / "sentences.jsonl", [{"text": text} for text, _label in sentences(1200)])
    headwater.train(rows, out=files / "base", task="language-model", objective="packed", d_model=64, layers=2, heads=2,
                    d_ff=128, vocab=320, context_length=32, batch_tokens=768, max_steps=150, eval_every=150, lr=1e-2,
                    **COMMON)  # fmt: skip
    return files / "base"


def log_of(run):
    return RunDir.open(run).read_log("metrics.jsonl")


def answers_of(run, prompts, seeds=(0,), **options):
    """Answers to each prompt, once with each seed."""
    loaded = headwater.load(run)
    turns = [(ChatTurn("user", prompt),) for prompt in prompts]
    given = {"max_tokens": MAX_TOKENS, **options}
    answers = []
    for seed in seeds:
        answers += answer_prompts(loaded.model, loaded.tokenizer, loaded.eos_ids, turns, seed=seed, **given)
    return answers


# ----------------------------------------------------------------------------------------------- methods, instructions


def test_lora_is_as_good_as_full_tuning_with_a_hundredth_of_the_weights(files, base):
    """And the same number of weights in the head alone learns little."""
    table = files / "kind.tsv"
    rows = [f"{text}\t{label}" for text, label in sentences(1400)[1200:]]  # that the base never saw
    table.write_text("\n".join(["text\tlabel", *rows]))
    accuracy, learned, size = {}, {}, {}
    for method, lr in (("full", 3e-3), ("lora", 3e-2), ("head", 3e-2)):
        setups = []
        run = files / f"kind-{method}"
        headwater.train(table, init_from=base, out=run, tune=method, tune_rank=1, max_steps=150, batch_tokens=512,
                        eval_every=150, valid_fraction=0.3, lr=lr, on_setup=setups.append, **COMMON)  # fmt: skip
        accuracy[method] = [line["accuracy"] for line in log_of(run) if "accuracy" in line][-1]
        model = setups[0].model
        learned[method] = sum(p.numel() for p in trained_parameters(model).values())
        size[method] = sum(p.numel() for p in model.parameters())
    assert accuracy["lora"] >= accuracy["full"] - 1 and accuracy["full"] > 95
    assert learned["lora"] <= 0.01 * size["full"]
    assert accuracy["head"] < 80


def test_instructions_are_answered_and_the_answers_end(files, base):
    asked = [(f"the {adjective} {animal} likes", f" a {FRIENDS[animal]} .")
             for adjective in ADJECTIVES for animal in FRIENDS]  # fmt: skip
    random.Random(1).shuffle(asked)
    train, test = asked[:36], asked[36:]
    rows = write_rows(files / "asked.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in train])
    target = ["*attn.*", "*ffn.*", "*.embed.tokens"]
    headwater.train(rows, init_from=base, out=files / "asked", task="chat", tune="lora", tune_target=target, lr=1e-2,
                    chat_template="none", batch_tokens=600, max_steps=120, eval_every=120, **COMMON)  # fmt: skip
    prompts, wanted = zip(*test, strict=True)
    answers = answers_of(files / "asked", prompts, temperature=0)
    assert chrf([answer.text for answer in answers], wanted) >= 90
    assert all(answer.ended for answer in answers)
    assert chrf([answer.text for answer in answers_of(base, prompts, temperature=0)], wanted) < 60


def test_lora_over_four_bits_takes_two_fifths_of_the_memory(files, base):
    """Weights, gradients and moments; what is kept for the backward pass is the same for both."""
    loaded = headwater.load(base)
    quantize(loaded.model, "int4")
    save_native(files / "packed", loaded.model, loaded.config.get("metadata", {}))
    loaded.tokenizer.save(files / "packed")
    size = {}
    for name, method in (("base", "full"), ("packed", "lora")):
        setups = []
        headwater.train(files / "sentences.jsonl", init_from=files / name, out=files / f"memory-{name}", tune=method,
                        task="language-model", objective="packed", max_steps=1, eval_every=1, batch_tokens=512,
                        context_length=32, tune_rank=2, on_setup=setups.append, **COMMON)  # fmt: skip
        model = setups[0].model
        tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
        gradients_and_moments = 3 * sum(p.nbytes for p in trained_parameters(model).values())
        size[name] = sum(tensors.values()) + gradients_and_moments
    assert size["packed"] <= 0.4 * size["base"]


# --------------------------------------------------------------------------------------------- preferences and rewards


@pytest.fixture(scope="module")
def writer(files, base):
    """The base as a writer of one sentence or two, each half of the time."""
    rows = []
    for n, (text, _label) in enumerate(sentences(400)):
        first, rest = text[:7], text[7:]  # "the old", " cat likes a man ."
        rows.append({"prompt": first, "completion": rest if n % 2 else f"{rest} {text}"})
    written = write_rows(files / "writer.jsonl", rows)
    headwater.train(written, init_from=base, out=files / "writer", task="chat", chat_template="none",
                    batch_tokens=1200, max_steps=60, eval_every=60, lr=3e-3, **COMMON)  # fmt: skip
    write_rows(files / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS * 8])
    return files / "writer"


def share_of(run, has_property):
    """Of sampled answers, those that have a property."""
    answers = answers_of(run, PROMPTS, seeds=range(4), temperature=1.0)
    return sum(map(has_property, answers)) / len(answers)


def is_short(answer):
    return answer.ended and answer.text.count(".") == 1


def test_dpo_learns_a_preference_that_can_be_checked(files, writer):
    answers = answers_of(writer, PROMPTS, seeds=range(8), temperature=1.0)
    prompts = PROMPTS * 8
    short, long = ([(prompt, answer.text) for prompt, answer in zip(prompts, answers, strict=True)
                    if is_short(answer) == wanted] for wanted in (True, False))  # fmt: skip
    rows = [{"prompt": prompt, "chosen": good, "rejected": bad}
            for prompt, bad in long for other, good in short if other == prompt]  # fmt: skip
    headwater.train(write_rows(files / "pairs.jsonl", rows), init_from=writer, out=files / "dpo", task="preference",
                    tune="lora", tune_target="all-linear", chat_template="none", batch_tokens=1200, max_steps=30,
                    eval_every=30, lr=1e-3, **COMMON)  # fmt: skip
    assert 0.2 < share_of(writer, is_short) < 0.8
    assert share_of(files / "dpo", is_short) >= 0.9
    assert [line["accuracy"] for line in log_of(files / "dpo") if line.get("split") == "valid"][-1] >= 90


def train_on_rewards(files, writer, name, reward, **settings):
    given = {"chat_template": "none", "rollouts": 64, "minibatch": 32, "answer_tokens": MAX_TOKENS,
             "batch_tokens": 4096, "eval_every": 1000, "eval_examples": 8, "metric": "reward", "lr": 3e-3}  # fmt: skip
    headwater.train(files / "prompts.jsonl", init_from=writer, out=files / name, reward=f"{files}/rewards.py:{reward}",
                    **given, **settings, **COMMON)  # fmt: skip
    return files / name


def test_grpo_learns_what_its_verifier_wants(files, writer):
    run = train_on_rewards(files, writer, "grpo", "short", task="grpo", group_size=8, max_steps=30)
    assert share_of(run, is_short) >= 0.9


def test_ppo_raises_the_reward_and_without_a_penalty_the_model_repeats_itself(files, writer):
    settings = {"task": "ppo", "max_steps": 40, "ppo_epochs": 2}
    ppo = train_on_rewards(files, writer, "ppo", "cats", beta=0.1, kl_target=4.0, kl_horizon=640, **settings)
    free = train_on_rewards(files, writer, "free", "cats", beta=0.0, **settings)

    def has_cat(answer):
        return "cat" in answer.text.split()

    def distinct(run):
        words = [answer.text.split() for answer in answers_of(run, PROMPTS, seeds=range(4), temperature=1.0)]
        return sum(len(set(each)) / max(1, len(each)) for each in words) / len(words)

    kl = {run: [line["kl"] for line in log_of(run) if line.get("kl") is not None][-1] for run in (ppo, free)}
    assert share_of(writer, has_cat) < 0.5 and share_of(ppo, has_cat) >= 0.9
    assert kl[ppo] <= 10 and kl[free] > 2 * kl[ppo]
    assert distinct(free) <= 0.8 * distinct(ppo)
