"""Matching of images and captions: exact accumulation, several positives, resumed = uninterrupted, match and search."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from headwater.cli import main
from headwater.errors import BadInput, BadSetting
from headwater.families.image_index import build_index
from headwater.families.load import load, save
from headwater.families.matching import Matcher, load_matcher
from headwater.tasks import get_task
from headwater.tasks.batch import to_tensors
from headwater.tasks.contrastive import positives_of
from headwater.tasks.losses import contrastive_loss
from headwater.training.api import resume, train
from headwater.training.distributed import SingleProcess, without_targets
from headwater.training.state import StepEvent
from headwater.variants.towers import MAX_LOGIT_SCALE

TINY = {"size": "xs", "max_steps": 6, "batch_tokens": 300, "eval_examples": 20, "eval_every": 3, "log_every": 1}
COLORS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220), "yellow": (220, 220, 30)}


def write_pairs(folder: Path, count: int = 48) -> Path:
    """Images of one color with captions that name it; some captions repeat."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    rows = []
    for i in range(count):
        name = list(COLORS)[i % 4]
        noise = rng.normal(0, 15, (12, 12, 3)) + COLORS[name]
        Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(folder / f"{i}.png")
        rows.append((f"{i}.png", f"a {name} thing" if i % 3 else f"thing {i % 5} is {name}"))
    with (folder / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "caption"), *rows])
    return folder / "pairs.csv"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("HEADWATER_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs")


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(
        pairs, out=folder, quiet=True, **{**TINY, "max_steps": 100, "lr": 5e-3, "batch_tokens": 500, "eval_every": 25}
    )
    return folder


# --------------------------------------------------------------------------------------------------------------- loss


def test_without_repeats_the_loss_is_that_of_clip():
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    target = torch.arange(5)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    assert contrastive_loss(logits, torch.eye(5, dtype=torch.bool)) / 5 == pytest.approx(float(expected), rel=1e-6)


def test_a_repeated_caption_is_no_negative():
    positives = positives_of(torch.tensor([0, 1, 0]), torch.tensor([0, 1, 2]))
    assert positives.int().tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    perfect = torch.where(positives, 30.0, -30.0)
    assert contrastive_loss(perfect, positives) == pytest.approx(2 * np.log(2), abs=1e-5)  # two equal rows of two
    naive = contrastive_loss(perfect, torch.eye(3, dtype=torch.bool))
    assert naive == pytest.approx(2 * np.log(2), abs=1e-5)
    worse = perfect.clone()
    worse[0, 2] = worse[2, 0] = -30  # the repeated ones pushed apart: CLIP's loss rewards it, this one does not
    assert contrastive_loss(worse, torch.eye(3, dtype=torch.bool)) < 1e-5
    assert contrastive_loss(worse, positives) > 20
    assert positives_of(torch.tensor([0, 1]), torch.tensor([3, 3])).all()


def prepared(pairs, tmp_path, dropout: float):
    from headwater.training.config import parse_config
    from headwater.training.task_data import build_task_data, read_data

    config = parse_config({"paths": [str(pairs)], "batch_tokens": 600, "dropout": dropout})
    summary, splits = read_data(config)
    task = get_task(summary.task)
    data = build_task_data(config, task, splits["train"], splits["train"])
    sizes = config.replace(d_model=16, heads=2, layers=1, d_ff=32, **data.settings)
    model = task.adapt_spec(task.model_spec(sizes, len(data.tokenizer), 0), data).build(seed=0)
    return task, data, model.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_accumulation_is_exact(pairs, tmp_path, dropout):
    task, data, model = prepared(pairs, tmp_path, dropout)
    batch = next(data.train.batches_from(0)).indices

    def forward_context(index):
        torch.manual_seed(index)
        return torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()

    def gradient(parts, prepare):
        model.zero_grad()
        micro_batches = [to_tensors(data.train.collate(indices, 0)) for indices in parts]
        if prepare:
            task.prepare_step(model, micro_batches, forward_context, SingleProcess())
        total = 0.0
        for index, micro_batch in enumerate(micro_batches):
            with forward_context(index):
                loss = task.loss(model, micro_batch, 0.0)
            loss.backward()
            total += float(loss.detach())
        return total, torch.cat([p.grad.flatten() for p in model.parameters()])

    parts = [batch[:3], batch[3:7], batch[7:]]
    value, accumulated = gradient(parts, prepare=True)
    if dropout == 0:
        whole_value, whole = gradient([batch], prepare=False)
        assert value == pytest.approx(whole_value, rel=1e-5)
        assert torch.allclose(accumulated, whole, atol=2e-5 * float(whole.abs().max()))
        # the planted fault: the sum of the micro-batches' own losses is another loss
        assert not torch.allclose(gradient(parts, prepare=False)[1], whole, atol=1e-2 * float(whole.abs().max()))
    else:  # the second forward pass has the dropout of the first
        again = gradient(parts, prepare=True)
        assert again[0] == value and torch.equal(again[1], accumulated)


class TwoRanks(SingleProcess):
    """One of two processes, of which the other has sent its vectors already."""

    world_size = 2

    def __init__(self, rank, sent):
        self.rank = rank
        self.sent = sent

    def all_gather_object(self, value):
        self.sent[self.rank] = value
        return [self.sent.get(rank, []) for rank in range(2)]


@pytest.mark.parametrize("loss_alone", [False, True])
def test_the_gradients_of_two_processes_add_up_to_that_of_one(pairs, tmp_path, loss_alone):
    task, data, model = prepared(pairs, tmp_path, 0.0)
    batch = next(data.train.batches_from(0)).indices

    def collate(indices):
        return to_tensors(data.train.collate(indices, 0))

    def add_gradients(micro_batches):
        return sum(float(loss.detach()) for loss in backward(micro_batches))

    def backward(micro_batches):
        for micro_batch in micro_batches:
            loss = task.loss(model, micro_batch, 0.0)
            loss.backward()
            yield loss

    def gradient():
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole_value = add_gradients([collate(batch)])
    whole = gradient()

    # rank 0 has two micro-batches, rank 1 one and a filler, as the trainer gives it
    model.zero_grad()
    parts = [
        [collate(batch[0:8:2]), collate(batch[8::2])],
        [collate(batch[1::2]), without_targets(collate(batch[1:2]))],
    ]
    sent: dict = {}
    for _round in range(2):  # in the first, rank 0 lacks the vectors of rank 1
        ranks = [[dict(micro_batch) for micro_batch in part] for part in parts]
        for rank, micro_batches in enumerate(ranks):
            if not loss_alone:
                task.prepare_step(model, micro_batches, lambda index: torch.enable_grad(), TwoRanks(rank, sent))
    if loss_alone:  # the planted fault: every process compares its own pairs alone
        ranks[1].pop()
    value = sum(map(add_gradients, ranks))
    same = torch.allclose(gradient(), whole, atol=2e-5 * float(whole.abs().max()))
    assert same != loss_alone
    assert (value == pytest.approx(whole_value, rel=1e-5)) != loss_alone


@pytest.mark.slow  # two processes that each import torch
def test_two_processes_train_the_matcher_of_one(pairs, tmp_path):
    # 45 rows of 300 / 2 tokens in micro-batches; the ranks have different numbers of them
    settings = {**TINY, "micro_batch_tokens": 120, "dropout": 0.0}
    train(pairs, out=tmp_path / "one", quiet=True, **settings)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "headwater", "train", str(pairs), *words, "--out", str(tmp_path / "two")]
    subprocess.run([*command, "--nproc", "2"], check=True, capture_output=True, timeout=300)
    one, two = (load(tmp_path / name).model.state_dict() for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=2e-4) for name in one if not name.endswith("k.bias"))


def test_the_scale_stays_from_1_to_100(pairs, tmp_path):
    task, data, model = prepared(pairs, tmp_path, 0.0)
    model.logit_scale.data.fill_(50.0)
    task.loss(model, to_tensors(data.train.collate(np.arange(4), 0)), 0.0)
    assert float(model.logit_scale.detach()) == pytest.approx(MAX_LOGIT_SCALE)


# ----------------------------------------------------------------------------------------------------------- training


def test_a_matcher_learns_from_captions(run, pairs):
    matcher = load_matcher(run)
    colors = matcher.text_vectors([f"a {name} thing" for name in COLORS])
    images = [np.full((12, 12, 3), color, np.uint8) for color in COLORS.values()]
    nearest = (matcher.image_vectors(images) @ colors.T).argmax(1).tolist()
    assert sum(a == b for a, b in enumerate(nearest)) >= 3


def test_resumed_with_micro_batches_equals_uninterrupted(pairs, tmp_path):
    settings = {**TINY, "checkpoint_steps": 2, "micro_batch_tokens": 120, "augment": "flip=0.5,crop=0.2,color=0.2"}

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    train(pairs, out=tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(pairs, out=tmp_path / "parts", quiet=True, callbacks=[cut], **settings)
    resume(tmp_path / "parts", quiet=True)
    models = [load(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_an_image_is_held_out_with_all_its_captions(pairs):
    from headwater.training.config import parse_config
    from headwater.training.task_data import read_data, split_examples

    rows = "".join(f"{i}.png,caption {n} of {i % 4}\n" for i in range(48) for n in range(3))
    (pairs.parent / "many.csv").write_text(f"path,caption\n{rows}")
    config = parse_config({"paths": [str(pairs.parent / "many.csv")], "task": "image-text", "valid_fraction": 0.25})
    train_rows, valid_rows = split_examples(config, *read_data(config))
    images = {row.path for row in valid_rows}
    assert not images & {row.path for row in train_rows} and 4 < len(images) < 24
    assert len(valid_rows) == 3 * len(images)
    assert len({row.text for row in valid_rows}) > 4  # not the images of one caption, of which each would be right


def test_a_matcher_is_fine_tuned(run, pairs, tmp_path):
    before = load(save(load(run), tmp_path / "copy", layout="headwater")).model
    assert all(torch.equal(p, load(run).model.state_dict()[name]) for name, p in before.state_dict().items())
    predictor = train(pairs, out=tmp_path / "tuned", quiet=True, init_from=str(tmp_path / "copy"), **TINY)
    assert len(predictor("a red thing")) == len(predictor(str(pairs.parent / "0.png"))) == 32


def test_a_matcher_is_fine_tuned_on_larger_images(run, pairs, tmp_path, capsys):
    settings = {**TINY, "max_steps": 1, "lr": 1e-9, "image_size": 24}
    train(pairs, out=tmp_path / "tuned", init_from=str(run), **settings)
    out, err = capsys.readouterr()
    assert "its positions are interpolated for 24 x 24" in out + err
    tuned = load(tmp_path / "tuned").model
    assert tuned.spec.image.encoder.embed.image_size == (24, 24)
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        assert torch.allclose(tuned.image_vectors(pixels), load(run).model.image_vectors(pixels), atol=1e-4)


def test_texts_alone_are_as_in_a_batch(run):
    matcher = load_matcher(run)
    texts = ["a red thing", "a", "a much longer text about a blue thing and nothing else"]
    together = matcher.text_vectors(texts)
    alone = torch.cat([matcher.text_vectors([text]) for text in texts])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together.norm(dim=1), torch.ones(3))
    long = matcher.encode(["thing " * 200])
    assert long.shape[1] == 77 and int(long[0, -1]) == matcher.tokenizer.eos_id


# ----------------------------------------------------------------------------------------------------------- commands


def test_match_prints_probabilities_and_draws_the_matrix(run, pairs, tmp_path, capsys):
    image = str(pairs.parent / "1.png")
    assert main(["match", str(run), image, "a green thing", "a red thing", "--plot", str(tmp_path / "m.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == image and "a green thing" in lines[1]
    assert Image.open(tmp_path / "m.png").size[0] > 200
    assert main(["match", str(run), image, "green", "red", "--template", "a {} thing", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["matches"][0]["text"] == "green"
    assert sum(match["probability"] for match in row["matches"]) == pytest.approx(1, abs=1e-3)


def test_search_by_text_and_by_image_and_duplicates(run, pairs, capsys):
    folder = str(pairs.parent)
    assert main(["search", folder, "a red thing", f"{folder}/4.png", "--model", str(run), "-n", "5"]) == 0
    text = capsys.readouterr().out
    first, second = text.split(f"\n{folder}/4.png\n", 1)
    assert sum(int(Path(line.split()[1]).stem) % 4 == 0 for line in first.splitlines()[1:]) >= 3
    assert second.splitlines()[0].split() == ["1.0000", f"{folder}/4.png"]
    assert main(["search", folder, "--duplicates", "0.99999", "--model", str(run), "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert json.loads(line)["cosine"] >= 0.9999


def test_only_new_images_are_read_again(run, tmp_path, monkeypatch):
    folder = write_pairs(tmp_path / "some", 8).parent
    matcher = load_matcher(run)
    first = build_index(folder, matcher)
    read = []
    original = Matcher.image_vectors
    monkeypatch.setattr(
        Matcher, "image_vectors", lambda self, images: read.append(len(images)) or original(self, images)
    )
    again = build_index(folder, matcher)
    assert read == [] and np.array_equal(first.vectors, again.vectors)
    (folder / "0.png").unlink()
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(folder / "new.png")
    (folder / "bad.png").write_bytes(b"bad")
    third = build_index(folder, matcher)
    assert read == [1] and len(third.paths) == 8 and "bad.png" in third.problems[0]


# ---------------------------------------------------------------------------------------------------------- bad input


def test_equal_captions_are_refused_and_repeats_are_said(tmp_path, capsys):
    path = write_pairs(tmp_path / "a", 12)
    path.write_text("path,caption\n" + "".join(f"{i}.png,the same\n" for i in range(12)))
    with pytest.raises(BadInput, match="at least (2 rows with different inputs|two different)"):
        train(path, quiet=True, out=tmp_path / "run", **TINY)
    train(write_pairs(tmp_path / "b"), out=tmp_path / "run2", **TINY)
    out = capsys.readouterr()
    assert "captions repeat others: all their images are positives" in out.out + out.err


def test_inputs_that_do_not_fit(run, pairs, tmp_path, capsys):
    assert main(["match", str(run), "a", "b"]) == 3
    assert "it needs images and texts" in capsys.readouterr().err
    assert main(["search", str(tmp_path / "none"), "x", "--model", str(run)]) == 6
    assert main(["search", str(tmp_path), "x", "--model", str(run)]) == 3
    assert "holds no images" in capsys.readouterr().err
    assert main(["match", "minilm", str(pairs.parent / "1.png"), "a"]) in (3, 7)
    with pytest.raises(BadSetting, match="a template must have"):
        load_matcher(run).label_vectors(["cat"], ["a photo"])
    tower = load(run)
    save(replace(tower, model=tower.model.image), tmp_path / "tower", layout="headwater")
    with pytest.raises(BadSetting, match="it must compare images with texts; start from a CLIP or SigLIP folder"):
        train(pairs, quiet=True, out=tmp_path / "run", init_from=str(tmp_path / "tower"), **TINY)
    photos = "".join(f"{i}.png,{'red' if i % 4 else 'blue'}\n" for i in range(20))
    (pairs.parent / "photos.csv").write_text(f"path,label\n{photos}")
    with pytest.raises(BadSetting, match="must be a model of images alone, this one compares them with texts"):
        train(pairs.parent / "photos.csv", quiet=True, out=tmp_path / "run", init_from=str(run), **TINY)
    with pytest.raises(BadInput, match="captions cannot be mixed"):
        train(pairs, quiet=True, out=tmp_path / "run", augment="mixup=0.5", **TINY)
