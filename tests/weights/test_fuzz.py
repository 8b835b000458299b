"""Fuzzing: each of twenty thousand damaged files is read or refused in one line, without crash, hang or memory growth.

Every kind of file starts from a small valid one. A mutation flips, cuts, repeats or moves bytes, or puts an extreme
number or a meaningful word where it does not belong. The seed is fixed, so a failure can be repeated by its number.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time

import pytest
import torch

from headwater.errors import Fault
from headwater.io.strict_json import parse_json_object
from headwater.text.loaders import sentencepiece_model
from headwater.text.loaders.gguf import KEY_PREFIX, tokenizer_from_gguf
from headwater.text.loaders.sentencepiece import plain_spec
from headwater.text.spec import added_token, bpe_model, byte_level, replace_string, template_processing, tokenizer_spec
from headwater.text.tokenizer import Tokenizer
from headwater.weights.checks import is_finite
from headwater.weights.gguf import GgufFile, write_gguf
from headwater.weights.hf_config import HFConfig, read_rope_config
from headwater.weights.safetensors import SafetensorsFile, write_safetensors
from headwater.weights.shards import WEIGHTS_INDEX_NAME, ShardedSafetensors

NUMBERS = [
    b"0",
    b"-1",
    b"1",
    b"2",
    b"4294967296",
    b"9223372036854775807",
    b"18446744073709551616",
    b"1e400",
    b"1e-9",
    b"NaN",
    b"true",
    b"null",
    b"[]",
    b"{}",
    b'""',
    b'"../x"',
    b'"a"',
    b"99999999999999999999999999",
]
WORDS = [
    b'"dtype"',
    b'"shape"',
    b'"F32"',
    b'"BF16"',
    b'"BOOL"',
    b'"type"',
    b'"Sequence"',
    b'"Unigram"',
    b'"BPE"',
    b'"WordPiece"',
    b'"Regex"',
    b'"vocab"',
    b'"merges"',
    b'"<s>"',
    b'"A"',
    b'"auto_map"',
    b'"rope_scaling"',
    b'"factor"',
    b",",
    b":",
    b"{",
    b"}",
    b"[",
    b"]",
    b"\\u0000",
]
EXTREMES = [0, 1, 2, 8, 9, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def mutated(raw: bytes, draw: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(9)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << draw.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = draw.randrange(256)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + draw.randrange(1, 20)]
        elif kind == 4:
            piece = data[at : at + draw.randrange(1, 60)]
            there = draw.randrange(len(data) + 1)
            data[there:there] = piece * draw.choice((1, 1, 2, 50))
        elif kind == 5:
            width = draw.choice("BHIQ")
            value = draw.choice(EXTREMES) % (1 << 8 * struct.calcsize(width))
            data[at : at + struct.calcsize(width)] = struct.pack("<" + width, value)
        elif kind == 6:
            data[at : at + draw.choice((0, 1, 3))] = draw.choice(WORDS)
        elif kind == 7:  # a number in text, replaced
            digits = [
                n for n in range(len(data)) if chr(data[n]).isdigit() and (n == 0 or not chr(data[n - 1]).isdigit())
            ]
            if digits:
                begin = draw.choice(digits)
                end = begin
                while end < len(data) and chr(data[end]).isdigit():
                    end += 1
                data[begin:end] = draw.choice(NUMBERS)
        else:
            data[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    return bytes(data)


def safetensors_seed(folder):
    write_safetensors(
        folder / "seed",
        {"a.weight": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor([True, False]), "d": torch.empty(0)},
    )
    return (folder / "seed").read_bytes()


def read_safetensors(path):
    file = SafetensorsFile(path)
    assert all(isinstance(is_finite(file[name]), bool) for name in file)
    return [file[name].sum() for name in file if file[name].numel()]


def index_seed(folder):
    for name in ("one", "two"):
        write_safetensors(folder / f"{name}.safetensors", {name: torch.ones(2)})
    return json.dumps(
        {"metadata": {"total_size": 16}, "weight_map": {"one": "one.safetensors", "two": "two.safetensors"}}
    ).encode()


def config_seed(folder):
    return json.dumps(
        {
            "model_type": "llama",
            "architectures": ["X"],
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": [1, 2],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_theta": 10000.0,
        }
    ).encode()


def read_config(path):
    c = HFConfig.from_json_file(path)
    (
        c.get_int("hidden_size"),
        c.get_int("num_attention_heads"),
        c.get_num_layers("num_hidden_layers"),
        c.get_float("rms_norm_eps"),
    )
    (
        c.get_str("hidden_act", choices=("silu", "gelu")),
        c.get_bool("tie_word_embeddings"),
        read_rope_config(c),
        c.refuse_unread(),
    )


def tokenizer_seed(folder):
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "Ġ": 4, "Ġa": 5}
    spec = tokenizer_spec(
        bpe_model(vocab, [["a", "b"], ["Ġ", "a"]], unk_token="a"),
        normalizer=[{"type": "NFC"}, replace_string("x", "b")],
        pre_tokenizer=[byte_level(use_regex=True)],
        decoder=[byte_level()],
        added_tokens=[added_token("<s>", 3)],
        post_processor=template_processing("<s> $A:0", "<s> $A $B:1", vocab),
    )
    return json.dumps(spec, ensure_ascii=False).encode()


def unigram_seed(folder):
    pieces = [["<unk>", 0.0], ["▁", -1.0], ["a", -2.0], ["b", -2.5], ["▁ab", -1.5], ["</s>", 0.0]]
    spec = tokenizer_spec(
        {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
        normalizer=[{"type": "Prepend", "prepend": "▁"}],
        pre_tokenizer=[],
        decoder=[{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}],
        added_tokens=[added_token("</s>", 5)],
    )
    return json.dumps(spec, ensure_ascii=False).encode()


def use(tokenizer):
    for text in ("ab <s> a</s>b", "", "ab ab\n"):
        tokenizer.decode(tokenizer.encode(text))
        tokenizer.encode(text, parse_special=True)
    tokenizer.display_pieces(range(min(len(tokenizer), 6)))


def read_tokenizer(path):
    use(Tokenizer(parse_json_object(path.read_bytes(), path), {"bos": "<s>"}, "", path))


def gguf_seed(folder):
    metadata = {
        "general.architecture": "llama",
        KEY_PREFIX + "model": "gpt2",
        KEY_PREFIX + "pre": "gpt-2",
        KEY_PREFIX + "tokens": ["a", "b", "ab", "<s>"],
        KEY_PREFIX + "merges": ["a b"],
        KEY_PREFIX + "token_type": [1, 1, 1, 3],
        KEY_PREFIX + "bos_token_id": 3,
        "x.eps": 0.5,
    }
    write_gguf(folder / "seed", metadata, {"q.weight": torch.randn(2, 32), "n": torch.ones(5)}, "Q8_0")
    return (folder / "seed").read_bytes()


def read_gguf(path):
    file = GgufFile(path)
    for name in file:
        file.quantized_blocks(name), file[name]
    use(tokenizer_from_gguf(file.metadata, path))


def spm_seed(folder):
    def message(number, raw):
        return bytes([number << 3 | 2, len(raw)]) + raw

    pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("▁", -1.0, 1),
        ("a", -2.0, 1),
        ("b", -2.5, 1),
        ("▁ab", -1.5, 1),
        ("ab", -1.0, 1),
    ]
    body = b"".join(
        message(1, message(1, t.encode()) + b"\x15" + struct.pack("<f", s) + b"\x18" + bytes([k])) for t, s, k in pieces
    )
    return body + message(2, b"\x18\x02\x98\x02\x00") + message(3, b"\x18\x01\x20\x01")


def read_spm(path):
    use(Tokenizer(*plain_spec(sentencepiece_model.read_sentencepiece(path), {})))


KINDS = {
    "safetensors": (safetensors_seed, read_safetensors, 7000),
    "index": (index_seed, lambda path: ShardedSafetensors(path.parent, path.name), 2500),
    "config": (config_seed, read_config, 4000),
    "tokenizer": (tokenizer_seed, read_tokenizer, 2500),
    "unigram": (unigram_seed, read_tokenizer, 1500),
    "gguf": (gguf_seed, read_gguf, 3500),
    "sentencepiece": (spm_seed, read_spm, 1500),
}
assert sum(count for *_, count in KINDS.values()) >= 20_000


def fuzz(folder, kind, count, seed):
    make, read, _ = KINDS[kind]
    good, draw = make(folder), random.Random(seed)
    path = folder / (WEIGHTS_INDEX_NAME if kind == "index" else "file")
    path.write_bytes(good)
    read(path)  # the seed itself is good
    outcome = {"read": 0, "refused": 0}
    for n in range(count):
        path.unlink()  # to overwrite a file waits for the disk, a new one does not
        path.write_bytes(mutated(good, draw))
        begin = time.perf_counter()
        try:
            read(path)
            outcome["read"] += 1
        except Fault as fault:
            outcome["refused"] += 1
            assert "\n" not in str(fault), (kind, seed, n, fault)
            assert len(str(fault)) < 900, (kind, seed, n, fault)
        except BaseException as error:
            raise AssertionError(f"{kind}, seed {seed}, mutation {n}: {type(error).__name__}: {error}") from error
        assert time.perf_counter() - begin < 2.0, (kind, seed, n)
    return outcome


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = fuzz(tmp_path, kind, KINDS[kind][2], seed=1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 256 << 20, f"{grown:,} bytes more than before"
    assert outcome["refused"] > outcome["read"] > 0, f"the mutations are too mild or too wild: {outcome}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_damaged_files(kind, seed, tmp_path):
    fuzz(tmp_path, kind, KINDS[kind][2], seed)


def test_a_reader_without_checks_is_detected(tmp_path, monkeypatch):
    """Planted fault: a reader that raises any other exception."""
    monkeypatch.setitem(
        KINDS, "config", (config_seed, lambda path: 1 // json.loads(path.read_bytes())["hidden_size"], 100)
    )
    with pytest.raises(AssertionError, match="config, seed 1, mutation"):
        fuzz(tmp_path, "config", 100, seed=1)
