"""Codecs: what they refuse, codebooks, and files that lie about themselves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headwater.audiolm.semantic import SemanticCodec
from headwater.codecs import DVAE, VQGAN, VQVAE, SoundCodec, find_codec, load_codec, save_codec
from headwater.codecs.codebook import EMACodebook, ResidualCodebooks, code_perplexity, nearest_rows
from headwater.errors import BadFile, BadInput, BadSetting, Fault, NotFound, Unavailable

TINY = VQGAN(8, (1, 2), 1, (), size=8, z_channels=4, width=3, num_codes=11, groups=4)


@pytest.fixture(scope="module")
def codec():
    return TINY.build(seed=0).eval()


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        (torch.zeros(1, 3, 8, 9), r"sides divisible by 2, got float32 \(1, 3, 8, 9\); resize"),
        (torch.zeros(1, 1, 8, 8), r"\[batch, 3, height, width\]"),
        (torch.zeros(3, 8, 8), r"got float32 \(3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), r"must be floats"),
    ],
)
def test_what_is_no_batch_of_pictures_is_refused(codec, pictures, words):
    with pytest.raises(BadInput, match=words):
        codec.encode(pictures)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[0, 1, 2, 11]]), r"from 0 to 10, got int64 \(1, 4\) 0 … 11"),
        (torch.tensor([[0, 1, 2, -1]]), r"from 0 to 10"),
        (torch.tensor([[0.0, 1, 2, 3]]), r"must be integers"),
        (torch.tensor([[0, 1, 2]]), r"side · side"),
    ],
)
def test_ids_of_another_codec_are_refused(codec, ids, words):
    with pytest.raises(BadInput, match=words):
        codec.decode(ids)


@torch.inference_mode()
def test_batched_equals_single_and_size_may_differ(codec):
    pictures = torch.rand(3, 3, 8, 16, generator=torch.Generator().manual_seed(1))
    ids = codec.encode(pictures)
    assert ids.shape == (3, 4 * 8)
    assert torch.equal(ids[1:2], codec.encode(pictures[1:2]))
    assert codec.decode(ids.unflatten(1, (4, 8))).shape == pictures.shape


def test_a_decoder_alone_cannot_encode():
    codec = VQGAN(8, (1, 2), 1, (), size=8, z_channels=4, width=3, num_codes=11, groups=4, encoder=False).build(0)
    with pytest.raises(BadInput, match="decoder alone"):
        codec.encode(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda: VQGAN(channels=30),
        lambda: VQGAN(size=250),
        lambda: VQGAN(multipliers=()),
        lambda: DVAE(channels=30),
        lambda: DVAE(size=12),
        lambda: DVAE(blocks=0),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make):
    with pytest.raises(BadSetting):
        make()


def test_the_same_seed_builds_the_same_codec():
    a, b, c = (TINY.build(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------- codebooks


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 5))
def test_the_nearest_row_is_the_nearest(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 7, width, generator=generator, dtype=torch.float64)
    table = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    assert torch.equal(nearest_rows(x, table), torch.cdist(x.flatten(0, 1), table).argmin(1).view(2, 7))


def test_rows_move_to_the_mean_of_their_vectors():
    torch.manual_seed(0)
    book = EMACodebook(2, 1, decay=0.5)
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    for _ in range(60):
        book(x)
    assert sorted(book.table.flatten().tolist()) == pytest.approx([0.5, 10.5], abs=1e-3)
    assert book.counts.tolist() == pytest.approx([2, 2], abs=1e-6)


def test_the_gradient_passes_straight_through():
    book = EMACodebook(4, 3)
    x = torch.randn(5, 3, requires_grad=True)
    book(x).vectors.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 3))
    assert not [p for p in book.parameters() if p.requires_grad]


def test_dead_rows_restart_and_only_with_a_threshold():
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    for min_count, alive in ((0.0, False), (0.5, True)):
        torch.manual_seed(0)
        book = EMACodebook(8, 2, decay=0.8, min_count=min_count)
        book.start(x)
        book.updates.fill_(1)
        with torch.no_grad():
            book.table[3:] = 1e3  # no vector is near
            book.sums[3:] = 1e3
        for _ in range(40):
            book(x)
        assert (len(book(x).ids.unique()) > 3) == alive


def test_evaluation_moves_nothing():
    book = EMACodebook(4, 2)
    before = [p.clone() for p in book.parameters()]
    with torch.no_grad():
        book(torch.randn(9, 2))
    book.eval()(torch.randn(9, 2, requires_grad=True))
    assert all(torch.equal(a, b) for a, b in zip(before, book.parameters(), strict=True))


def test_each_codebook_quantizes_what_is_left():
    torch.manual_seed(0)
    books = ResidualCodebooks(3, 16, 4)
    x = torch.randn(200, 4)
    for _ in range(20):
        books(x)
    books.eval()
    errors = [float((x - books.decode(books.encode(x, n))).square().mean()) for n in (1, 2, 3)]
    assert errors[0] > errors[1] > errors[2]
    quantized = books(x)
    assert torch.equal(quantized.ids, books.encode(x))
    assert torch.allclose(quantized.vectors, books.decode(quantized.ids), atol=1e-6)

    # a planted fault: the codes of one book given to the next
    shifted = quantized.ids.roll(1, -1)
    assert float((x - books.decode(shifted)).square().mean()) > 2 * errors[0]


def test_codebooks_move_in_float32_in_mixed_precision():
    """In bfloat16 a count of 257 would be 256."""
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = []
    for vectors in (x, x.float()):
        torch.manual_seed(0)
        books = ResidualCodebooks(2, 4, 4, decay=0.5)
        with torch.autocast("cpu", torch.bfloat16):
            assert books(vectors).vectors.dtype == torch.float32
        assert [float(book.counts.sum()) for book in books.books] == [152.0, 152.0]  # half of 4 at the start and of 300
        tables.append(torch.cat(books.tables))
    assert torch.equal(*tables)


@pytest.mark.parametrize("spec", [VQVAE(channels=8, blocks=1, num_codes=8), SoundCodec(filters=4, num_codes=16)])
def test_a_codec_trains_in_mixed_precision(spec):
    codec = spec.build(seed=0)
    shape = (2, 3, 32, 32) if isinstance(spec, VQVAE) else (2, 1, 4000)
    signals = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = codec.loss(signals)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(spec.build(seed=0).loss(signals).detach()), rel=0.03)
    assert all(p.grad.isfinite().all() for p in codec.parameters() if p.requires_grad)


def test_perplexity_counts_the_codes_in_use():
    assert code_perplexity(torch.zeros(10, dtype=torch.long), 8) == pytest.approx(1)
    assert code_perplexity(torch.arange(8).repeat(3), 8) == pytest.approx(8)


# ------------------------------------------------------------------------------------------------------------ files


def test_a_folder_without_a_codec_says_so(tmp_path):
    with pytest.raises(NotFound, match=r"must hold the codec of its tokens in codec/"):
        find_codec(tmp_path)
    with pytest.raises(NotFound, match=r"must have a config.json"):
        load_codec(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "vqgam"}, BadFile, "did you mean 'vqgan'"),
        ({"ch": 2**31 - 32, "ch_mult": [1], "attn_resolutions": []}, (Unavailable, BadSetting), "GB|cannot be built"),
        ({"ch_mult": [1] * 40}, BadSetting, "1 to 12 levels"),
        ({"ch_mult": "x"}, BadFile, "ch_mult must be a list"),
        ({"resolution": 2**40}, BadFile, "resolution must be an integer"),
        ({"n_embed": 10}, BadFile, "codebook|embedding"),
        ({"double_z": True}, BadSetting, "double_z must be false"),
        ({"surprise": 1}, BadFile, "surprise"),
    ],
)
def test_a_config_that_lies_is_refused_in_words(codec, tmp_path, change, error, words):
    save_codec(codec, tmp_path, "vqgan")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(error, match=words):
        load_codec(tmp_path)


def test_weights_that_are_not_numbers_are_refused(codec, tmp_path):
    save_codec(codec, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["decoder.first.weight"][0] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadFile, match=r"decoder.first.weight holds NaN"):
        load_codec(tmp_path)


@pytest.fixture(scope="module")
def bytes_of_a_folder(codec, tmp_path_factory):
    folder = save_codec(codec, tmp_path_factory.mktemp("codec"))
    return folder, (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_changed_bytes_are_refused_or_harmless(bytes_of_a_folder, data):
    """Any change of the config or of the header of the weights gives a codec or a Fault, never another exception."""
    folder, config, weights = bytes_of_a_folder
    for path, content, limit in (("config.json", config, len(config)), ("model.safetensors", weights, 1500)):
        changed = bytearray(content)
        for at in data.draw(st.lists(st.integers(0, limit - 1), max_size=3)):
            changed[at] = data.draw(st.integers(0, 255))
        (folder / path).write_bytes(bytes(changed))
    with contextlib.suppress(Fault):
        load_codec(folder)


def test_every_codec_loads_without_the_task_that_trained_it(tmp_path):
    """In a new process: what `headwater continue` imports knows the codecs of its folders."""
    save_codec(SoundCodec(filters=4, num_books=3, num_codes=4).build(seed=0), tmp_path / "sound")
    save_codec(SemanticCodec.of(4, "", seed=0), tmp_path / "semantic")
    code = (
        "import sys; from headwater.audiolm.audio_model import load_codec; [load_codec(each) for each in sys.argv[1:]]"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "sound", tmp_path / "semantic"], check=True)
