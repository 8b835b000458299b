"""The public functions of headwater explain themselves: help() names and describes every parameter."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

import headwater
from headwater.errors import BadSetting

FUNCTIONS = [name for name in headwater.__all__ if inspect.isfunction(getattr(headwater, name))]


def undocumented(function) -> list[str]:
    """The parameters that the docstring does not name."""
    words = set(re.findall(r"\w+", inspect.getdoc(function) or ""))
    return [name for name in inspect.signature(function).parameters if name not in words]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_documents_its_parameters(name):
    function = getattr(headwater, name)
    assert inspect.getdoc(function), "it has no docstring"
    assert undocumented(function) == []


def test_a_missing_parameter_is_found():
    def planted(model, size):
        """Only the model is described."""

    assert undocumented(planted) == ["size"]


@pytest.mark.parametrize("name", ["generate", "stream"])
def test_generation_spells_out_the_sampling_parameters(name):
    parameters = inspect.signature(getattr(headwater, name)).parameters
    for field in dataclasses.fields(headwater.SamplingParams):
        assert parameters[field.name].default == field.default, field.name
        assert parameters[field.name].annotation == field.type, field.name
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]


def test_sampling_params_take_the_place_of_single_settings():
    model = headwater.decoder(20, d_model=16, heads=2, layers=1).build(seed=0)
    params = headwater.SamplingParams(temperature=0.9, seed=3, max_tokens=6)
    single = headwater.generate(model, [1, 2], temperature=0.9, seed=3, max_tokens=6)
    assert headwater.generate(model, [1, 2], params=params) == single
    assert [event.token for event in headwater.stream(model, [1, 2], params=params)] == list(single.ids)
    with pytest.raises(BadSetting, match="in params or one by one"):
        headwater.generate(model, [1, 2], params=params, top_k=5)
