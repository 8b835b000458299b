"""CTranslate2's model.bin: a bounds-checked reader of its variables, mapped from the file.

    version  spec name  spec revision  variable count
    then each variable: name, number of dimensions, dimensions, type, size in bytes, the bytes
    then aliases: count, and for each the alias and the name it stands for

A weight of 8 or 16 bits has its scales beside it, one for each row or one for all: value = stored / scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote
from headwater.weights.cursor import ByteCursor, map_file, mapped_tensor
from headwater.weights.safetensors import LazyStateDict

FORMAT_VERSION = 6
MAX_VARIABLES = 100_000
MAX_DIMS = 8
MAX_DIM = 2**31 - 1
MAX_VARIABLE_BYTES = 2**32 - 1
DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # by their number
INTEGER_DTYPES = (torch.int8, torch.int16)
SCALE_SUFFIX = "_scale"


@dataclass(frozen=True)
class Variable:
    """A stored variable: its dtype, shape and offset in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class CTranslate2File(LazyStateDict):
    """The variables of a model.bin by name, quantized ones in float32. spec: the kind of model (WhisperSpec)."""

    def __init__(self, path: str | Path) -> None:
        self.where = Path(path)
        self._map = map_file(path, 16, _("a CTranslate2 model"))
        reader = _Reader(self._map, path)
        self.spec, self._variables = reader.read()

    def __getitem__(self, name: str) -> Tensor:
        variable = self._variables[name]
        stored = mapped_tensor(self._map, variable.dtype, variable.shape, variable.offset)
        scale = self._variables.get(name + SCALE_SUFFIX)
        if scale is None or variable.dtype not in INTEGER_DTYPES:
            return stored
        scales = mapped_tensor(self._map, scale.dtype, scale.shape, scale.offset).float()
        return stored.float() / scales.reshape(-1, *[1] * (stored.dim() - 1))

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def meta_tensor(self, name: str) -> Tensor:
        variable = self._variables[name]
        return torch.empty(variable.shape, dtype=variable.dtype, device="meta")


class _Reader(ByteCursor):
    """Reads the variables' entries."""

    def read(self) -> tuple[str, dict[str, Variable]]:
        """The name of the spec, and the variables with their aliases."""
        version = self.read_int("<I")
        if version != FORMAT_VERSION:
            self.refuse(_("not a CTranslate2 model of version {version}", version=FORMAT_VERSION))
        spec = self.read_string()
        self.read_int("<I")  # its revision
        variables: dict[str, Variable] = {}
        for _unused in range(self.read_size("<I", MAX_VARIABLES, _("the number of variables"))):
            name = self.read_string()
            if name in variables:
                self.refuse(_("the tensor {name} occurs twice", name=quote(name)))
            variables[name] = self.read_variable(name)
        for _unused in range(self.read_size("<I", MAX_VARIABLES, _("the number of aliases"))):
            alias = self.read_string()
            name = self.read_string()
            if name not in variables:
                self.refuse(_("{alias} stands for {name}, which is not there", alias=quote(alias), name=quote(name)))
            variables[alias] = variables[name]
        if self.position != len(self.buffer):
            self.refuse(_("{count:,} bytes follow its end", count=len(self.buffer) - self.position))
        self.check_scales(variables)
        return spec, variables

    def read_string(self) -> str:
        """A length, and the bytes of a string that ends in NUL."""
        text = self.read_bytes(self.read_int("<H"))
        return text.removesuffix(b"\0").decode("utf-8", "replace")

    def read_variable(self, name: str) -> Variable:
        """The entry of a variable; its bytes must be as many as its shape and type say."""
        dims = self.read_size("<B", MAX_DIMS, _("the number of dimensions"))
        shape = tuple(self.read_size("<I", MAX_DIM, _("a dimension")) for _unused in range(dims))
        dtype = DTYPES[self.read_size("<B", len(DTYPES) - 1, _("the type of a variable"))]
        num_bytes = self.read_size("<I", MAX_VARIABLE_BYTES, _("the size of a variable"))
        count = 1
        for size in shape:
            count *= size
        if count * dtype.itemsize != num_bytes:
            self.refuse(
                _(
                    "the tensor {name} {shape} of {dtype} cannot have {size:,} bytes",
                    name=quote(name),
                    shape=list(shape),
                    dtype=str(dtype).removeprefix("torch."),
                    size=num_bytes,
                )
            )
        return Variable(dtype, shape, self.skip_bytes(num_bytes))

    def check_scales(self, variables: dict[str, Variable]) -> None:
        """The scales of a quantized weight are one for each of its rows, or one."""
        for name, variable in variables.items():
            scale = variables.get(name + SCALE_SUFFIX)
            if scale is not None and variable.dtype in INTEGER_DTYPES:
                count = 1
                for size in scale.shape:
                    count *= size
                if not variable.shape or count not in (1, variable.shape[0]) or not scale.dtype.is_floating_point:
                    self.refuse(_("the scales of {name} do not fit its shape", name=quote(name)))


def read_ctranslate2(path: str | Path, spec: str) -> CTranslate2File:
    """A model.bin of this kind of model."""
    file = CTranslate2File(path)
    if file.spec != spec:
        raise BadFile(_("{path}: it must hold a {spec}, it holds a {got}", path=path, spec=spec, got=quote(file.spec)))
    return file
