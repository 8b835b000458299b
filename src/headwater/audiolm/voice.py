"""Voices: the tokens of a recording, which a model continues or speaks like. Files as those of Bark's speakers.

    speaker.npz     semantic_prompt [N], coarse_prompt [2, M], fine_prompt [8, M]: integers, no pickles

The codes of a voice are kept frame by frame, fine [M, K]; the first of them are the coarse ones.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.errors import BadFile, BadInput, NotFound
from headwater.i18n import _
from headwater.io.files import atomic_write, quote
from headwater.variants.audiolm import AudioTokens

MAX_FILE_BYTES = 256 << 20  # of the arrays in a file
NAMES = ("semantic_prompt", "coarse_prompt", "fine_prompt")


class Voice(NamedTuple):
    """The tokens of a recording: semantic [N], and the codes of all codebooks, fine [M, K]."""

    semantic: Tensor
    fine: Tensor

    @classmethod
    def empty(cls, books: int) -> Voice:
        """The tokens of no recording."""
        return cls(torch.zeros(0, dtype=torch.long), torch.zeros(0, books, dtype=torch.long))

    def after(self, other: Voice) -> Voice:
        """The tokens of another recording, then these."""
        return Voice(torch.cat((other.semantic, self.semantic)), torch.cat((other.fine, self.fine)))

    def first(self, tokens: AudioTokens, seconds: float) -> Voice:
        """The tokens of the first seconds."""
        return Voice(
            self.semantic[: round(seconds * tokens.semantic_rate)], self.fine[: round(seconds * tokens.frame_rate)]
        )


def read_voice(path: str | Path) -> Voice:
    """Read a .npz file of tokens. Nothing in it is executed, and its size is checked first."""
    path = Path(path)
    if not path.is_file():
        raise NotFound(_("{path} does not exist; check the path", path=path))
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > MAX_FILE_BYTES:
            raise BadFile(
                _(
                    "{path}: token files may hold {limit} MB, it holds {size} MB; is it one?",
                    path=path,
                    limit=MAX_FILE_BYTES >> 20,
                    size=size >> 20,
                )
            )
        with np.load(path, allow_pickle=False) as file:
            arrays = [_read_array(path, file, name) for name in NAMES]
    except BadFile:
        raise
    except Exception as error:  # a damaged archive may raise anything
        raise BadFile(
            _("{path}: it must be a .npz file of tokens without pickles ({reason}); is it damaged?", path=path,
              reason=quote(error, 80))
        ) from None  # fmt: skip
    semantic, coarse, fine = arrays
    shapes_fit = semantic.ndim == 1 and coarse.ndim == fine.ndim == 2 and coarse.shape[1:] == fine.shape[1:]
    if not shapes_fit or coarse.shape[0] > fine.shape[0] or not np.array_equal(coarse, fine[: len(coarse)]):
        raise BadFile(
            _(
                "{path}: semantic_prompt must be [N], coarse_prompt the first rows of fine_prompt [K, M], got "
                "{shapes}; is it a file of another program?",
                path=path,
                shapes=", ".join(str(array.shape) for array in arrays),
            )
        )
    return Voice(torch.from_numpy(semantic), torch.from_numpy(np.ascontiguousarray(fine.T)))


def _read_array(path: Path, file: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    if name not in file:
        raise BadFile(
            _(
                "{path}: it must hold {name}, it holds {names}",
                path=path,
                name=name,
                names=quote(", ".join(file.files), 80),
            )
        )
    array = file[name]
    if array.dtype.kind not in "iu" or (array.size and int(array.min()) < 0):
        raise BadFile(
            _("{path}: {name} must be integers from 0 on, it is {dtype}", path=path, name=name, dtype=array.dtype)
        )
    return array.astype(np.int64)


def write_voice(path: str | Path, voice: Voice, coarse_books: int) -> None:
    """Write a .npz file of tokens."""
    fine = voice.fine.numpy().T
    with atomic_write(Path(path)) as file:
        np.savez_compressed(
            file, semantic_prompt=voice.semantic.numpy(), coarse_prompt=fine[:coarse_books], fine_prompt=fine
        )


def check_voice(voice: Voice, tokens: AudioTokens, where: object = "voice") -> Voice:
    """Refuse tokens that are not of a model's vocabulary. Codebooks beyond those of the model are left out."""
    fine = voice.fine[:, : tokens.books]
    if fine.shape[1] < tokens.books:
        raise BadInput(
            _(
                "{where}: it has {got} codebooks, the model needs {books}; encode it again",
                where=where,
                got=fine.shape[1],
                books=tokens.books,
            )
        )
    for name, ids, limit in (("semantic", voice.semantic, tokens.semantic_codes), ("fine", fine, tokens.codes)):
        if ids.numel() and int(ids.max()) >= limit:
            raise BadInput(
                _(
                    "{where}: its {name} tokens must be below {limit}, one is {got}; they are of another codec",
                    where=where,
                    name=name,
                    limit=limit,
                    got=int(ids.max()),
                )
            )
    return Voice(voice.semantic, fine)
