"""Weight files: read(write(x)) = x, we and the public library read each other's files, hostile headers are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadFile
from headwater.reference.config import Config
from headwater.reference.model import Transformer
from headwater.reference.weights import read, write

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(2.5),
    "half": np.ones(3, np.float16),
    "none": np.zeros((0, 4), np.float32),
}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    same_names = a.keys() == b.keys()
    return same_names and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and (a[k] == b[k]).all() for k in a)


def test_arrays_are_written_and_read_back(tmp_path: Path) -> None:
    write(tmp_path / "w", ARRAYS)
    assert same(read(tmp_path / "w"), ARRAYS)
    assert same(safetensors.numpy.load_file(tmp_path / "w"), ARRAYS)
    assert [p.name for p in tmp_path.iterdir()] == ["w"]
    safetensors.numpy.save_file(ARRAYS, tmp_path / "w", metadata={"format": "pt"})
    assert same(read(tmp_path / "w"), ARRAYS)


def test_a_model_is_the_same_after_a_file(tmp_path: Path) -> None:
    model = Transformer(Config(9, d_model=8, heads=2, layers=1, shared=True), seed=1)
    write(tmp_path / "m", model.values)
    again, ids = Transformer(model.config, read(tmp_path / "m")), np.array([[1, 2, 3]])
    assert np.array_equal(again(ids, source=ids)[0], model(ids, source=ids)[0])


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.140625], np.float32)
    upper = (values.view(np.uint32) >> 16).astype("<u2")
    (tmp_path / "w").write_bytes(file_bytes({"x": entry("BF16", [3], [0, 6])}, upper.tobytes()))
    assert read(tmp_path / "w")["x"].tolist() == values.tolist() and read(tmp_path / "w")["x"].dtype == np.float32


def entry(dtype: object, shape: object, span: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


HOSTILE = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header beyond the file": file_bytes({}, length=2**63),
    "header one too long": file_bytes({}, length=3),
    "not JSON": file_bytes(b"\x80\x04pickle"),
    "not a table": file_bytes([1]),
    "deep": file_bytes(b"[" * 100_000),
    "twice": file_bytes(
        b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "no shape": file_bytes({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "an entry that is a list": file_bytes({"x": []}),
    "unknown type": file_bytes({"x": entry("I64", [1], [0, 8])}, bytes(8)),
    "a type that is a list": file_bytes({"x": entry([], [1], [0, 8])}, bytes(8)),
    "negative size": file_bytes({"x": entry("F32", [-1], [0, 4])}, bytes(4)),
    "size that is true": file_bytes({"x": entry("F32", [True], [0, 4])}, bytes(4)),
    "size that is a fraction": file_bytes({"x": entry("F32", [1.0], [0, 4])}, bytes(4)),
    "shape that overflows": file_bytes({"x": entry("F32", [2**32, 2**32], [0, 0])}),
    "huge and empty": file_bytes({"x": entry("F32", [2**62, 0], [0, 0])}),
    "too many axes": file_bytes({"x": entry("F32", [1] * 70, [0, 4])}, bytes(4)),
    "beyond the end": file_bytes({"x": entry("F32", [2], [0, 8])}, bytes(4)),
    "backwards": file_bytes({"x": entry("F32", [1], [4, 0])}, bytes(4)),
    "three offsets": file_bytes({"x": entry("F32", [1], [0, 2, 4])}, bytes(4)),
    "shape of another size": file_bytes({"x": entry("F32", [2], [0, 4])}, bytes(4)),
    "overlap": file_bytes({"x": entry("F32", [1], [0, 4]), "y": entry("F32", [1], [0, 4])}, bytes(4)),
    "gap": file_bytes({"x": entry("F32", [1], [4, 8])}, bytes(8)),
    "data without an entry": file_bytes({"x": entry("F32", [1], [0, 4])}, bytes(8)),
    "cut short": file_bytes({"x": entry("F32", [1], [0, 4])}, bytes(3)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(HOSTILE[case])
    with pytest.raises(BadFile, match="must be|must begin") as caught:
        read(tmp_path / "w")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 + len(str(tmp_path))


def test_missing_files_and_folders_are_faults(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(BadFile, match="must be a readable file"):
            read(path)
    with pytest.raises(BadFile, match="must be a path that can be written"):
        write(tmp_path / "no" / "w", ARRAYS)
    with pytest.raises(BadFile, match="x must be float16, float32 or float64 to be written, got int64"):
        write(tmp_path / "w", {"x": np.arange(3)})


GOOD = file_bytes({"x": entry("F32", [2], [0, 8]), "y": entry("F16", [1, 1], [8, 10])}, bytes(10))


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255), st.integers(0, len(GOOD)))
def test_a_damaged_file_is_read_or_refused(tmp_path_factory, at: int, byte: int, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    for raw in (GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], GOOD[:cut]):
        path.write_bytes(raw)
        with contextlib.suppress(BadFile):
            assert sum(a.nbytes for a in read(path).values()) <= 12
