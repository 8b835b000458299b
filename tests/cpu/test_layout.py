"""A library whose structs or constants differ from Python's is refused before any of its kernels is called."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from headwater.cpu import build, layout
from headwater.cpu.layout import LayoutMismatch, check_layout, read_layout

pytestmark = pytest.mark.skipif(
    build.decode_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
Structs = Mapping[str, type[ctypes.Structure]]
LIBRARIES = {
    "training": (build.training_library, layout.TRAINING_STRUCTS, layout.TRAINING_CONSTANTS),
    "decoding": (build.decode_library, layout.DECODE_STRUCTS, layout.DECODE_CONSTANTS),
}


def exported(name: str) -> layout.Layout:
    library = LIBRARIES[name][0]()
    assert library is not None
    return read_layout(library)


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_compiled_library_fits(name: str):
    _, structs, constants = LIBRARIES[name]
    table = exported(name)
    check_layout(table, structs, constants)
    assert table.sizes.keys() == structs.keys() and constants.keys() <= table.constants.keys()
    assert all(table.fields[struct] for struct in structs)


def test_constants_that_only_c_defines_are_read_from_it():
    for name in ("K_BLOCK", "M_BLOCK", "ROW_BLOCK", "PARTITIONS", "ROW_BLOCKS"):
        assert build.training_constants()[name] > 0 and name not in layout.TRAINING_CONSTANTS
    for name in ("PANEL_ROWS", "TILE_ROWS", "MAX_GEMV_ROWS"):
        assert build.decode_constants()[name] > 0 and name not in layout.DECODE_CONSTANTS


# -------------------------------------------------------------------------------------- faults planted on Python's side


def struct(*fields: tuple[str, object]) -> type[ctypes.Structure]:
    return type("Planted", (ctypes.Structure,), {"_fields_": fields})


RIGHT = layout.CToken._fields_
PLANTED_STRUCTS = {
    "two fields change places": (struct(RIGHT[1], RIGHT[0], *RIGHT[2:]), "Token.position is 4 bytes at 4 in C"),
    "a field of another size": (
        struct(*RIGHT[:4], ("num_keys", ctypes.c_int64)),
        "Token.num_keys is 4 bytes at 16 in C",
    ),
    "a field of another name": (struct(*RIGHT[:4], ("sees", ctypes.c_int32)), "Token.sees is missing in C"),
    "a field too few": (struct(*RIGHT[:4]), "Token.num_keys is 4 bytes at 16 in C and missing in Python"),
    "a field too many": (struct(*RIGHT, ("more", ctypes.c_int32)), "Token.more is missing in C"),
}


@pytest.mark.parametrize("fault", PLANTED_STRUCTS)
def test_a_wrong_struct_is_refused(fault: str):
    wrong, words = PLANTED_STRUCTS[fault]
    structs = {**layout.DECODE_STRUCTS, "Token": wrong}
    with pytest.raises(LayoutMismatch, match=words):
        check_layout(exported("decoding"), structs, layout.DECODE_CONSTANTS)


@pytest.mark.parametrize("name", LIBRARIES)
def test_any_wrong_constant_is_refused(name: str):
    _, structs, constants = LIBRARIES[name]
    for constant, value in constants.items():
        wrong = {**constants, constant: value + 1}
        with pytest.raises(LayoutMismatch, match=f"{constant} is {value} in C and {value + 1} in Python"):
            check_layout(exported(name), structs, wrong)
    with pytest.raises(LayoutMismatch, match="NOWHERE is None in C and 1 in Python"):
        check_layout(exported(name), structs, {**constants, "NOWHERE": 1})


# -------------------------------------------------------------------------------------- faults planted in the C sources

PLANTED_SOURCES = {
    "a field moved": (
        "decode_step.c",
        "int32_t token_id, position, cache_row, source, num_keys, adapter; } Token;",
        "int32_t position, token_id, cache_row, source, num_keys, adapter; } Token;",
        "the compiled C kernels do not fit this installation .Token.token_id is 4 bytes at 4 in C",
    ),
    "a constant changed": (
        "quant_formats.h",
        "Q4_1_BYTES = 20",
        "Q4_1_BYTES = 24",
        "Q4_1_BYTES is 24 in C and 20 in Python.; unset HEADWATER_CFLAGS",
    ),
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the C sources that the decode library is compiled from, in a cache of its own, quickly."""
    copy = Path(shutil.copytree(build.CSRC, tmp_path / "csrc"))
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(build, "CSRC", copy)
    monkeypatch.setattr(build, "_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv("HEADWATER_CFLAGS", "-O0")
    return copy


@pytest.mark.parametrize("fault", PLANTED_SOURCES)
def test_a_library_of_other_sources_is_refused_when_it_is_loaded(fault: str, sources: Path):
    file, right, wrong, words = PLANTED_SOURCES[fault]
    text = (sources / file).read_text(encoding="utf-8")
    assert text.count(right) == 1
    (sources / file).write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(LayoutMismatch, match=words):
        build.decode_library.__wrapped__()


def test_a_copy_without_a_fault_is_loaded(sources: Path):
    assert build.decode_library.__wrapped__() is not None


def test_packed_structs_are_refused(sources: Path, monkeypatch: pytest.MonkeyPatch):
    """A flag of the compiler that changes the layout of every struct."""
    monkeypatch.setenv("HEADWATER_CFLAGS", "-O0 -fpack-struct")
    with pytest.raises(LayoutMismatch, match=r"Matrix\.data is 8 bytes at 12 in C and 8 bytes at 16 in Python"):
        build.decode_library.__wrapped__()
