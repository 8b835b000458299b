"""The NumPy edition of sound codes equals the codebooks of the sound codecs and the embedding of codes."""

from __future__ import annotations

import numpy as np
import torch

from headwater.codecs.codebook import ResidualCodebooks
from headwater.reference.sound_codes import quantize, sum_of_rows
from headwater.variants.codes import Codes


def test_codes_and_vectors_are_those_of_the_codec():
    torch.manual_seed(0)
    books = ResidualCodebooks(3, 16, 4).double().eval()
    x = torch.randn(50, 4, dtype=torch.float64)
    tables = [table.detach().numpy() for table in books.tables]
    ids = quantize(x.numpy(), tables)
    assert np.array_equal(ids, books.encode(x).numpy())
    assert np.allclose(sum_of_rows(ids, tables), books.decode(torch.from_numpy(ids)).detach().numpy())
    shifted = np.roll(ids, 1, axis=1)  # planted: each code given to the next codebook
    assert not np.allclose(sum_of_rows(shifted, tables), sum_of_rows(ids, tables))


def test_the_sum_of_rows_is_the_embedding_of_codes():
    embed = Codes(3, 16).build(4)
    codes = torch.randint(16, (1, 7, 2))
    inputs = embed.read(codes, "ids")
    tables = [table.weight.detach().numpy() for table in embed.tables]
    expected = sum_of_rows(codes[0].numpy(), tables)
    assert np.allclose(embed(inputs, torch.arange(7)[None])[0].detach().numpy(), expected, atol=1e-6)
