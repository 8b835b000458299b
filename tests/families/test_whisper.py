"""Whisper: equal to the public implementation on every state, through every file format; planted faults are seen."""

from __future__ import annotations

import json
import resource
import struct
import time
from dataclasses import replace

import pytest
import torch
import transformers as T

import headwater
from headwater.audio.feature_extractor import feature_extractor_config
from headwater.audio.mel import log_mel
from headwater.core import Attention, FeedForward
from headwater.errors import BadFile
from headwater.families import FAMILIES
from headwater.families.load import load
from headwater.parts import swap
from headwater.weights.ctranslate2 import CTranslate2File
from headwater.weights.hf_config import HFConfig

SIZES = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_mel_bins": 8,
    "max_source_positions": 10, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = T.WhisperForConditionalGeneration(T.WhisperConfig(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases too
    return model


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("whisper") / "model"
    theirs.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sound():
    return torch.randn(2, 8, 20), torch.randint(4, 60, (2, 7))


def their_states(theirs, sound):
    mel, ids = sound
    with torch.no_grad():
        out = theirs(input_features=mel, decoder_input_ids=ids, output_hidden_states=True)
    return out.encoder_last_hidden_state, out.decoder_hidden_states[-1], out.logits


def our_states(model, sound):
    mel, ids = sound
    with torch.no_grad():
        memory = model.encode(mel)
        states = model.hidden_states(model.inputs(ids), memory=memory)
        return memory.hidden_states, states, model(ids, source=mel)


def distance(model, theirs, sound) -> float:
    pairs = zip(our_states(model, sound), their_states(theirs, sound), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_equals_the_public_implementation(theirs, folder, sound):
    loaded = load(folder)
    assert distance(loaded.model, theirs, sound) < 2e-5
    assert loaded.max_positions == 12


def test_what_is_saved_is_read_by_transformers(theirs, folder, sound, tmp_path):
    headwater.save(load(folder), tmp_path / "saved")
    again = T.WhisperForConditionalGeneration.from_pretrained(tmp_path / "saved")
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in theirs.named_parameters()
    }
    assert all(torch.equal(a, b) for a, b in zip(their_states(again, sound), their_states(theirs, sound), strict=True))


def test_the_spectrogram_of_a_saved_folder(small, tmp_path):
    """transformers computes the same from preprocessor_config.json, as long as the window of whole seconds."""
    for frames, seconds in ((3000, 30), (250, 3)):
        config = feature_extractor_config(80, frames)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
        extractor = T.WhisperFeatureExtractor.from_pretrained(tmp_path)
        samples = 0.3 * torch.sin(torch.arange(16_000) / 9)
        theirs = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt")["input_features"][0]
        assert (theirs - log_mel(samples, seconds=seconds)).abs().max() < 1e-5

    saved = headwater.save(small, tmp_path / "saved")
    written = json.loads((saved / "preprocessor_config.json").read_text())
    assert written["feature_size"] == SIZES["num_mel_bins"]
    assert load(saved).processor is None  # it is not one of images


def test_the_spec_finds_its_family(folder, tmp_path):
    model = load(folder).model
    path = headwater.save(model, tmp_path / "saved", layout="whisper")
    assert load(path).config["model_type"] == "whisper"


def changed(folder, change) -> object:
    """The model with a changed spec and the same weights."""
    model = load(folder).model
    other = change(model.spec).build(seed=0).eval()
    weights = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        if name in weights:
            parameter.data = weights[name].data
    return other


FAULTS = {
    "tanh gelu": lambda spec: swap(spec, FeedForward, lambda ffn: replace(ffn, activation="gelu_tanh")),
    "scale of the scores": lambda spec: swap(spec, Attention, lambda attn: replace(attn, scale=1.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_changed_part_would_be_seen(theirs, folder, sound, fault):
    assert distance(changed(folder, FAULTS[fault]), theirs, sound) > 1e-4


@pytest.mark.parametrize(
    "path", ["encoder.embed.position.table", "encoder.embed.second", "decoder.layers.1.cross_attn.v"]
)
def test_a_changed_weight_would_be_seen(theirs, folder, sound, path):
    model = load(folder).model
    model.get_submodule(path).weight.data.mul_(1.01)
    assert distance(model, theirs, sound) > 1e-4


PUBLISHED = {  # width, encoder and decoder layers, heads, vocabulary, mel bins; parameters
    "tiny": ((384, 4, 4, 6, 51865, 80), 37_760_640),
    "tiny.en": ((384, 4, 4, 6, 51864, 80), 37_760_256),
    "base": ((512, 6, 6, 8, 51865, 80), 72_593_920),
    "base.en": ((512, 6, 6, 8, 51864, 80), 72_593_408),
    "small": ((768, 12, 12, 12, 51865, 80), 241_734_912),
    "medium": ((1024, 24, 24, 16, 51865, 80), 763_857_920),
    "large-v2": ((1280, 32, 32, 20, 51865, 80), 1_543_304_960),
    "large-v3": ((1280, 32, 32, 20, 51866, 128), 1_543_490_560),
    "turbo": ((1280, 32, 4, 20, 51866, 128), 808_878_080),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts(name):
    (width, encoder, decoder, heads, vocab, mels), count = PUBLISHED[name]
    config = {
        "d_model": width, "vocab_size": vocab, "num_mel_bins": mels, "encoder_layers": encoder,
        "encoder_ffn_dim": 4 * width, "decoder_layers": decoder, "decoder_ffn_dim": 4 * width,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads,
    }  # fmt: skip
    model = FAMILIES["whisper"].read_spec(HFConfig(config), "language").on_meta()
    assert sum(p.numel() for p in model.parameters()) == count


# ------------------------------------------------------------------------------------------------------ CTranslate2


def ct2_string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


DTYPES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4}


def ct2_file(variables: dict[str, torch.Tensor]) -> bytes:
    raw = struct.pack("<I", 6) + ct2_string("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, tensor in variables.items():
        data = tensor.contiguous().numpy().tobytes()
        raw += ct2_string(name) + struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        raw += struct.pack("<BI", DTYPES[tensor.dtype], len(data)) + data
    return (
        raw + struct.pack("<I", 1) + ct2_string("decoder/projection/weight") + ct2_string("decoder/embeddings/weight")
    )


def ct2_variables(theirs) -> dict[str, torch.Tensor]:
    """The weights of a model in transformers under CTranslate2's names."""
    state = {name.removeprefix("model."): tensor for name, tensor in theirs.state_dict().items()}

    def zeros(name):  # a bias of the keys, which CTranslate2 stores
        return torch.zeros(state[name].shape[0])

    found = {"decoder/embeddings/weight": state["decoder.embed_tokens.weight"]}
    for side, heads in (("encoder", 4), ("decoder", 2)):
        found[f"{side}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        plain = {f"{side}/layer_norm": f"{side}.layer_norm"}
        if side == "encoder":
            plain |= {f"{side}/{name}": f"{side}.{name}" for name in ("conv1", "conv2")}
        for layer in range(2 if side == "encoder" else 3):
            ours = f"{side}/layer_{layer}"
            old = f"{side}.layers.{layer}"
            attn = f"{old}.self_attn"
            parts = [f"{attn}.{name}_proj" for name in "qkv"]
            found[f"{ours}/self_attention/linear_0/weight"] = torch.cat([state[f"{part}.weight"] for part in parts])
            biases = [state[f"{parts[0]}.bias"], zeros(f"{parts[1]}.weight"), state[f"{parts[2]}.bias"]]
            found[f"{ours}/self_attention/linear_0/bias"] = torch.cat(biases)
            plain[f"{ours}/self_attention/linear_1"] = f"{attn}.out_proj"
            plain[f"{ours}/self_attention/layer_norm"] = f"{old}.self_attn_layer_norm"
            if side == "decoder":
                cross = f"{old}.encoder_attn"
                keys = [state[f"{cross}.k_proj.weight"], state[f"{cross}.v_proj.weight"]]
                found[f"{ours}/attention/linear_1/weight"] = torch.cat(keys)
                found[f"{ours}/attention/linear_1/bias"] = torch.cat(
                    [zeros(f"{cross}.k_proj.weight"), state[f"{cross}.v_proj.bias"]]
                )
                plain[f"{ours}/attention/linear_0"] = f"{cross}.q_proj"
                plain[f"{ours}/attention/linear_2"] = f"{cross}.out_proj"
                plain[f"{ours}/attention/layer_norm"] = f"{old}.encoder_attn_layer_norm"
            plain |= {f"{ours}/ffn/linear_0": f"{old}.fc1", f"{ours}/ffn/linear_1": f"{old}.fc2"}
            plain[f"{ours}/ffn/layer_norm"] = f"{old}.final_layer_norm"
        for name, path in plain.items():
            norm = name.endswith("layer_norm")
            found[f"{name}/{'gamma' if norm else 'weight'}"] = state[f"{path}.weight"]
            found[f"{name}/{'beta' if norm else 'bias'}"] = state[f"{path}.bias"]
    return found


@pytest.fixture
def ct2_folder(tmp_path, tokenizer_json):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json)
    (tmp_path / "config.json").write_text(
        '{"alignment_heads": [[1, 0]], "suppress_ids": [5], "suppress_ids_begin": [6]}'
    )
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer_json():
    import tokenizers

    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")).to_str()


def test_ctranslate2_folders(theirs, ct2_folder, sound):
    (ct2_folder / "model.bin").write_bytes(ct2_file(ct2_variables(theirs)))
    loaded = load(ct2_folder)
    assert distance(loaded.model, theirs, sound) < 2e-5
    assert loaded.generation_config["alignment_heads"] == [[1, 0]]


def test_ctranslate2_in_8_bits(theirs, ct2_folder, sound):
    variables = ct2_variables(theirs)
    for name in [name for name in variables if name.endswith("weight") and variables[name].dim() == 2]:
        scale = 127 / variables[name].abs().amax(1)
        variables[name] = (variables[name] * scale[:, None]).round().to(torch.int8)
        variables[f"{name}_scale"] = scale
    (ct2_folder / "model.bin").write_bytes(ct2_file(variables))
    assert 1e-4 < distance(load(ct2_folder).model, theirs, sound) < 0.5


def test_keys_with_a_bias_are_refused(theirs, ct2_folder):
    variables = ct2_variables(theirs)
    variables["encoder/layer_0/self_attention/linear_0/bias"] += 1
    (ct2_folder / "model.bin").write_bytes(ct2_file(variables))
    with pytest.raises(BadFile, match="keys of Whisper have no bias"):
        load(ct2_folder)


def test_damaged_ctranslate2_files_are_refused(theirs, tmp_path):
    fuzz(theirs, tmp_path, 300)


@pytest.mark.slow
def test_five_thousand_damaged_ctranslate2_files(theirs, tmp_path):
    fuzz(theirs, tmp_path, 5000)


def report_fuzz(count: int, refused: int, begin: float, before: int) -> None:
    """None hangs, none allocates more than it has; begin: processor seconds, before: the peak of memory in KB."""
    seconds = time.process_time() - begin
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{count:,} files: {refused:,} refused, {seconds:.1f} s, {grown:.0f} MB more than before")
    assert refused > count // 4
    assert seconds < 1 + 0.1 * count
    assert grown < 256


def fuzz(theirs, folder, count: int) -> None:
    """Mutate bytes of the headers, and cut the file: it is refused, or every tensor is as large as it says."""
    import numpy as np

    raw = ct2_file({name: tensor[:4] if tensor.dim() else tensor for name, tensor in ct2_variables(theirs).items()})
    random = np.random.default_rng(0)
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    for _unused in range(count):
        mutated = bytearray(raw)
        for _again in range(int(random.integers(1, 6))):
            mutated[int(random.integers(0, 400 if random.random() < 0.7 else len(raw)))] = int(random.integers(0, 256))
        if random.random() < 0.3:
            mutated = mutated[: int(random.integers(0, len(raw)))]
        path = folder / "model.bin"
        path.write_bytes(mutated)
        try:
            file = CTranslate2File(path)
            assert sum(file[name].numel() for name in file) <= 8 * len(raw)
        except BadFile as fault:
            assert "\n" not in str(fault)
            refused += 1
    report_fuzz(count, refused, begin, before)


# ------------------------------------------------------------------------------------- ggml files, OpenAI's checkpoints


@pytest.fixture(scope="module")
def small():
    """A small Whisper with a byte-level tokenizer of 300 pieces."""
    from headwater.families.hf_folder import LoadedModel
    from headwater.families.whisper_formats import special_tokens
    from headwater.text.loaders.ranks import ranked_spec
    from headwater.text.tokenizer import Tokenizer

    letters = [bytes([byte]) for byte in range(256)]
    pieces = [*letters, b"th", b"the", b" the", b"an", b"and", *(b" " + letter for letter in letters[97:123])]
    vocab = len(pieces) + 2 + 3 + 6 + 1501
    tokenizer = Tokenizer(ranked_spec(pieces, special_tokens(vocab, len(pieces))))
    config = {**SIZES, "vocab_size": vocab}
    reader = HFConfig({key: value for key, value in config.items() if value is not None})
    model = FAMILIES["whisper"].read_spec(reader, "language").build(seed=0).eval()
    return LoadedModel(model, tokenizer, {**config, "model_type": "whisper"}, "small", "language")


def test_ggml_files(small, sound, tmp_path):
    path = headwater.save(small, tmp_path / "ggml-small.bin")
    loaded = load(path)
    ours, again = our_states(small.model, sound), our_states(loaded.model, sound)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, again, strict=True)) < 5e-3  # of 16 bits
    text = " the then and  thé 你好\n"
    assert loaded.tokenizer.encode(text) == small.tokenizer.encode(text)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    for token in ("<|endoftext|>", "<|notimestamps|>", "<|30.00|>", "<|zh|>"):
        assert loaded.tokenizer.token_to_id(token) == small.tokenizer.token_to_id(token) is not None
    with pytest.raises(headwater.BadSetting, match="only a Whisper with its tokenizer"):
        headwater.save(small.model, tmp_path / "other.bin")


def test_openai_names_there_and_back(small):
    from headwater.families.whisper_formats import hf_to_openai, openai_to_hf

    family = FAMILIES["whisper"]
    names = list(family.body_names.export(dict(small.model.named_parameters()), heads=4, kv_heads=4))
    assert [openai_to_hf(hf_to_openai(name)) for name in names] == names
    assert hf_to_openai("model.decoder.layers.2.encoder_attn.k_proj.weight") == "decoder.blocks.2.cross_attn.key.weight"


def openai_checkpoint(small) -> dict:
    from headwater.families.whisper_formats import hf_to_openai

    tensors = FAMILIES["whisper"].body_names.export(dict(small.model.named_parameters()), heads=4, kv_heads=4)
    state = {hf_to_openai(name): tensors[name].detach().clone() for name in tensors}
    return {"dims": {"n_audio_head": 4, "n_text_head": 2}, "model_state_dict": state}


def test_openai_checkpoints_are_converted(small, sound, tmp_path, forked_pickles):
    from headwater.families.convert import convert

    checkpoint = openai_checkpoint(small)
    torch.save(checkpoint, tmp_path / "small.pt")
    (tmp_path / "words").mkdir()
    small.tokenizer.save(tmp_path / "words")
    result = convert(tmp_path / "small.pt", tmp_path / "new", vocabulary=tmp_path / "words")
    ours, again = our_states(small.model, sound), our_states(result.loaded.model, sound)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    assert load(tmp_path / "new").tokenizer is not None
    torch.save({**checkpoint, "dims": {"n_audio_head": "six"}}, tmp_path / "bad.pt")
    with pytest.raises(BadFile, match="must be positive integers"):
        convert(tmp_path / "bad.pt", tmp_path / "other")


def test_damaged_ggml_files_are_refused(small, tmp_path):
    fuzz_ggml(small, tmp_path, 300)


@pytest.mark.slow
def test_five_thousand_damaged_ggml_files(small, tmp_path):
    fuzz_ggml(small, tmp_path, 5000)


def fuzz_ggml(small, folder, count: int) -> None:
    """Mutate the sizes, the tokens, and the entries and values of tensors; cut some of the files."""
    import numpy as np

    from headwater.weights.ggml import GgmlFile

    path = headwater.save(small, folder / "ggml.bin")
    raw = path.read_bytes()
    entries = [tensor.offset for tensor in GgmlFile(path)._tensors.values()]
    random = np.random.default_rng(0)
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    for _unused in range(count):
        mutated = bytearray(raw)
        for _again in range(int(random.integers(1, 4))):
            sizes = int(random.integers(0, 60))
            entry = int(random.choice(entries)) - int(random.integers(1, 60))  # its name, and the numbers before it
            anywhere = int(random.integers(0, len(raw)))
            mutated[(sizes, entry, anywhere)[int(random.integers(0, 3))]] = int(random.integers(0, 256))
        if random.random() < 0.2:
            del mutated[int(random.integers(0, len(raw))) :]
        (folder / "mutated.bin").write_bytes(mutated)
        try:
            file = GgmlFile(folder / "mutated.bin")
            assert sum(file[name].numel() for name in file) <= 8 * len(raw)
        except BadFile as fault:
            assert "\n" not in str(fault)
            refused += 1
    assert refused < 0.9 * count
    report_fuzz(count, refused, begin, before)


# ------------------------------------------------------------------------------------------------ classification


@pytest.fixture(scope="module")
def their_classifier(tmp_path_factory):
    torch.manual_seed(1)
    config = T.WhisperConfig(**SIZES, classifier_proj_size=20, num_labels=5)
    model = T.WhisperForAudioClassification(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("classifier") / "model"
    model.save_pretrained(path)
    return model, path


def test_a_classifier_equals_the_public_implementation(their_classifier, sound, tmp_path):
    model, path = their_classifier
    mel, _ids = sound
    with torch.no_grad():
        theirs = model(mel).logits
        loaded = load(path)
        assert (loaded.model(mel) - theirs).abs().max() < 2e-5
        headwater.save(loaded, tmp_path / "saved")
        again = T.WhisperForAudioClassification.from_pretrained(tmp_path / "saved")
        assert torch.equal(again(mel).logits, theirs)
        loaded.model.head.projector.bias.data += 0.1
        assert (loaded.model(mel) - theirs).abs().max() > 1e-3  # the fault is seen


def test_a_weighted_sum_of_layers_is_refused(their_classifier, tmp_path):
    import json
    import shutil

    shutil.copytree(their_classifier[1], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"use_weighted_layer_sum": True}))
    with pytest.raises(BadFile, match="use_weighted_layer_sum must be false"):
        load(tmp_path / "model")
