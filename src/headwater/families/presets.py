"""Presets: specs of known models by name, preset("base"), preset("gpt2-xl"), preset("llama-70b"). Nothing is allocated.

A preset is a family with the sizes of its config.json. The six sizes of the 2017 Transformer share one table of 37,000
tokens between source, target and output, as the paper did for English-German. The paper's larger model, with 6 layers,
is `big`; `large` has 24.
"""

from __future__ import annotations

from typing import NamedTuple

from headwater.core.model import Model
from headwater.errors import NotFound, nearest
from headwater.families.builders import transformer
from headwater.families.config_writers import ConfigDict
from headwater.families.registry import find_family
from headwater.i18n import _
from headwater.weights.hf_config import HFConfig


class Preset(NamedTuple):
    """A family and its sizes: those of config.json, or for `transformer` the arguments of headwater.transformer()."""

    model_type: str
    vocab: int
    config: ConfigDict

    def spec(self, vocab: int | None = None) -> Model:
        """The model spec, with another vocabulary size if one is given."""
        vocab = self.vocab if vocab is None else vocab
        if self.model_type == "transformer":
            return transformer(vocab, **self.config)
        config = HFConfig({"vocab_size": vocab, **self.config}, self.model_type)
        return find_family(self.model_type).read_spec(config, "language")


def paper(d_model: int, heads: int, d_ff: int, layers: int) -> Preset:
    """A Transformer of the 2017 paper."""
    return Preset("transformer", 37_000, {"d_model": d_model, "heads": heads, "d_ff": d_ff, "layers": layers})


def gpt2(d_model: int, heads: int, layers: int, max_positions: int = 1024) -> Preset:
    """A GPT-2 or GPT-3."""
    config = {"n_embd": d_model, "n_head": heads, "n_layer": layers, "n_positions": max_positions}
    return Preset("gpt2", 50_257, config)


def llama(
    vocab: int, d_model: int, heads: int, kv_heads: int, d_ff: int, layers: int, eps: float, theta: float
) -> Preset:
    """A LLaMA."""
    config = {
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "num_hidden_layers": layers,
        "rms_norm_eps": eps,
        "rope_theta": theta,
    }
    return Preset("llama", vocab, config)


def bert(d_model: int, heads: int, layers: int) -> Preset:
    """A BERT."""
    config = {
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "intermediate_size": 4 * d_model,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
    }
    return Preset("bert", 30_522, config)


def t5(d_model: int, heads: int, head_dim: int, d_ff: int, layers: int) -> Preset:
    """A T5 1.0."""
    config = {"d_model": d_model, "num_heads": heads, "d_kv": head_dim, "d_ff": d_ff, "num_layers": layers}
    return Preset("t5", 32_128, config)


PRESETS = {
    "mini": paper(32, 2, 64, 1),
    "small": paper(64, 4, 256, 2),
    "medium": paper(128, 8, 512, 4),
    "base": paper(512, 8, 2048, 6),
    "big": paper(1024, 16, 4096, 6),
    "large": paper(1024, 16, 4096, 24),
    "gpt2": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 16, 24),
    "gpt2-large": gpt2(1280, 20, 36),
    "gpt2-xl": gpt2(1600, 25, 48),
    "gpt3": gpt2(12_288, 96, 96, max_positions=2048),
    "llama-7b": llama(32_000, 4096, 32, 32, 11_008, 32, 1e-6, 1e4),
    "llama-13b": llama(32_000, 5120, 40, 40, 13_824, 40, 1e-6, 1e4),
    "llama-65b": llama(32_000, 8192, 64, 64, 22_016, 80, 1e-6, 1e4),
    "llama-70b": llama(32_000, 8192, 64, 8, 28_672, 80, 1e-5, 1e4),  # Llama 2: grouped-query attention
    "llama3-8b": llama(128_256, 4096, 32, 8, 14_336, 32, 1e-5, 5e5),
    "llama3-70b": llama(128_256, 8192, 64, 8, 28_672, 80, 1e-5, 5e5),
    "bert-base": bert(768, 12, 12),
    "bert-large": bert(1024, 16, 24),
    "t5-small": t5(512, 8, 64, 2048, 6),
    "t5-base": t5(768, 12, 64, 3072, 12),
    "t5-large": t5(1024, 16, 64, 4096, 24),
    "t5-3b": t5(1024, 32, 128, 16_384, 24),
    "t5-11b": t5(1024, 128, 128, 65_536, 24),
}
ALIASES = {"llama-2-70b": "llama-70b", "gpt2-small": "gpt2", "gpt3-175b": "gpt3", "transformer": "base"}


def preset(name: str, vocab: int | None = None) -> Model:
    """The spec of a known model; nothing is allocated.

    name   one of PRESETS, such as "base", "gpt2-xl" or "llama-70b"
    vocab  another vocabulary size than its own
    """
    name = ALIASES.get(name.lower(), name.lower())
    if name not in PRESETS:
        raise NotFound(
            _("no preset is called {name!r}; {nearest}", name=name, nearest=nearest(name, [*PRESETS, *ALIASES]))
        )
    return PRESETS[name].spec(vocab)
