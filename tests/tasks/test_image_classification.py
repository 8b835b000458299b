"""Image classification from files: folders and tables, resumed = uninterrupted, bad input in one line, commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.cli import main
from headwater.errors import BadFile, BadInput, BadSetting
from headwater.families.load import load
from headwater.tasks import get_task
from headwater.tasks.batch import to_tensors
from headwater.training.api import resume, train
from headwater.training.run_dir import RunDir
from headwater.training.state import StepEvent

TINY = {"size": "xs", "max_steps": 6, "batch_tokens": 60, "eval_examples": 10, "eval_every": 3, "log_every": 1}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path_factory.mktemp("cache")))


def draw(folder: Path, classes: str = "red green", count: int = 20, seed: int = 0) -> Path:
    """Images of noise around the color of their class, in a folder for each class."""
    colors = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}
    rng = np.random.default_rng(seed)
    for name in classes.split():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            noise = rng.normal(0, 20, (12, 12, 3)) + colors[name]
            Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    os.environ["HEADWATER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(photos, out=folder, quiet=True, **{**TINY, "max_steps": 30, "lr": 5e-3, "stochastic_depth": 0.1})
    return folder


# ---------------------------------------------------------------------------------------------------------- training


def test_a_folder_for_each_class_trains_a_classifier(run, photos):
    metadata = json.loads((run / "model" / "config.json").read_text())["metadata"]
    assert metadata["task"] == "image-classification"
    assert metadata["labels"] == ["green", "red"]
    scores = [line["accuracy"] for line in RunDir.open(run).read_log("metrics.jsonl") if "accuracy" in line]
    assert scores[-1] > 90
    config = RunDir.open(run).load_config()
    assert (config.image_size, config.patch_size) == (12, 4)


def test_a_table_of_paths_is_read_relative_to_it(photos, tmp_path):
    rows = [(path, path.parent.name) for path in sorted(photos.rglob("*.png"))]
    for path, _label in rows:
        (tmp_path / "all").mkdir(exist_ok=True)
        (tmp_path / "all" / f"{path.parent.name}{path.name}").write_bytes(path.read_bytes())
    lines = [f"all/{path.parent.name}{path.name},{label}\n" for path, label in rows]
    (tmp_path / "table.csv").write_text("path,label\n" + "".join(lines) + "all/none.png,red\n")
    predictor = train(tmp_path / "table.csv", out=tmp_path / "run", quiet=True, **TINY)
    assert predictor.task == "image-classification"
    assert set(predictor(str(photos / "red" / "0.png"))) == {"red", "green"}


def test_a_table_whose_path_names_no_image_is_not_about_images(tmp_path):
    from headwater.data.summary import summarize_files

    rows = "".join(f"src/{i}.py,some text number {i}\n" for i in range(30))
    (tmp_path / "code.csv").write_text("path,text\n" + rows)
    assert summarize_files(tmp_path / "code.csv").task == "language-model"


def test_splits_of_a_folder_are_used(tmp_path):
    from headwater.data.summary import summarize_files

    draw(tmp_path / "train", count=6)
    draw(tmp_path / "val", count=3, seed=1)
    draw(tmp_path / "test", count=2, seed=2)
    summary = summarize_files(tmp_path)
    assert {name: stats.rows for name, stats in summary.splits.items()} == {"train": 12, "valid": 6, "test": 4}
    assert "12 images" in str(summary)


def test_a_resumed_run_equals_the_one_that_never_stopped(photos, tmp_path):
    settings = {**TINY, "augment": "flip=0.5,crop=0.2,color=0.3,erase=0.3,mixup=0.3,cutmix=0.3", "checkpoint_steps": 2}
    settings |= {"stochastic_depth": 0.2, "lr": 1e-3}

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    train(photos, out=tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(photos, out=tmp_path / "parts", quiet=True, callbacks=[cut], **settings)
    resume(tmp_path / "parts", quiet=True)
    models = [load(tmp_path / name).model.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_conv_stem_is_trained_resumed_and_loaded(photos, tmp_path):
    settings = {**TINY, "patch_embedding": "conv-stem", "checkpoint_steps": 2, "ema": 0.9}

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    train(photos, out=tmp_path / "whole", quiet=True, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(photos, out=tmp_path / "parts", quiet=True, callbacks=[cut], **settings)
    resume(tmp_path / "parts", quiet=True)
    whole, parts = (load(tmp_path / name) for name in ("whole", "parts"))
    assert "ConvStem(" in repr(whole.spec)
    states = [each.model.state_dict() for each in (whole, parts)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    red = np.asarray(Image.open(photos / "red" / "0.png"))
    pixels = whole.processor([red, red[::-1]])
    assert torch.allclose(whole.model(pixels)[:1], whole.model(pixels[:1]), atol=1e-5)


def test_another_patch_embedding_is_refused(run, photos, tmp_path):
    with pytest.raises(BadSetting, match="patch_embedding must be one of linear, conv-stem, got 'conv'"):
        train(photos, out=tmp_path / "a", quiet=True, patch_embedding="conv", **TINY)
    with pytest.raises(BadSetting, match="has a linear one, which conv-stem cannot replace"):
        train(photos, out=tmp_path / "b", quiet=True, patch_embedding="conv-stem", init_from=str(run), **TINY)
    with pytest.raises(BadSetting, match="patch_size must be one power of 2 .*, got .6, 6."):
        train(photos, out=tmp_path / "c", quiet=True, patch_embedding="conv-stem", patch_size=6, **TINY)


def test_micro_batches_give_the_same_gradient(photos, tmp_path):
    from headwater.training.config import parse_config
    from headwater.training.task_data import build_task_data, read_data

    config = parse_config({"paths": [str(photos)], "batch_tokens": 200, "dropout": 0.0, "augment": "mixup=1"})
    summary, splits = read_data(config)
    task = get_task(summary.task)
    data = build_task_data(config, task, splits["train"], splits["train"])
    sizes = config.replace(d_model=16, heads=2, layers=1, d_ff=32, **data.settings)
    model = task.model_spec(sizes, 0, 2).build(seed=0)
    batch = next(data.train.batches_from(0)).indices

    def gradient(*parts):
        model.zero_grad()
        for indices in parts:
            task.loss(model, to_tensors(data.train.collate(indices, 0)), 0.1).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert torch.allclose(gradient(batch), gradient(batch[:7], batch[7:]), atol=1e-5)


def test_the_trained_model_opens_in_transformers(run, photos, tmp_path):
    import transformers as T

    from headwater.families.load import save

    loaded = load(run)
    folder = save(loaded, tmp_path / "hf", layout="transformers")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["ViTForImageClassification"]
    theirs = T.ViTForImageClassification.from_pretrained(folder).eval()
    processor = T.CLIPImageProcessorPil.from_pretrained(folder)
    image = Image.open(photos / "red" / "1.png").convert("RGB")
    with torch.no_grad():
        expected = theirs(**processor(images=[image], return_tensors="pt")).logits
        got = loaded.model(loaded.processor([np.asarray(image)]))
    assert (got - expected).abs().max() < 2e-5
    assert [theirs.config.id2label[i] for i in range(2)] == loaded.labels


def test_a_public_model_is_fine_tuned(run, photos, tmp_path):
    from headwater.families.load import save

    public = save(load(run), tmp_path / "vit", layout="transformers")
    blue = draw(tmp_path / "blue", "red green blue", count=8)
    predictor = train(blue, out=tmp_path / "tuned", quiet=True, init_from=str(public), **TINY)
    assert set(predictor(str(blue / "blue" / "0.png"))) == {"red", "green", "blue"}


def public_vit(run, folder, **processor):
    """A public model whose processor is not that of a model from scratch."""
    from headwater.families.load import save

    path = save(load(run), folder, layout="transformers")
    values = json.loads((path / "preprocessor_config.json").read_text()) | processor
    (path / "preprocessor_config.json").write_text(json.dumps(values))
    return path


def test_another_image_size_is_interpolated_once_and_said(run, photos, tmp_path, capsys):
    import transformers as T

    from headwater.families.load import save

    settings = {**TINY, "max_steps": 1, "lr": 1e-9, "image_size": 24}
    train(photos, out=tmp_path / "tuned", init_from=str(run), **settings)
    out, err = capsys.readouterr()
    assert "reads images of 12 x 12 pixels: its positions are interpolated for 24 x 24" in out + err
    before, after = load(run), load(tmp_path / "tuned")
    assert after.spec.encoder.embed.image_size == (24, 24)
    pixels = torch.randn(2, 3, 24, 24)
    public = save(after, tmp_path / "hf", layout="transformers")
    theirs = T.ViTForImageClassification.from_pretrained(public).eval()
    with torch.no_grad():
        assert torch.allclose(after.model(pixels), before.model(pixels), atol=1e-4)
        assert torch.allclose(theirs(pixels).logits, after.model(pixels), atol=1e-5)
    with pytest.raises(BadSetting, match="multiple of patch_size 4 up to 1024, got 22; 20 is one"):
        train(photos, out=tmp_path / "no", quiet=True, init_from=str(public), image_size=22, **TINY)


def test_a_tuned_model_is_evaluated_with_its_own_processor(run, photos, tmp_path):
    from headwater.training.evaluate import eval_task_data
    from headwater.training.predict import load_run

    public = public_vit(run, tmp_path / "vit", image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.2, 0.2])
    train(photos, out=tmp_path / "tuned", quiet=True, init_from=str(public), **{**TINY, "max_steps": 1})
    data = eval_task_data(load_run(tmp_path / "tuned"), [str(photos)])
    assert data.valid.processor.mean == load(tmp_path / "tuned").processor.mean == (0.4, 0.5, 0.6)


# ---------------------------------------------------------------------------------------------------------- commands


def test_classify_prints_a_label_for_each_image(run, photos, tmp_path, capsys):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    assert main(["classify", str(run), str(photos / "red" / "2.png"), str(bad), str(photos / "green" / "3.png")]) == 0
    out, err = capsys.readouterr()
    assert [line.split("\t")[1] for line in out.splitlines()] == ["red", "green"]
    assert "bad.jpg cannot be read as an image" in err
    assert "1 of 3 images were left out" in err
    assert main(["classify", str(run), str(photos), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 40
    assert sum(next(iter(row["output"])) in row["input"] for row in rows) > 36


def test_eval_of_other_images(run, photos, capsys):
    assert main(["eval", str(run), str(photos)]) == 0
    assert "confusion matrix" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- bad input


def test_one_class_is_refused(tmp_path):
    with pytest.raises(BadInput, match="at least two labels, all images have 'red'; give a folder for each class"):
        train(draw(tmp_path / "p", "red"), quiet=True, out=tmp_path / "run", **TINY)


def test_images_without_a_class_are_refused(tmp_path):
    folder = draw(tmp_path / "p", "red")
    for path in (folder / "red").iterdir():
        path.rename(folder / path.name)
    (folder / "red").rmdir()
    with pytest.raises(BadFile, match="holds images without a class; put those of each class into a folder"):
        train(folder, quiet=True, out=tmp_path / "run", **TINY)


def test_unreadable_images_are_counted_and_named(photos, tmp_path, capsys):
    folder = draw(tmp_path / "p", count=12)
    (folder / "red" / "liar.png").write_bytes(b"GIF89a nothing")
    (folder / "green" / "0.png").write_bytes((folder / "green" / "1.png").read_bytes()[:60])
    train(folder, out=tmp_path / "run", valid_fraction=0.3, **TINY)
    out = capsys.readouterr()
    assert "train images cannot be read and are left out" in out.out + out.err
    assert "liar.png" in out.out + out.err


@pytest.mark.parametrize("split", ["", "train"])
def test_other_labels_in_a_resumed_run_are_refused(split, tmp_path, capsys):
    folder = tmp_path / "p"
    draw(folder / split, count=8)
    if split:
        draw(folder / "val", count=2)
    train(folder, out=tmp_path / "run", quiet=True, **{**TINY, "max_steps": 2, "checkpoint_steps": 1})
    draw(folder / split, "blue", count=8)
    assert main(["train", "--resume", str(tmp_path / "run"), "--max-steps", "4"]) == BadSetting.exit_code
    assert "the data must be the same as when" in capsys.readouterr().err


def test_a_label_the_model_does_not_know_is_refused(run, tmp_path, capsys):
    folder = draw(tmp_path / "p", "red blue", count=4)
    assert main(["eval", str(run), str(folder)]) == 3
    assert "the label 'blue' is not one the model knows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"image_size": 30, "patch_size": 8}, "multiple of patch_size 8 up to 1024, got 30; 24 is one"),
        ({"augment": "flp=0.5"}, "images have no 'flp'; did you mean 'flip'"),
        ({"augment": "crop=0.9"}, "crop must be from 0 to 0.5, got '0.9'"),
        ({"augment": "mixup=0.8,cutmix=0.8"}, "together must be at most 1"),
        ({"task": "seq2seq"}, "which is for image-classification, not seq2seq"),
    ],
)
def test_wrong_settings(settings, words, photos, tmp_path):
    with pytest.raises(BadSetting, match=words):
        train(photos, quiet=True, out=tmp_path / "run", **{**TINY, **settings})


def test_classify_refuses_models_of_other_inputs(run, capsys, tmp_path):
    assert main(["classify", str(run), "a text"]) == 3
    assert "all inputs must be such files, or folders of them" in capsys.readouterr().err
    assert main(["inspect", str(run), "a text"]) == 3
    assert "reads images, got 'a text'; give an image file" in capsys.readouterr().err
    assert main(["classify", str(run), str(tmp_path / "none.png")]) == 6
    assert "no image file" in capsys.readouterr().err
