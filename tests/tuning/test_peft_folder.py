"""Adapters in peft's layout: the outputs of peft's own modules, both ways through files; and what is refused."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from tiny_models import VOCAB, make, tiny

from headwater import load, load_adapter, save_adapter, tune
from headwater.errors import BadFile, BadSetting, NotFound
from headwater.tuning import DoRA, Full, LoRA, RsLoRA
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

AUTO = {
    "bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM",
    "gpt_neox": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM", "bart": "AutoModelForSeq2SeqLM",
}  # fmt: skip
TOLERANCE = 1e-5
LORA = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {kind: make(root / kind, kind) for kind in AUTO}


def theirs(folder, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, AUTO[kind]).from_pretrained(folder).eval()


IDS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def their_logits(model, kind):
    if kind in ("t5", "bart"):
        return model(IDS.flip(1), decoder_input_ids=IDS).logits
    return model(IDS).logits


@torch.no_grad()
def our_logits(loaded, kind):
    return loaded.model(IDS, source=IDS.flip(1)) if kind in ("t5", "bart") else loaded.model(IDS)


def apart(a, b):
    return float((a - b).abs().max())


def peft_folder(folders, folder, kind, config, random_weights):
    """A folder that peft saved, and the logits of its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(theirs(folders[kind], kind), config).eval()
        random_weights(model)
        model.save_pretrained(folder)
    return their_logits(model, kind)


@pytest.mark.parametrize("kind", AUTO)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_to_headwater_and_back(folders, tmp_path, random_weights, kind, dora):
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", use_dora=dora, use_rslora=True)
    want = peft_folder(folders, tmp_path / "a", kind, config, random_weights)
    loaded = load_adapter(load(folders[kind]), tmp_path / "a")
    assert apart(our_logits(loaded, kind), want) < TOLERANCE
    assert apart(our_logits(load(folders[kind]), kind), want) > 0.1

    save_adapter(loaded, tmp_path / "b")
    back = peft.PeftModel.from_pretrained(theirs(folders[kind], kind), tmp_path / "b").eval()
    assert apart(their_logits(back, kind), want) < TOLERANCE


@pytest.mark.parametrize("kind", AUTO)
def test_headwater_to_peft_and_back(folders, tmp_path, random_weights, kind):
    """q and v alone, in different ranks: within GPT-2's c_attn they are blocks of one B."""
    loaded = tune(load(folders[kind]), LoRA(r=2, alpha=3, target="*attn.q"), RsLoRA(r=3, target=("*attn.v", "*.ffn.*")))
    random_weights(loaded.model)
    want = our_logits(loaded, kind)
    save_adapter(loaded, tmp_path / "a")
    model = peft.PeftModel.from_pretrained(theirs(folders[kind], kind), tmp_path / "a").eval()
    assert apart(their_logits(model, kind), want) < TOLERANCE
    assert apart(our_logits(load_adapter(load(folders[kind]), tmp_path / "a"), kind), want) < TOLERANCE


def test_ranks_alphas_and_layers_by_pattern(folders, tmp_path, random_weights):
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "o_proj", "mlp.up_proj"], layers_to_transform=[1],
        rank_pattern={"q_proj": 2}, alpha_pattern={"mlp.up_proj": 7}, exclude_modules=["o_proj"],
    )  # fmt: skip
    want = peft_folder(folders, tmp_path / "a", "llama", config, random_weights)
    written(tmp_path / "a", target_modules=["q_proj", "o_proj", "mlp.up_proj"])  # peft wrote what they meant
    loaded = load_adapter(load(folders["llama"]), tmp_path / "a")
    assert apart(our_logits(loaded, "llama"), want) < TOLERANCE
    assert sum(".changes." in path for path, _ in loaded.model.named_parameters()) == 4


def test_modules_by_regular_expression(folders, tmp_path, random_weights):
    config = peft.LoraConfig(r=2, target_modules=r".*\.self_attn\.(q|o)_proj", exclude_modules=r".*\.0\..*")
    want = peft_folder(folders, tmp_path / "a", "llama", config, random_weights)
    loaded = load_adapter(load(folders["llama"]), tmp_path / "a")
    assert apart(our_logits(loaded, "llama"), want) < TOLERANCE
    assert apart(our_logits(load(folders["llama"]), "llama"), want) > 0.01


def test_usual_modules_where_none_are_named(folders, tmp_path, random_weights):
    for kind in AUTO:
        want = peft_folder(folders, tmp_path / kind, kind, peft.LoraConfig(r=2), random_weights)
        written(tmp_path / kind, target_modules=None)
        assert apart(our_logits(load_adapter(load(folders[kind]), tmp_path / kind), kind), want) < TOLERANCE


def test_a_trained_head_goes_along(tmp_path, random_weights):
    base = make(
        tmp_path / "base", "bert", head="sequence_classification", architectures=["BertForSequenceClassification"]
    )
    loaded = tune(load(base), LoRA(r=2), Full("head.*"))
    random_weights(loaded.model)
    save_adapter(loaded, tmp_path / "a")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "a").eval()
    with torch.no_grad():
        want = model(IDS).logits
        assert apart(loaded.model(IDS), want) < TOLERANCE
        assert apart(load_adapter(load(base), tmp_path / "a").model(IDS), want) < TOLERANCE


# ------------------------------------------------------------------------------------------------------------ refused


def written(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(folders, tmp_path, random_weights):
    peft_folder(folders, tmp_path / "a", "llama", LORA, random_weights)
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "VERA"}, "peft_type must be LORA"),
        ({"bias": "all"}, "trained biases are not supported"),
        ({"lora_bias": True}, "the setting 'lora_bias' = 'True' is not supported"),
        ({"layer_replication": [[0, 1]]}, "the setting 'layer_replication' ="),
        ({"something_new": 3}, "the setting 'something_new' = '3' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's own weights"),
        ({"r": 4}, "must have rank 4"),
        ({"r": "3"}, "r must be int, got '3'"),
        ({"target_modules": ["q_prj"]}, "match no module of this model; did you mean 'q_proj'"),
        ({"target_modules": "(a+)+b"}, "pattern"),
        ({"target_modules": ["q_proj"]}, "not of this model"),
    ],
)
def test_settings_that_are_refused(folders, saved, changes, words):
    written(saved, **changes)
    with pytest.raises(BadFile) as refused:
        load_adapter(load(folders["llama"]), saved)
    assert words in str(refused.value)


def test_tensors_that_do_not_fit(folders, saved, tmp_path):
    path = saved / "adapter_model.safetensors"
    whole = {name: tensor.clone() for name, tensor in SafetensorsFile(path).items()}
    first = min(whole)

    def message(tensors, base=folders["llama"]):
        write_safetensors(path, tensors)
        loaded = load(base)
        with pytest.raises(BadFile) as refused:
            load_adapter(loaded, saved)
        assert not any(".changes." in name for name, _ in loaded.model.named_parameters())
        return str(refused.value)

    module = first.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
    assert "1 missing" in message({name: t for name, t in whole.items() if not name.startswith(module)})
    assert "missing or unexpected" in message({name: t for name, t in whole.items() if name != first})
    assert "is not known" in message(whole | {"base_model.model.x": torch.zeros(2)})
    assert "NaN" in message(whole | {first: whole[first] * torch.nan})
    wide = make(tmp_path / "wide", "llama", hidden_size=32)
    assert "the adapter does not fit this model" in message(whole, wide)
    assert "not of this model" in message(whole, make(tmp_path / "short", "llama", num_hidden_layers=1))


def test_what_cannot_be_written(folders, tmp_path):
    with pytest.raises(BadSetting, match="the model has no adapter"):
        save_adapter(load(folders["llama"]), tmp_path / "a")
    loaded = tune(load(folders["gpt2"]), DoRA(r=2, target="*attn.q"))
    with pytest.raises(BadSetting, match="must be adapted whole by DoRA"):
        save_adapter(loaded, tmp_path / "a")
    with pytest.raises(BadSetting, match="layout must be headwater, peft"):
        save_adapter(loaded, tmp_path / "a", layout="peff")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(BadFile, match="must be a new or empty folder"):
        save_adapter(tune(tiny("llama"), LoRA(r=2)), tmp_path / "full")
    with pytest.raises(NotFound, match="has no adapter: it needs adapter_config.json"):
        load_adapter(load(folders["gpt2"]), tmp_path / "full")


# ------------------------------------------------------------------------------------- IA3, prefix and prompt tuning

TASKS = {"bert": "FEATURE_EXTRACTION", "t5": "SEQ_2_SEQ_LM", "bart": "SEQ_2_SEQ_LM"}


def prompt_config(method, kind):
    task = TASKS.get(kind, "CAUSAL_LM")
    if method == "ia3":
        return peft.IA3Config(fan_in_fan_out=kind == "gpt2")
    if method == "prefix":
        return peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)
    if method == "p-tuning":
        return peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3)


@torch.no_grad()
def their_outputs(model, kind, virtual):
    """Logits of the real tokens; of a BERT the hidden states."""
    if kind in ("t5", "bart"):
        return model(IDS.flip(1), decoder_input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    output = model(IDS, attention_mask=torch.ones_like(IDS))
    values = output.last_hidden_state if kind == "bert" else output.logits
    return values[:, virtual:]


@pytest.mark.parametrize("kind", AUTO)
@pytest.mark.parametrize("method", ["ia3", "prefix", "prompt", "p-tuning"])
def test_vectors_both_ways(tmp_path, random_weights, kind, method):
    layers = {"t5": {"num_layers": 3}, "bart": {"encoder_layers": 3, "decoder_layers": 3}}.get(kind, {})
    heads = {"num_key_value_heads": 2} if kind == "llama" and method == "prefix" else {}
    base = make(tmp_path / "base", kind, **({"head": "hidden_states"} if kind == "bert" else {}), **layers, **heads)

    def theirs():
        auto = transformers.AutoModel if kind == "bert" else getattr(transformers, AUTO[kind])
        return auto.from_pretrained(base).eval()

    def ours():
        return load(base, head="hidden_states") if kind == "bert" else load(base)

    virtual = 3 if method in ("prompt", "p-tuning") and kind not in ("t5", "bart") else 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(theirs(), prompt_config(method, kind)).eval()
        random_weights(model)
        want = their_outputs(model, kind, virtual)
        model.save_pretrained(tmp_path / "a")
    loaded = load_adapter(ours(), tmp_path / "a")
    assert apart(our_logits(loaded, kind), want) < TOLERANCE
    assert apart(our_logits(ours(), kind), want) > 0.005

    save_adapter(loaded, tmp_path / "b")
    back = peft.PeftModel.from_pretrained(theirs(), tmp_path / "b").eval()
    assert apart(their_outputs(back, kind, virtual), want) < TOLERANCE
