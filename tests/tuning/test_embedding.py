"""LoRA of tables of tokens: its formula and laws; tied and quantized tables; peft's own modules, both ways."""

from __future__ import annotations

import json

import pytest
import torch
from tests.tuning.conftest import VOCAB, randomize
from torch.nn import functional as F

from headwater import load, load_adapter, save_adapter, tune
from headwater.errors import BadFile, BadSetting
from headwater.families.builders import decoder
from headwater.generation.engine import Engine
from headwater.generation.request import Request
from headwater.quantization.layers import QuantizedEmbedding, quantize
from headwater.tuning import DoRA, LoRA, PromptTuning, RsLoRA, merge, remove_adapter, tuning_of, use_adapter
from headwater.tuning.base import selection_of
from headwater.tuning.embedding import LowRankTable
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

TABLE = "*.embed.tokens"


@torch.no_grad()
def test_it_computes_its_formula_and_the_tied_head_stays(model, ids):
    head = model.head.out.weight
    assert head is model.decoder.embed.tokens.weight
    base = model(ids)
    tune(model, LoRA(r=3, alpha=5, target=TABLE))
    assert torch.equal(model(ids), base)  # a new adapter changes nothing
    randomize(model)
    change = model.decoder.embed.tokens.changes["default"]
    want = head[ids] + 5 / 3 * change.lora_a.t()[ids] @ change.lora_b.t()
    assert torch.allclose(model.decoder.embed.tokens(ids), want, atol=1e-6)
    assert model.head.out.weight is head
    assert (model(ids) - base).abs().max() > 0.1


@torch.no_grad()
def test_merged_is_unmerged_and_back(model, ids):
    tune(model, LoRA(r=3, target=TABLE), RsLoRA(r=2, target="*.self_attn.*"))
    base_head = model.head.out.weight.clone()
    randomize(model)
    tuned = model(ids)
    merged = merge(model)
    assert merged.largest_change < 1e-5 and torch.allclose(model(ids), tuned, atol=1e-5)
    assert not model.spec.tied and torch.equal(model.head.out.weight, base_head)
    merged.undo()
    assert torch.equal(model(ids), tuned) and model.spec.tied
    remove_adapter(model)
    assert model.head.out.weight is model.decoder.embed.tokens.weight


@torch.no_grad()
def test_a_merge_that_changed_the_tied_head_too_would_be_seen(model, monkeypatch):
    """The planted fault: the output layer takes the table's change along."""
    tune(model, LoRA(r=3, target=TABLE))
    randomize(model)
    delta = LowRankTable.delta

    def both(change):
        model.head.out.weight.add_(delta(change))
        return delta(change) * 0

    monkeypatch.setattr(LowRankTable, "delta", both)
    assert merge(model).largest_change > 0.1


def test_only_the_adapter_learns(model, ids):
    before = model.head.out.weight.detach().clone()
    tune(model, LoRA(r=4, target=TABLE))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _step in range(2):
        F.cross_entropy(model.train()(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    change = model.decoder.embed.tokens.changes["default"]
    assert change.lora_a.abs().sum() > 0 and model.head.out.weight.grad is None
    assert torch.equal(model.head.out.weight, before)
    unseen = [token for token in range(VOCAB) if token not in ids]
    assert unseen and not change.lora_a[:, unseen].any()  # a token that was not read keeps its vector


@torch.no_grad()
def test_a_quantized_table_keeps_its_blocks(ids):
    model = decoder(VOCAB, d_model=32, heads=2, layers=2, d_ff=64, position="rotary").build(seed=0).eval()
    quantize(model, "int8")
    assert isinstance(model.decoder.embed.tokens, QuantizedEmbedding)
    blocks = model.decoder.embed.tokens.blocks.clone()
    base = model(ids)
    tune(model, LoRA(r=3, target=(TABLE, "*attn.q")))
    randomize(model)
    tuned = model(ids)
    assert (tuned - base).abs().max() > 0.1
    merged = merge(model)
    assert torch.allclose(model(ids), tuned, atol=1e-4)
    merged.undo()
    assert torch.equal(model.decoder.embed.tokens.base.blocks, blocks)
    use_adapter(model, None)
    assert torch.equal(model(ids), base)


@torch.no_grad()
def test_each_row_has_its_own_table(model, ids):
    want = {None: model(ids)}
    for name in ("a", "b"):
        tune(model, LoRA(r=3, target=TABLE), name=name)
        randomize(model, seed=ord(name))
        want[name] = model(ids)
    with selection_of(model).per_row(["a", None, "b", "a"]):
        got = model(ids)
    for row, name in enumerate(["a", None, "b", "a"]):
        assert torch.allclose(got[row], want[name][row], atol=1e-6), row
    assert (want["a"] - want["b"]).abs().max() > 0.1

    use_adapter(model, None)
    engine = Engine(model, max_seq_len=32)
    sequences = [engine.submit(Request((5, 6, 7), max_tokens=6, adapter=name)) for name in ("a", "b", None)]
    engine.run()
    for sequence, name in zip(sequences, ("a", "b", None), strict=True):
        use_adapter(model, name)
        tokens = [5, 6, 7]
        for _step in range(6):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert list(sequence.output_ids) == tokens[3:]


def test_patterns_and_what_is_refused(model):
    tune(model, LoRA(target="all-linear"), name="linear")
    assert not any("embed" in path and "changes" in path for path, _ in model.named_parameters())
    for methods, words in (
        ((DoRA(target=TABLE),), "DoRA changes linear layers, and decoder.embed.tokens is a table of tokens; use LoRA"),
        ((LoRA(r=33, target=TABLE),), r"r must be at most the width of the layer \(32, decoder.embed.tokens\), got 33"),
        ((LoRA(target="*.embed.token"),), r"did you mean '\*?decoder.embed.tokens'"),
        ((PromptTuning(2), LoRA(target=TABLE)), "has virtual tokens, and LoRA cannot change it too"),
        ((LoRA(target=TABLE), PromptTuning(2)), "virtual tokens cannot be added to it too"),
    ):
        with pytest.raises(BadSetting, match=words):
            tune(model, *methods, name="new")
        assert list(tuning_of(model).adapters) == ["linear"]


# --------------------------------------------------------------------------------------------------------------- peft

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tests.tuning.test_peft_folder import (  # noqa: E402
    AUTO,
    IDS,
    TOLERANCE,
    apart,
    folders,  # noqa: F401
    our_logits,
    peft_folder,
    their_logits,
    theirs,
    written,
)

NAMES = {
    "bert": "word_embeddings", "gpt2": "wte", "llama": "embed_tokens", "gpt_neox": "embed_in", "t5": "embed_tokens",
    "bart": "embed_tokens",
}  # fmt: skip
ATTENTION = {"bert": "query", "gpt2": "c_attn", "gpt_neox": "query_key_value", "t5": "q"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AUTO)
def test_peft_to_headwater_and_back(folders, tmp_path, random_weights, kind):  # noqa: F811
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=[NAMES[kind], ATTENTION.get(kind, "q_proj")],
        rank_pattern={NAMES[kind]: 2}, use_rslora=True,
    )  # fmt: skip
    want = peft_folder(folders, tmp_path / "a", kind, config, random_weights)
    loaded = load_adapter(load(folders[kind]), tmp_path / "a")
    assert apart(our_logits(loaded, kind), want) < TOLERANCE
    merge(load_adapter(loaded := load(folders[kind]), tmp_path / "a").model)
    assert apart(our_logits(loaded, kind), want) < TOLERANCE
    assert apart(our_logits(load(folders[kind]), kind), want) > 0.1

    save_adapter(load_adapter(load(folders[kind]), tmp_path / "a"), tmp_path / "b")
    back = peft.PeftModel.from_pretrained(theirs(folders[kind], kind), tmp_path / "b").eval()
    assert apart(their_logits(back, kind), want) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
def test_headwater_to_peft(folders, tmp_path, random_weights):  # noqa: F811
    loaded = tune(load(folders["bart"]), LoRA(r=2, target="encoder.embed.tokens"))
    random_weights(loaded.model)
    save_adapter(loaded, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"] == [
        "model.encoder.embed_tokens"
    ]
    model = peft.PeftModel.from_pretrained(theirs(folders["bart"], "bart"), tmp_path / "a").eval()
    assert apart(their_logits(model, "bart"), our_logits(loaded, "bart")) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
def test_what_peft_stores_beside_it_must_be_the_base(folders, tmp_path, random_weights):  # noqa: F811
    """peft writes the whole table where embed_tokens is adapted."""
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"])
    want = peft_folder(folders, tmp_path / "a", "llama", config, random_weights)
    assert apart(our_logits(load_adapter(load(folders["llama"]), tmp_path / "a"), "llama"), want) < TOLERANCE

    path = tmp_path / "a" / "adapter_model.safetensors"
    whole = {name: tensor.clone() for name, tensor in SafetensorsFile(path).items()}
    (copy,) = (name for name in whole if name.endswith("embed_tokens.base_layer.weight"))
    (a,) = (name for name in whole if name.endswith("lora_embedding_A"))

    def message(tensors):
        write_safetensors(path, tensors)
        with pytest.raises(BadFile) as refused:
            load_adapter(load(folders["llama"]), tmp_path / "a")
        return str(refused.value)

    assert "was trained or resized beside the adapter" in message(whole | {copy: whole[copy] + 1})
    assert "was trained or resized beside the adapter" in message(whole | {copy: whole[copy][:-1]})
    assert "the adapter does not fit: 1 missing or unexpected" in message({n: t for n, t in whole.items() if n != a})
    assert "must have rank 2" in message(whole | {a: whole[a][:1]})
    assert "the adapter does not fit this model" in message(whole | {a: whole[a][:, :-1].contiguous()})
    write_safetensors(path, whole)
    written(tmp_path / "a", use_dora=True)
    assert "missing or unexpected" in message(whole)
    loaded = tune(load(folders["llama"]), DoRA(target="*attn.q"), LoRA(r=2, target=TABLE))
    with pytest.raises(BadSetting, match="peft cannot have LoRA of a table of tokens beside DoRA"):
        save_adapter(loaded, tmp_path / "b")
    assert IDS.shape == (2, 7)
