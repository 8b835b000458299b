"""EnCodec's published files: transformers' config.json and the names of its tensors."""

from __future__ import annotations

import math

from headwater.codecs.encodec import MAX_LSTM_LAYERS, EnCodec
from headwater.codecs.registry import register_codec
from headwater.errors import BadFile
from headwater.i18n import _
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import name_map


def _conv_names(old: str, new: str) -> str:
    """The rules of one convolution, with weight normalization or with a norm after it."""
    return f"""
    {old}.conv.parametrizations.weight.original0    {new}.scale
    {old}.conv.parametrizations.weight.original1    {new}.direction
    {old}.conv.bias                                 {new}.bias
    {old}.conv.weight                               {new}.weight
    {old}.norm                                      {new}.norm
    """


def _names() -> str:
    rules = """
    .weight_g = .parametrizations.weight.original0
    .weight_v = .parametrizations.weight.original1
    quantizer.layers.{i}.codebook.embed          quantizer.books.{i}.table
    quantizer.layers.{i}.codebook.embed_avg      quantizer.books.{i}.sums
    quantizer.layers.{i}.codebook.cluster_size   quantizer.books.{i}.counts
    quantizer.layers.{i}.codebook.inited         quantizer.books.{i}.updates
    """
    for side in ("encoder", "decoder"):
        layer = f"{side}.layers.{{i}}"
        for place in ("", ".block.{j}", ".shortcut"):
            rules += _conv_names(layer + place, layer + place)
        for n in range(MAX_LSTM_LAYERS):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                rules += f"{layer}.lstm.{name}_l{n}  {layer}.lstm.{name}_l{n}\n"
    return rules


def config_of_encodec(spec: EnCodec) -> dict[str, object]:
    """The inverse of read_encodec."""
    bits = math.log2(spec.num_codes) * math.ceil(spec.sampling_rate / spec.hop)
    return {
        "model_type": "encodec",
        "architectures": ["EncodecModel"],
        "target_bandwidths": [bits * spec.num_books / 1000],
        "sampling_rate": spec.sampling_rate,
        "audio_channels": spec.channels,
        "normalize": spec.normalize,
        "chunk_length_s": spec.chunk_seconds or None,
        "overlap": spec.overlap if spec.chunk_seconds else None,
        "hidden_size": spec.width,
        "num_filters": spec.filters,
        "num_residual_layers": spec.blocks,
        "upsampling_ratios": list(spec.ratios),
        "norm_type": "time_group_norm" if spec.group_norm else "weight_norm",
        "kernel_size": spec.kernel,
        "last_kernel_size": spec.last_kernel,
        "residual_kernel_size": spec.residual_kernel,
        "dilation_growth_rate": spec.dilation_growth,
        "use_causal_conv": spec.causal,
        "pad_mode": spec.padding,
        "compress": spec.compress,
        "num_lstm_layers": spec.lstm_layers,
        "trim_right_ratio": 1.0,
        "codebook_size": spec.num_codes,
        "codebook_dim": spec.width,
        "use_conv_shortcut": spec.shortcut,
    }


def encodec_names() -> list[str]:
    """The names of an EnCodec checkpoint, for a model that holds one beside its own tensors."""
    lines = (line.split() for line in _names().splitlines() if line.strip() and " = " not in line)
    names = [line[0] for line in lines]
    old = [name.replace(".parametrizations.weight.original0", ".weight_g") for name in names]
    old += [name.replace(".parametrizations.weight.original1", ".weight_v") for name in names]
    return list(dict.fromkeys([*names, *old]))


@register_codec("encodec", name_map(_names()), config_of_encodec)
def read_encodec(config: HFConfig) -> EnCodec:
    """transformers' config.json of EnCodec."""
    if config.get_float("trim_right_ratio", default=1.0) != 1.0:
        raise BadFile(_("{where}: trim_right_ratio must be 1, as in all published models", where=config.where))
    sampling_rate = config.get_int("sampling_rate", maximum=1_000_000, default=24000)
    ratios = tuple(config.get_list("upsampling_ratios", int, [8, 5, 4, 2]))
    num_codes = config.get_int("codebook_size", default=1024)
    width = config.get_int("hidden_size", default=128)
    config.get_int("codebook_dim", minimum=width, maximum=width, default=width)
    rates = config.get_list("target_bandwidths", float, [1.5, 3.0, 6.0, 12.0, 24.0])
    hop = max(1, math.prod(ratio for ratio in ratios if ratio > 0))
    frame_rate = math.ceil(sampling_rate / hop)
    return EnCodec(
        sampling_rate,
        config.get_int("audio_channels", maximum=2, default=1),
        config.get_int("num_filters", default=32),
        width,
        ratios,
        blocks=config.get_int("num_residual_layers", maximum=64, default=1),
        kernel=config.get_int("kernel_size", maximum=1024, default=7),
        last_kernel=config.get_int("last_kernel_size", maximum=1024, default=7),
        residual_kernel=config.get_int("residual_kernel_size", maximum=1024, default=3),
        dilation_growth=config.get_int("dilation_growth_rate", maximum=1024, default=2),
        compress=config.get_int("compress", default=2),
        lstm_layers=config.get_int("num_lstm_layers", maximum=MAX_LSTM_LAYERS, default=2),
        num_books=min(256, max(1, int(1000 * max(rates, default=24.0) / (frame_rate * math.log2(max(2, num_codes)))))),
        num_codes=num_codes,
        causal=config.get_bool("use_causal_conv", default=True),
        group_norm=config.get_str("norm_type", choices=("weight_norm", "time_group_norm"), default="weight_norm")
        == "time_group_norm",
        shortcut=config.get_bool("use_conv_shortcut", default=True),
        padding=config.get_str("pad_mode", choices=("reflect", "constant", "replicate"), default="reflect"),
        chunk_seconds=config.get_float("chunk_length_s", maximum=3600, default=0.0),
        overlap=config.get_float("overlap", maximum=0.999, default=0.0),
        normalize=config.get_bool("normalize", default=False),
    )
