"""Tuned runs: the folder has the adapter and not the base; resumed = uninterrupted; another base is refused."""

from __future__ import annotations

import shutil

import pytest
import torch

import headwater
from headwater.cli import main
from headwater.core import LMHead
from headwater.errors import BadFile, BadSetting, NotFound
from headwater.families.load import load
from headwater.quantization.layers import QuantizedLinear, quantize
from headwater.training.state import StepEvent
from headwater.tuning.base import learned_parameters, tuning_of
from headwater.weights.native import save_native
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

TEXT = "".join(f"the {a} {b} sees a {c}.\n" for a in ("old", "red", "big") for b in ("cat", "dog") for c in "abcdefg")
COMMON = {"batch_tokens": 200, "eval_examples": 4, "log_every": 1, "quiet": True, "context_length": 16}
TUNED = {**COMMON, "max_steps": 6, "eval_every": 3, "checkpoint_steps": 2, "dropout": 0.1}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 6)
    return path


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "run"
    headwater.train(text, out=folder, size="xs", max_steps=4, task="language-model", tokenizer="char", **COMMON)
    return folder


def weights(folder):
    return {name: tensor.clone() for name, tensor in SafetensorsFile(folder / "model" / "adapter.safetensors").items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["lora", "dora", "prefix", "pfeiffer"])
def test_resumed_is_uninterrupted(text, base, tmp_path, method):
    def stop(event):
        if isinstance(event, StepEvent) and event.step == 5:
            raise KeyboardInterrupt

    settings = {**TUNED, "init_from": base, "tune": method, "tune_dropout": 0.1, "ema": 0.9}
    headwater.train(text, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        headwater.train(text, out=tmp_path / "stopped", callbacks=[stop], **settings)
    headwater.resume(tmp_path / "stopped", quiet=True)
    assert equal(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    other = headwater.train(text, out=tmp_path / "other", **{**settings, "seed": 1})
    assert not equal(weights(other.folder), weights(tmp_path / "whole"))


@pytest.fixture(scope="module")
def tuned(text, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned") / "run"
    headwater.train(text, out=folder, init_from=base, tune="lora", tune_target=["all-linear"], **TUNED)
    return folder


def test_the_folder_has_the_adapter_and_not_the_base(base, tuned):
    whole = sum(p.numel() for p in load(base).model.parameters())
    learned = sum(tensor.numel() for tensor in weights(tuned).values())
    assert 0 < learned < whole
    assert not (tuned / "model" / "model.safetensors").exists()
    for checkpoint in (tuned / "checkpoints").iterdir():
        names = set(SafetensorsFile(checkpoint / "model.safetensors"))
        assert names and all(".changes." in name for name in names)


def test_a_tuned_run_is_a_model_as_any_other(base, tuned, text, capsys):
    loaded = load(tuned)
    assert type(loaded.model.decoder.layers[0].self_attn.q) is torch.nn.Linear  # merged
    beside = headwater.load_adapter(load(base), tuned)
    ids = torch.randint(20, (2, 9))
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids), beside.model(ids), atol=1e-5)
        assert not torch.allclose(loaded.model(ids), load(base).model(ids), atol=1e-3)
    completion = headwater.generate(loaded, "the old ", max_tokens=5)
    for words in (["generate", tuned], ["generate", base, "--adapter", tuned]):
        assert main([*map(str, words), "the old ", "--max-tokens", "5"]) == 0
        assert capsys.readouterr().out.rstrip("\n") == completion.text.rstrip("\n")
    assert main(["eval", str(tuned), str(text)]) == 0


def test_the_plan_says_what_learns(base, text, capsys):
    words = ["train", text, "--init-from", base, "--tune", "lora", "--tune-rank", "4", "--dry-run", "--max-steps", "3"]
    assert main(list(map(str, words))) == 0
    assert "lora: 512 weights learn, " in capsys.readouterr().out


def test_a_packed_base_has_as_many_weights_as_its_float_one(base, text, tmp_path, capsys):
    """A table of tokens that the head shares is counted once."""
    loaded = load(base)
    assert loaded.model.spec.tied
    quantize(loaded.model, "int8")
    save_native(tmp_path, loaded.model, loaded.config["metadata"])
    loaded.tokenizer.save(tmp_path)
    size = sum(p.numel() for p in load(base).model.parameters())
    words = ["train", text, "--init-from", tmp_path, "--tune", "lora", "--dry-run", "--max-steps", "3"]
    assert main(list(map(str, words))) == 0
    assert f" of {size + 1024:,}\n" in capsys.readouterr().out


def test_an_adapter_that_does_not_fit_leaves_the_model_as_it_was(base, tuned, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(tuned, folder)
    tensors = weights(tuned)
    first = next(iter(tensors))
    write_safetensors(folder / "model" / "adapter.safetensors", {**tensors, first: tensors[first][:1].contiguous()})

    plain = load(base)
    for parameter in plain.model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(BadFile, match="the adapter does not fit this model"):
        headwater.load_adapter(plain, folder)
    assert tuning_of(plain.model) is None and all(p.requires_grad for p in plain.model.parameters())

    loaded = headwater.load_adapter(load(base), tuned, name="good")
    model = loaded.model
    ids = torch.randint(20, (2, 9))
    with torch.no_grad():
        want = model(ids)
        with pytest.raises(BadFile, match="the adapter does not fit this model"):
            headwater.load_adapter(loaded, folder, name="bad")
        assert torch.equal(model(ids), want)
    assert tuning_of(model).selection.active == "good" and list(tuning_of(model).adapters) == ["good"]


def test_another_base_is_refused(base, tuned, text, tmp_path):
    moved_base, moved = tmp_path / "base" / "run", tmp_path / "tuned" / "run"
    shutil.copytree(base, moved_base)
    headwater.train(text, out=moved, init_from=moved_base, tune="lora", **TUNED)
    config = (moved / "model" / "config.json").read_text()

    # the same folders elsewhere
    shutil.copytree(tmp_path / "base", tmp_path / "x" / "base")
    shutil.copytree(tmp_path / "tuned", tmp_path / "x" / "tuned")
    shutil.move(moved_base, tmp_path / "gone")
    load(tmp_path / "x" / "tuned" / "run")
    with pytest.raises(NotFound, match="its base .* is missing"):
        load(moved)

    # other weights under the same name
    shutil.copytree(tmp_path / "gone", moved_base)
    other = load(moved_base)
    with torch.no_grad():
        other.model.decoder.layers[0].ffn.up.weight.mul_(1.01)
    save_native(moved_base / "model", other.model, other.config["metadata"])
    with pytest.raises(BadFile, match="whose weights are others now"):
        load(moved)
    with pytest.raises(BadFile, match="this is another base"):
        headwater.load_adapter(load(moved_base), moved)
    with pytest.raises(BadSetting, match="base must be the same"):
        headwater.resume(moved, quiet=True, max_steps=8)

    (moved / "model" / "config.json").write_text(config.replace('"LoRA"', '"LoRb"'))
    with pytest.raises(BadSetting, match="no part is called 'LoRb'"):
        load(moved)


def test_a_quantized_base_stays_quantized(base, text, tmp_path):
    loaded = load(base)
    quantize(loaded.model, "int4", ["decoder.layers.*"])
    packed = tmp_path / "packed"
    save_native(packed, loaded.model, loaded.config["metadata"])
    loaded.tokenizer.save(packed)
    before = {
        path: m.blocks.clone() for path, m in load(packed).model.named_modules() if isinstance(m, QuantizedLinear)
    }

    trained = headwater.train(text, out=tmp_path / "run", init_from=packed, tune="lora", **TUNED)
    model = trained.model
    assert any(p.abs().sum() > 0 for name, p in learned_parameters(model).items() if name.endswith("lora_b"))
    after = {path: m.blocks for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert before and all(torch.equal(after.get(path, after.get(f"{path}.base")), b) for path, b in before.items())


def test_a_new_head_learns_with_the_adapter(base, tmp_path, capsys):
    rows = tmp_path / "rows.tsv"
    rows.write_text("text\tlabel\n" + "".join(f"{w} {i} is here\t{w}\n" for i in range(40) for w in ("cat", "dog")))
    trained = headwater.train(
        rows, out=tmp_path / "run", init_from=base, tune="lora", **{**TUNED, "max_steps": 20, "lr": 0.01}
    )
    assert not isinstance(trained.model.spec.head, LMHead)
    assert any(name.startswith("head.") for name in weights(tmp_path / "run"))
    assert main(["classify", str(tmp_path / "run"), "cat 4 is here"]) == 0
    only = headwater.train(rows, out=tmp_path / "head", init_from=base, tune="head", **TUNED)
    assert all(name.startswith("head.") for name in weights(only.folder))


def test_a_tuned_run_is_converted_to_a_whole_model(tuned, tmp_path, capsys):
    assert main(["convert", str(tuned), str(tmp_path / "whole")]) == 0
    ids = torch.randint(20, (2, 9))
    with torch.no_grad():
        assert torch.allclose(load(tmp_path / "whole").model(ids), load(tuned).model(ids), atol=1e-6)


def test_an_adapter_that_stays_beside_its_base_is_not_taken_for_a_whole_model(text, base, tmp_path):
    run = tmp_path / "run"
    headwater.train(text, out=run, init_from=base, tune="houlsby", **{**TUNED, "max_steps": 2, "eval_every": 2})
    words = rf"an adapter beside its weights \(Houlsby\(.*\)\); merge it first .*, or use its base {base}"
    with pytest.raises(BadSetting, match=words):
        headwater.save(load(run), tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    for tune in ("full", "lora"):
        with pytest.raises(BadSetting, match=words):
            headwater.train(text, out=tmp_path / "next", init_from=run, tune=tune, **TUNED)


@pytest.mark.parametrize("method", ["ia3", "houlsby", "parallel", "prompt", "p-tuning"])
def test_every_method_trains_and_loads(text, base, tmp_path, method, capsys):
    sizes = {"tune_tokens": 4, "tune_reduction": 4, "max_steps": 2, "eval_every": 2}
    trained = headwater.train(text, out=tmp_path / "run", init_from=base, tune=method, **{**TUNED, **sizes})
    assert trained.result.state.step == 2
    assert main(["generate", str(tmp_path / "run"), "the old ", "--max-tokens", "3"]) == 0
    assert main(["eval", str(tmp_path / "run"), str(text)]) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tune": "lorra", "init_from": "x"}, "tune must be full, head, decoder, lora, dora, ia3"),
        ({"tune": "lora"}, "needs a base that was trained before; give --init-from"),
        ({"tune": "lora", "init_from": "x", "fsdp": True}, "fsdp and tune=lora cannot be combined"),
        ({"tune": "lora", "tune_rank": 0}, "tune_rank must be an integer"),
    ],
)
def test_settings_that_are_refused(text, tmp_path, settings, words):
    with pytest.raises(BadSetting) as refused:
        headwater.train(text, out=tmp_path / "run", quiet=True, **settings)
    assert words in str(refused.value)


def test_a_head_that_is_tied_to_the_table_is_not_trained_alone(text, base, tmp_path):
    with pytest.raises(BadSetting, match="head.out is tied to decoder.embed.tokens and cannot be trained alone"):
        headwater.train(text, out=tmp_path / "run", init_from=base, tune="head", **TUNED)
    assert not (tmp_path / "run").exists()


def test_a_target_that_matches_nothing(text, base, tmp_path):
    with pytest.raises(BadSetting, match=r"did you mean '\*.self_attn.q'"):
        headwater.train(text, out=tmp_path / "run", init_from=base, tune="lora", tune_target=["*.self_atn.q"], **TUNED)
