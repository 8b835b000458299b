"""The spectrogram and the convolutions in NumPy equal those of the core, gradients too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.audio import mel as core
from headwater.reference.gradients import Parameters
from headwater.reference.speech import convolution, log_mel, mel_filters


@pytest.mark.parametrize("bins", [80, 128])
def test_the_spectrogram_is_that_of_the_core(bins):
    random = np.random.default_rng(0)
    samples = np.sin(np.arange(8_000) * 0.3) * 0.2 + random.standard_normal(8_000) * 0.01
    assert np.allclose(mel_filters(bins), core.mel_filters(bins).numpy(), atol=1e-7)
    ours = core.log_mel(torch.tensor(samples, dtype=torch.float32), bins).numpy()
    assert np.abs(log_mel(samples, bins) - ours).max() < 1e-4


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_convolution_and_its_gradients(stride, length):
    random = np.random.default_rng(1)
    x, weight, bias = (random.standard_normal(shape) for shape in ((2, 5, length), (6, 5, 3), (6,)))
    parameters = Parameters({"weight": weight, "bias": bias})
    y, backward = convolution(x, parameters, stride)
    tensors = [torch.tensor(value, requires_grad=True) for value in (x, weight, bias)]
    theirs = torch.nn.functional.conv1d(*tensors, stride=stride, padding=1)
    dy = random.standard_normal(y.shape)
    theirs.backward(torch.tensor(dy))
    assert np.allclose(y, theirs.detach().numpy())
    assert np.allclose(backward(dy), tensors[0].grad.numpy())
    for name, tensor in (("weight", tensors[1]), ("bias", tensors[2])):
        assert np.allclose(parameters.gradients[name], tensor.grad.numpy())


def test_a_wrong_padding_would_be_seen():
    x = np.random.default_rng(2).standard_normal((1, 3, 9))
    parameters = Parameters({"weight": np.ones((2, 3, 3)), "bias": np.zeros(2)})
    shifted, _backward = convolution(np.roll(x, 1, -1), parameters)
    theirs = torch.nn.functional.conv1d(torch.tensor(x), torch.ones(2, 3, 3, dtype=torch.float64), padding=1)
    assert not np.allclose(shifted, theirs.numpy())
