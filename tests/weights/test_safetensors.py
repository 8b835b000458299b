"""safetensors: we and the public library read each other's files, and invalid files are refused in one line."""

from __future__ import annotations

import json
import os
import stat
import struct
import time
import tracemalloc
import warnings

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadFile, NotFound
from headwater.weights.checks import is_finite
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

MANY_DTYPES = {
    "wide": torch.randn(7, 5),
    "long.name.0.weight": torch.arange(5),
    "none": torch.empty(0, 3),
    "one": torch.tensor(3.0, dtype=torch.bfloat16),
    "yes": torch.tensor([True, False, True]),
    "half": torch.randn(3).half(),
    "small": torch.randn(5).to(torch.float8_e4m3fn),
    "transposed": torch.randn(4, 6).t(),
}


def raw_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_both_read_our_files(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, MANY_DTYPES, {"note": "ours"})
    ours, theirs = SafetensorsFile(path), safetensors.torch.load_file(path)
    assert set(ours) == set(theirs) == set(MANY_DTYPES)
    for name, tensor in MANY_DTYPES.items():
        assert ours[name].dtype == theirs[name].dtype == tensor.dtype == ours.meta_tensor(name).dtype
        assert ours[name].shape == tensor.shape == ours.meta_tensor(name).shape
        assert torch.equal(ours[name].float(), tensor.float()) and torch.equal(theirs[name].float(), tensor.float())
    assert ours.metadata == {"format": "pt", "note": "ours"}


def test_we_read_files_of_the_public_library(tmp_path):
    path = tmp_path / "model.safetensors"
    theirs = {name: t.contiguous() for name, t in MANY_DTYPES.items()}
    safetensors.torch.save_file(theirs, path)
    ours = SafetensorsFile(path)
    assert all(torch.equal(ours[name].float(), t.float()) for name, t in theirs.items())


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True).filter(lambda n: ".." not in n),
        st.tuples(
            st.lists(st.integers(0, 4), max_size=4),
            st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool]),
        ),
        max_size=6,
    )
)
def test_read_after_write_is_the_same_and_writing_again_gives_the_same_bytes(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("any")
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in shapes.items()}
    write_safetensors(folder / "one", tensors)
    read = SafetensorsFile(folder / "one")
    assert set(read) == set(tensors) and all(torch.equal(read[n], tensors[n]) for n in tensors)
    write_safetensors(folder / "two", read)
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()


def test_tensors_are_views_of_the_file_and_changing_them_leaves_it_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.zeros(1000)})
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = SafetensorsFile(path)
        first, second = file["a"], file["a"]
    assert first.data_ptr() == second.data_ptr(), "the tensor was copied"
    first.add_(1)
    assert path.read_bytes() == before
    del file
    assert first.sum() == 1000, "the map must live as long as its tensors"


def test_overwriting_a_loaded_file_keeps_the_loaded_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.arange(10_000.0)})
    loaded = SafetensorsFile(path)
    write_safetensors(path, {"a": loaded["a"] * 2})
    assert torch.equal(loaded["a"], torch.arange(10_000.0))
    assert torch.equal(SafetensorsFile(path)["a"], torch.arange(10_000.0) * 2)
    write_safetensors(path, SafetensorsFile(path))
    assert torch.equal(SafetensorsFile(path)["a"], torch.arange(10_000.0) * 2)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(3)})

    class FailingTensors(dict):
        def __getitem__(self, name):
            if self.num_reads > 1:
                raise RuntimeError("power cut")
            self.num_reads += 1
            return torch.zeros(3)

    broken = FailingTensors(a=0, b=0)
    broken.num_reads = 0
    with pytest.raises(RuntimeError):
        write_safetensors(path, broken)
    assert torch.equal(SafetensorsFile(path)["a"], torch.ones(3)) and os.listdir(tmp_path) == ["model.safetensors"]


def test_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_safetensors(tmp_path / "a", {"a": torch.ones(1)})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_unaligned_tensors_are_read_too(tmp_path):
    header = json.dumps({"b": entry("U8", (1,), (0, 1)), "a": entry("F32", (2,), (1, 9))}).encode()
    (tmp_path / "a").write_bytes(raw_file(header, b"\x07" + struct.pack("<2f", 1.5, -2)))
    assert SafetensorsFile(tmp_path / "a")["a"].tolist() == [1.5, -2]


def test_nonfinite_weights_are_named(tmp_path):
    write_safetensors(
        tmp_path / "a",
        {
            "good": torch.ones(3),
            "bad": torch.tensor([1, float("nan")]),
            "count": torch.ones(2).long(),
            "huge": torch.full((3, 3), float("inf")).half(),
            "limit": torch.full((9,), 65504.0).half(),
        },
    )
    file = SafetensorsFile(tmp_path / "a")
    assert sorted(name for name in file if not is_finite(file[name])) == ["bad", "huge"]


TWO = {"a": entry(), "b": entry(offsets=(8, 16))}
HOSTILE = {
    "empty": (b"", "not a safetensors file"),
    "cut in the length": (b"\x01\x00", "not a safetensors file"),
    "length 10^18": (raw_file({}, length=10**18), "header claims"),
    "header beyond the file": (raw_file({}, length=50), "header claims"),
    "17 MB header": (raw_file(b"{" + b" " * (17 << 20) + b"}"), "at most 16,777,216"),
    "190,000 tensors": (
        raw_file(
            b"{"
            + b",".join(b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % n for n in range(190_000))
            + b"}"
        ),
        "at most 100,000 tensors",
    ),
    "millions of dimensions": (
        raw_file(b'{"a":{"dtype":"F32","shape":[' + b"1," * 4_000_000 + b'1],"data_offsets":[0,4]}}'),
        "at most 100,000 tensors",
    ),
    "deep": (raw_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested deeper"),
    "not JSON": (raw_file(b"{nonsense}"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not Unicode"),
    "lone surrogate": (raw_file(b'{"\\ud800": 1}'), "not Unicode"),
    "a list": (raw_file([1, 2]), "must hold a JSON object"),
    "duplicate key": (
        raw_file(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'a' is written twice",
    ),
    "path as name": (raw_file({"../../etc/passwd": entry()}, bytes(8)), "not a valid tensor name"),
    "dots": (raw_file({"a..b": entry()}, bytes(8)), "not a valid tensor name"),
    "NUL in name": (raw_file({"a\0": entry()}, bytes(8)), "not a valid tensor name"),
    "right-to-left name": (raw_file({"a\u202e": entry()}, bytes(8)), "not a valid tensor name"),
    "10 MB name": (raw_file({"a" * 10_000_000: entry()}, bytes(8)), "not a valid tensor name"),
    "unknown dtype": (raw_file({"a": entry("F33")}, bytes(8)), "is not known; did you mean 'F32'"),
    "sub-byte dtype": (raw_file({"a": entry("F4")}, bytes(8)), "is not known"),
    "dtype a list": (raw_file({"a": entry(["F32"])}, bytes(8)), "is not known"),
    "negative shape": (raw_file({"a": entry(shape=(-2, -1))}, bytes(8)), "none negative"),
    "shape overflows": (raw_file({"a": entry(shape=(2**32, 2**32))}, bytes(8)), "needs"),
    "shape true": (raw_file({"a": entry(shape=(True, 2))}, bytes(8)), "integers"),
    "shape a fraction": (raw_file({"a": entry(shape=(2.0,))}, bytes(8)), "integers"),
    "nine dimensions": (raw_file({"a": entry(shape=(1,) * 8 + (2,))}, bytes(8)), "at most 8"),
    "offsets backwards": (raw_file({"a": entry(offsets=(8, 0))}, bytes(8)), "data_offsets give"),
    "three offsets": (raw_file({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "two integers"),
    "overlap": (raw_file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "gap"),
    "trailing bytes": (raw_file(TWO, bytes(17)), "belong to no tensor"),
    "one byte short": (raw_file(TWO, bytes(15)), "cut short"),
    "entry with more": (raw_file({"a": {**entry(), "code": "x"}}, bytes(8)), "exactly dtype"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "text to text"),
    "infinite number": (raw_file(b'{"a": 1e999}'), "not a finite number"),
    "NaN": (raw_file(b'{"a": NaN}'), "not a finite number"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_bad_file_is_refused_in_one_line_quickly_and_in_little_memory(tmp_path, kind):
    content, words = HOSTILE[kind]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    begin = time.perf_counter()
    with pytest.raises(BadFile) as caught:
        SafetensorsFile(path)
    seconds, peak = time.perf_counter() - begin, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert words in message and "\n" not in message and len(message) < 400 + len(str(path)), message
    assert seconds < 0.25, f"{seconds:.3f} s (tracing memory; the bar without it is 0.05 s)"
    assert peak < 2 * len(content) + (16 << 20), f"{peak:,} bytes"


def test_the_largest_hostile_headers_are_refused_within_50_ms(tmp_path):
    for kind in ("17 MB header", "190,000 tensors", "millions of dimensions", "deep"):
        path = tmp_path / "bad.safetensors"
        path.write_bytes(HOSTILE[kind][0])
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            with pytest.raises(BadFile):
                SafetensorsFile(path)
            seconds.append(time.perf_counter() - begin)
        assert min(seconds) < 0.05, (kind, seconds)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "a"
    write_safetensors(path, {"x": torch.ones(3), "y": torch.ones(2, 2).half()})
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(BadFile):
            SafetensorsFile(path)


def test_links_pipes_folders_and_missing_files_are_refused(tmp_path):
    write_safetensors(tmp_path / "real", {"a": torch.ones(1)})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for name, words in {"link": "it is a link", "pipe": "regular file", ".": "regular file"}.items():
        with pytest.raises(BadFile, match=words):
            SafetensorsFile(tmp_path / name)
    with pytest.raises(NotFound, match="does not exist"):
        SafetensorsFile(tmp_path / "absent")
