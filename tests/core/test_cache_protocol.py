"""Every KV cache has what a forward pass asks of one: the members of core.cache.KVCache, with their parameters."""

from __future__ import annotations

import inspect

import pytest

from headwater import core as hw
from headwater.core.cache import KVCache
from headwater.families import builders
from headwater.generation.kv_cache import BatchKVCache

MODEL = builders.decoder(11, d_model=16, heads=2, layers=1, d_ff=16).build(seed=0)
RECURRENT = builders.decoder(11, d_model=16, heads=2, layers=1, d_ff=16, attention="linear").build(seed=0)
CACHES = {
    "none": hw.NoCache(),
    "dynamic": hw.dynamic_cache(MODEL),
    "sliding": hw.sliding_cache(MODEL),
    "static": hw.static_cache(MODEL, 2, 8),
    "state": hw.dynamic_cache(RECURRENT),
    "batch": BatchKVCache(MODEL, owners=("a", "b")),
}
MEMBERS = [name for name in vars(KVCache) if not name.startswith("_")]
METHODS = [name for name in MEMBERS if inspect.isfunction(vars(KVCache)[name])]


def missing(cache: object) -> list[str]:
    """The members that a cache lacks, or has with other parameters."""
    lacking = [name for name in MEMBERS if not hasattr(cache, name)]
    for name in METHODS:
        wanted = list(inspect.signature(vars(KVCache)[name]).parameters)[1:]  # without self
        if name not in lacking and list(inspect.signature(getattr(cache, name)).parameters) != wanted:
            lacking.append(name)
    return lacking


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_follows_the_protocol(kind):
    assert len(MEMBERS) == 10 and len(METHODS) == 7
    assert missing(CACHES[kind]) == []


def test_a_missing_or_different_member_would_be_seen():
    class Partial(hw.NoCache):
        def update(self, key, k, v):
            return k, v

    assert missing(Partial()) == ["update"]
    assert missing(object()) == MEMBERS
