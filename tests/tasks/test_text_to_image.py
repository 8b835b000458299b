"""Text to image: the codec and the Transformer through the command, exact resumption, laws of the rows, drawing."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import headwater
from headwater.cli import main
from headwater.codecs import load_codec
from headwater.codecs.codebook import EMACodebook
from headwater.codecs.vqvae import VQVAE, psnr
from headwater.data.collate import IGNORE_INDEX, SpecialTokens
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import BadRows
from headwater.errors import BadInput, BadSetting, NotFound, TooLong
from headwater.generation.guidance import MAX_BATCH_SEQUENCES
from headwater.tasks.drawing import GRAY, PictureModel, decode_partial, draw, draw_steps, open_picture_model, rerank
from headwater.tasks.picture_codec import PictureCodecTask, load_pictures, to_pictures
from headwater.tasks.text_to_image import TextImageDataset, TextToImage, empty_text
from headwater.training.config import TrainConfig
from headwater.variants.text_image_positions import TextImagePositions

COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "white": (255, 255, 255)}
TINY = {"image_size": 8, "quiet": True, "max_time": 0, "warmup": 1, "eval_every": 4, "eval_examples": 4,
        "batch_tokens": 64, "checkpoint_steps": 3}  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """24 plain pictures, with a table that names them from its own folder."""
    folder = tmp_path_factory.mktemp("pairs")
    with (folder / "pairs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "caption"])
        for n in range(24):
            name, color = list(COLORS.items())[n % 4]
            Image.new("RGB", (8 + n, 9), color).save(folder / f"{n}.png")
            rows.writerow([f"{n}.png", f"a {name} wall {n}"])
    return folder / "pairs.csv"


@pytest.fixture(scope="module")
def codec_run(table, tmp_path_factory):
    out = tmp_path_factory.mktemp("codec") / "run"
    headwater.train(
        table,
        task="picture-codec",
        out=out,
        d_model=16,
        layers=1,
        vocab=16,
        max_steps=150,
        lr=5e-3,
        **{**TINY, "eval_every": 75, "checkpoint_steps": 150, "batch_tokens": 96},
    )
    return out


@pytest.fixture(scope="module")
def run(table, codec_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("draw") / "run"
    settings = {**TINY, "d_model": 16, "heads": 2, "layers": 1, "d_ff": 16, "max_length": 8, "batch_tokens": 256}
    headwater.train(table, task="text-to-image", codec=codec_run, out=out, max_steps=6, **settings)
    return out


# ------------------------------------------------------------------------------------------------------------ the data


def test_files_are_found_beside_the_table_and_missing_ones_are_bad_rows(table, tmp_path):
    source = detect_source([table], options=SourceOptions(task="text-to-image"))
    bad = BadRows()
    examples = list(source.examples("train", bad))
    assert len(examples) == 24 and examples[0].path == str(table.parent / "0.png")
    assert examples[0].text == "a red wall 0"

    (tmp_path / "pairs.csv").write_text(f"path,caption\nnowhere.png,a cat\n{table.parent / '1.png'},a wall\n")
    source = detect_source([tmp_path / "pairs.csv"], options=SourceOptions(task="text-to-image"))
    assert [example.text for example in source.examples("train", bad)] == ["a wall"]
    assert "there is no file nowhere.png" in str(vars(bad))


def test_a_table_with_a_path_is_no_text_to_image_unless_asked(table):
    assert detect_source([table]).task != "text-to-image"


def test_unreadable_pictures_are_counted_and_named(table, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG but no more")
    notes = []
    pixels, good = load_pictures([str(table.parent / "0.png"), str(tmp_path / "broken.png")], 8, notes)
    assert pixels.shape == (1, 8, 8, 3) and good.tolist() == [0]
    assert "1 pictures cannot be read and are left out" in notes[0] and "broken.png" in notes[0]
    with pytest.raises(BadInput, match="no picture can be read"):
        load_pictures([str(tmp_path / "broken.png")], 8, [])
    with pytest.raises(BadInput, match=r"need 12\.9 GB"):
        load_pictures(["x"] * 4_200_000, 32, [])


@pytest.mark.parametrize("size", [2, 30, 1028])
def test_sizes_that_no_grid_fits_are_refused(size):
    with pytest.raises(BadInput, match="image_size must be a multiple of 4"):
        PictureCodecTask().model_spec(TrainConfig(image_size=size), 10, 0)


def dataset(without_text):
    special = SpecialTokens(pad_id=0, bos_id=1, eos_id=2)
    texts = np.array([[1, 7, 8, 2, 0], [1, 9, 2, 0, 0]])
    return TextImageDataset(texts, np.array([[20, 21], [22, 23]]), special, 100, 0, without_text), special


def test_the_rows_of_text_and_picture():
    rows, special = dataset(0.0)
    batch = rows.collate(np.array([1, 0]), 0)
    assert batch.ids.tolist() == [[1, 9, 2, 0, 0, 22], [1, 7, 8, 2, 0, 20]]
    assert batch.targets[0].tolist() == [9, 2, IGNORE_INDEX, IGNORE_INDEX, 22, 23]
    assert empty_text(4, special).tolist() == [1, 2, 0, 0]


def test_texts_are_left_out_as_often_as_asked_and_always_for_the_same_rows():
    rows, _special = dataset(0.3)
    left_out = [rows.collate(np.array([0]), epoch).ids[0, 1] == 2 for epoch in range(800)]
    assert np.mean(left_out) == pytest.approx(0.3, abs=0.06)
    assert left_out == [rows.collate(np.array([0]), epoch).ids[0, 1] == 2 for epoch in range(800)]
    first = left_out.index(True)
    assert rows.collate(np.array([0]), first).targets[0, :4].tolist() == [IGNORE_INDEX] * 4  # no text to learn


# --------------------------------------------------------------------------------------------------------- positions


def test_positions_are_text_then_row_plus_column():
    encoding = TextImagePositions(3, 2, 4).build(5)
    x = torch.zeros(1, 11, 5)
    added = encoding.add(x, torch.arange(11)[None])[0]
    assert torch.equal(added[1], encoding.table.weight[1])
    assert torch.equal(added[3 + 4 + 2], encoding.rows.weight[1] + encoding.columns.weight[2])
    assert not torch.equal(added[3 + 4 + 2], encoding.rows.weight[2 % 2] + encoding.columns.weight[1])  # columns first
    with pytest.raises(TooLong, match="11 places for text and picture, got a token at place 11"):
        encoding.add(x, torch.tensor([[11]]))


def test_a_model_with_these_positions_keeps_the_laws():
    codec = VQVAE(size=8, channels=4, num_codes=8)
    spec = headwater.decoder(30, d_model=16, heads=2, layers=2, position="none")
    embed = replace(spec.decoder.embed, position=TextImagePositions(6, 4, 4))
    spec = replace(spec, decoder=replace(spec.decoder, embed=embed))
    assert headwater.check(spec.build(seed=0)).ok and codec.factor == 4
    assert spec.max_positions == 22


# ------------------------------------------------------------------------------------------------------------ training


def test_the_codec_learns_and_draws_its_pictures(codec_run, table):
    codec = load_codec(codec_run / "model")
    pixels, _good = load_pictures([str(table.parent / f"{n}.png") for n in range(24)], 8, [])
    pictures = to_pictures(torch.from_numpy(pixels))
    with torch.no_grad():
        trained = psnr(codec.decode(codec.encode(pictures)), pictures).mean()
        fresh = codec.spec.build(seed=0).eval()
        untrained = psnr(fresh.decode(fresh.encode(pictures)), pictures).mean()
    assert trained > untrained + 3
    for name in ("reconstructions.png", "codebook.png"):
        assert Image.open(codec_run / "plots" / name).size[0] > 50


@pytest.mark.parametrize("task", ["picture-codec", "text-to-image"])
def test_a_resumed_run_is_the_same_to_the_last_bit(table, codec_run, tmp_path, task):
    settings = {**TINY, "d_model": 8, "layers": 1, "vocab": 16, "heads": 1, "max_length": 8}
    settings |= {"codec": str(codec_run), "batch_tokens": 256, "vocab": 0} if task == "text-to-image" else {}
    headwater.train(table, task=task, out=tmp_path / "whole", max_steps=9, schedule="constant", **settings)
    half = headwater.train(table, task=task, out=tmp_path / "half", max_steps=3, schedule="constant", **settings)
    assert half.result.state.step == 3
    headwater.resume(tmp_path / "half", max_steps=9, quiet=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(tmp_path / name / "checkpoints" / "step-00000009" / file) for name in ("whole", "half"))
        assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_without_a_codec_one_is_trained_first(table, tmp_path):
    settings = {**TINY, "d_model": 8, "heads": 1, "layers": 1, "max_length": 8, "batch_tokens": 256, "max_steps": 2}
    seen = []
    headwater.train(table, task="text-to-image", out=tmp_path / "run", on_setup=lambda s: seen.append(s.config.task),
                    **{**settings, "max_time": "25s"})  # fmt: skip
    assert seen == ["picture-codec", "text-to-image"]
    assert (tmp_path / "run-codec" / "model" / "config.json").is_file()
    assert open_picture_model(tmp_path / "run").codec.size == 8


def test_timing_moves_no_row_that_counts():
    """What the codebook does depends on its own state alone, not on the random numbers of others."""
    tables = []
    for seed in (0, 1):
        torch.manual_seed(0)
        book = EMACodebook(8, 2, min_count=1.0)
        torch.manual_seed(seed)
        x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            book(x)
        tables.append(book.table.clone())
    assert torch.equal(*tables)


# -------------------------------------------------------------------------------------------------------------- drawing


@pytest.fixture(scope="module")
def model(run) -> PictureModel:
    return open_picture_model(run)


def test_only_codes_are_drawn_and_the_same_seed_draws_the_same(model):
    first = draw(model, ["a red wall", "a blue wall"], seed=3)
    assert first.shape == (2, 3, 8, 8)
    assert torch.equal(first, draw(model, ["a red wall", "a blue wall"], seed=3))
    assert not torch.equal(first, draw(model, ["a red wall", "a blue wall"], seed=4))


def test_a_drawing_does_not_depend_on_the_others(model):
    texts = [f"a red wall {n}" for n in range(MAX_BATCH_SEQUENCES + 2)]
    together = draw(model, texts, seed=1)
    alone = [next(draw_steps(model, [text], seed=1, first=n)) for n, text in enumerate(texts)]
    for n in (3, MAX_BATCH_SEQUENCES + 1):
        assert torch.allclose(together[n], alone[n][0], atol=1e-5)


def test_pictures_grow_row_by_row(model):
    steps = list(draw_steps(model, ["a green wall"], every=1))
    assert len(steps) == 4
    assert torch.equal(steps[0][0, :, :, 4:], torch.full((3, 8, 4), GRAY))
    assert torch.equal(steps[-1], draw(model, ["a green wall"]))
    with torch.no_grad():
        assert torch.equal(
            decode_partial(model.codec, [[1, 2, 3, 0]]), model.codec.decode(torch.tensor([[1, 2, 3, 0]]))
        )


class ByRedness:
    """In place of a CLIP: a text is "red" or not, a picture as red as its pixels."""

    def text_vectors(self, texts):
        return torch.tensor([[1.0, 0.0] if "red" in text else [-1.0, 0.0] for text in texts])

    def image_vectors(self, images):
        return torch.tensor([[float(image[..., 0].mean()), 1.0] for image in images])


def test_reranking_sorts_the_pictures_of_each_text():
    pictures = torch.stack([torch.full((3, 4, 4), value) for value in (0.2, 0.8, 0.4, 0.9, 0.1, 0.5)])
    best = rerank(ByRedness(), ["a red wall", "a dark wall"], pictures, keep=2)
    assert best[:, 0, 0, 0].tolist() == pytest.approx([0.8, 0.4, 0.1, 0.5])
    assert torch.equal(rerank(ByRedness(), ["red"], pictures, keep=6)[0], pictures[3])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--n", "0"], "--n must be from 1"),
        (["--keep", "2"], "--keep must be at most --n"),
        (["--out", "x.jpg"], "--out must end in .png, got x.jpg"),
        (["--every", "-1"], "--every and --top-k must be at least 0"),
        (["--temperature", "1000"], "value must be 0"),
        (["--scale", "-1"], "scale must be from 0 to 1000"),
    ],
)
def test_the_command_refuses_in_one_line(run, flags, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["draw", str(run), "a red wall", *flags]) != 0
    assert words in capsys.readouterr().err


def test_the_command_writes_the_sheet_and_its_stages(run, capsys, tmp_path):
    out = tmp_path / "sheet.png"
    assert main(["draw", str(run), "a red wall", "a blue wall", "--n", "3", "--every", "2", "--out", str(out)]) == 0
    assert "6 pictures, a row for each text" in capsys.readouterr().out
    assert Image.open(out).size == (3 * 96 + 2 * 2, 2 * 96 + 2)
    assert Image.open(tmp_path / "sheet.stages.png").size == (2 * 96 + 2, 6 * 96 + 5 * 2)


def test_models_that_do_not_draw_are_refused(run, codec_run, tmp_path):
    with pytest.raises(NotFound, match=r"must hold the codec of its tokens in codec/"):
        plain = headwater.decoder(50, d_model=16, heads=2, layers=1).build(seed=0)
        headwater.save(plain, tmp_path / "plain", layout="headwater")
        loaded = headwater.load(run)
        loaded.tokenizer.save(tmp_path / "plain")
        open_picture_model(tmp_path / "plain")
    with pytest.raises(BadInput, match="is a codec alone; give the run of text-to-image"):
        open_picture_model(codec_run)
    with pytest.raises(BadSetting, match="text-to-image needs a picture codec"):
        TextToImage().model_spec(TrainConfig(), 10, 0)
