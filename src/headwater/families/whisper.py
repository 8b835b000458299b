"""Whisper: an encoder of log-mel spectrograms and a decoder of text (Radford et al. 2022).

The encoder reads 30 seconds as 3,000 frames, of which its convolutions make 1,500 vectors. Both stacks are pre-norm
with exact GELU; keys have no bias. The encoder's positions are sinusoids that are stored, the decoder's are learned.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from headwater.audio.frames import Frames, SinusoidTable
from headwater.core import (
    Attention,
    Block,
    Causal,
    CrossAttention,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoHead,
    Normal,
    Stack,
    pre,
)
from headwater.core.base import EmbeddingSpec
from headwater.core.model import Transformer
from headwater.core.positions import LearnedEncoding
from headwater.errors import BadFile
from headwater.families.bart import attention_names
from headwater.families.config_writers import HF_ACTIVATIONS, ConfigDict, find_part, register_config_writer
from headwater.families.registry import read_activation, register_family
from headwater.i18n import _
from headwater.variants.sound_heads import SoundClassificationHead
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

FRAMES_PER_SLOT = 2
PUBLISHED_SLOTS = 1500  # of 30 seconds
DECODER_KEYS = ("decoder_attention_heads", "decoder_ffn_dim", "decoder_layers", "max_target_positions")


def whisper_names() -> NameMap:
    """The names of the body; those of the layers are BART's."""
    text = """
    [model.]encoder.conv1                encoder.embed.first
    [model.]encoder.conv2                encoder.embed.second
    [model.]decoder.embed_tokens         decoder.embed.tokens
"""
    for side in ("encoder", "decoder"):
        text += f"""
    [model.]{side}.embed_positions               {side}.embed.position.table
    [model.]{side}.layers.{{i}}.fc1              {side}.layers.{{i}}.ffn.up
    [model.]{side}.layers.{{i}}.fc2              {side}.layers.{{i}}.ffn.down
    [model.]{side}.layers.{{i}}.final_layer_norm {side}.layers.{{i}}.ffn_norm
    [model.]{side}.layer_norm                    {side}.final_norm
""" + attention_names(side, "self_attn", "self_attn", "norm")
    return name_map(text + attention_names("decoder", "encoder_attn", "cross_attn", "norm"))


HEAD_NAMES = {
    "language": name_map("proj_out  head.out"),
    "hidden_states": name_map("proj_out  -"),
    "audio_classification": name_map("""
        projector    head.projector
        classifier   head.out
    """),
}


@register_family("whisper", body_names=whisper_names(), head_names=HEAD_NAMES)
def read_whisper_spec(config: HFConfig, head_type: str) -> Model:
    """The spec of a config.json."""
    d_model = config.get_int("d_model")
    vocab = config.get_int("vocab_size")
    dropout = config.get_float("dropout", default=0.0)
    norm = LayerNorm()
    config.get_bool("scale_embedding", default=False)  # transformers never applies it

    def stack(side: str, embed: EmbeddingSpec, causal: bool) -> Stack:
        """The encoder or the decoder; the decoder is causal and reads the encoder."""
        heads = config.get_int(f"{side}_attention_heads")
        attention_dropout = config.get_float("attention_dropout", default=0.0)
        self_attn = Attention(heads, bias="qvo", dropout=attention_dropout)
        if causal:
            self_attn = Attention(heads, bias="qvo", mask=Causal(), dropout=attention_dropout)
        cross = (pre(norm, cross_attn=CrossAttention(heads, bias="qvo", dropout=attention_dropout)),) if causal else ()
        ffn = FeedForward(
            config.get_int(f"{side}_ffn_dim"),
            read_activation(config, "activation_function"),
            dropout=config.get_float("activation_dropout", default=0.0),
        )
        branches = (pre(norm, self_attn=self_attn), *cross, pre(norm, ffn=ffn))
        num_layers = config.get_num_layers(f"{side}_layers", *(["num_hidden_layers"] if side == "encoder" else []))
        return Stack(d_model, embed, (Block(branches, dropout),) * num_layers, norm)

    frames = Frames(
        config.get_int("num_mel_bins", default=80),
        Learned(config.get_int("max_source_positions", default=1500)),
        dropout=dropout,
    )
    init = (("encoder.embed.position.*", SinusoidTable()), ("*", Normal(config.get_float("init_std", default=0.02))))
    encoder = stack("encoder", frames, causal=False)
    if head_type == "audio_classification":
        return Model(encoder=encoder, head=read_sound_head(config), init=init)
    tokens = Embeddings(vocab, Learned(config.get_int("max_target_positions", default=448)), dropout=dropout)
    return Model(
        encoder=encoder,
        decoder=stack("decoder", tokens, causal=True),
        head=LMHead(vocab) if head_type == "language" else NoHead(),
        tied=(("head.out", "decoder.embed.tokens"),) if head_type == "language" else (),
        init=init,
    )


def read_sound_head(config: HFConfig) -> SoundClassificationHead:
    """The head of WhisperForAudioClassification; the sizes of the decoder, which it has not, are passed over."""
    if config.get_bool("use_weighted_layer_sum", default=False):
        raise BadFile(
            _(
                "{where}: use_weighted_layer_sum must be false, a weighted sum of all layers is not supported",
                where=config.where,
            )
        )
    config.ignore(*DECODER_KEYS)
    return SoundClassificationHead(len(config.get_labels()), config.get_int("classifier_proj_size", default=256))


@register_config_writer("whisper", "Whisper", lm_suffix="ForConditionalGeneration")
def whisper_config(spec: Model) -> ConfigDict | None:
    """The inverse of read_whisper_spec()."""
    encoder = spec.encoder
    decoder = spec.decoder
    if encoder is None or not isinstance(encoder.embed, Frames):
        return None
    if isinstance(spec.head, SoundClassificationHead):
        return encoder_config(encoder, encoder.embed) | {"classifier_proj_size": spec.head.width, "vocab_size": 51_865}
    if decoder is None or not isinstance(decoder.embed, Embeddings):
        return None
    config = encoder_config(encoder, encoder.embed)
    side = stack_config("decoder", decoder)
    if not config or not side:
        return None
    return {
        **config,
        **side,
        "vocab_size": decoder.embed.vocab,
        "max_target_positions": decoder.embed.position.max_positions or 448,
        "tie_word_embeddings": True,
    }


def encoder_config(encoder: Stack, embed: Frames) -> ConfigDict:
    """The keys of config.json that the encoder gives; empty where it is none of Whisper's."""
    side = stack_config("encoder", encoder)
    return side and {
        **side,
        "d_model": encoder.d_model,
        "num_mel_bins": embed.mels,
        "max_source_positions": frame_slots(embed),
        "dropout": embed.dropout,
        "is_encoder_decoder": True,
        "num_hidden_layers": len(encoder.layers),
    }


def stack_config(side: str, stack: Stack) -> ConfigDict:
    """The keys of config.json of one stack."""
    attn = find_part(stack.layers, Attention)
    ffn = find_part(stack.layers, FeedForward)
    if attn is None or ffn is None:
        return {}
    return {
        f"{side}_layers": len(stack.layers),
        f"{side}_attention_heads": attn.heads,
        f"{side}_ffn_dim": ffn.d_ff,
        "activation_function": HF_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "attention_dropout": attn.dropout,
        "activation_dropout": ffn.dropout,
    }


def frame_slots(embed: Frames) -> int:
    """The positions of a window of frames."""
    return embed.position.max_positions or PUBLISHED_SLOTS


def window_slots(spec: Model) -> int:
    """The positions of an encoder that reads spectrograms; 0 where none does."""
    if spec.encoder is None or not isinstance(spec.encoder.embed, Frames):
        return 0
    return frame_slots(spec.encoder.embed)


@torch.no_grad()
def cut_window(model: Transformer, slots: int) -> Transformer:
    """The model with a window of the first `slots` positions of its encoder, in place.

    Whisper was trained on windows of 30 seconds with silence at the end. One that is tuned on shorter windows reads
    short recordings at a fraction of the cost.
    """
    encoder = model.encoder
    assert encoder is not None
    assert isinstance(encoder.spec.embed, Frames)
    encoder.spec = replace(encoder.spec, embed=replace(encoder.spec.embed, position=Learned(slots)))
    model.spec = replace(model.spec, encoder=encoder.spec)
    position = encoder.embed.position
    assert isinstance(position, LearnedEncoding)
    position.table = nn.Embedding.from_pretrained(position.table.weight[:slots].clone(), freeze=False)
    return model


# The cross-attention heads whose weights follow the speech, as (layer, head), for the published sizes: by the number of
# decoder layers and the size of the vocabulary (51,864: English only; 51,866: large-v3 and turbo).
ALIGNMENT_HEADS = {
    (4, 51864): "1.0 2.0 2.5 3.0 3.1 3.2 3.3 3.4",
    (4, 51865): "2.2 3.0 3.2 3.3 3.4 3.5",
    (6, 51864): "3.3 4.7 5.1 5.5 5.7",
    (6, 51865): "3.1 4.2 4.3 4.7 5.1 5.2 5.4 5.6",
    (12, 51864): "6.6 7.0 7.3 7.8 8.2 8.5 8.7 9.0 9.4 9.8 9.10 10.0 10.1 10.2 10.3 10.6 10.11 11.2 11.4",
    (12, 51865): "5.3 5.9 8.0 8.4 8.7 8.8 9.0 9.7 9.9 10.5",
    (24, 51864): "11.4 14.1 14.12 14.14 15.4 16.0 16.4 16.9 17.12 17.14 18.7 18.10 18.15 20.0 20.3 20.9 20.14 21.12",
    (24, 51865): "13.15 15.4 15.15 16.1 20.0 23.4",
    (32, 51865): "10.12 13.17 16.11 16.12 16.13 17.15 17.16 18.4 18.11 18.19 19.11 21.2 21.3 22.3 22.9 22.12 23.5 23.7 "
    "23.13 25.5 26.1 26.12 27.15",
    (32, 51866): "7.0 10.17 12.18 13.12 16.1 17.14 19.11 21.4 24.1 25.6",
    (4, 51866): "2.4 2.11 3.3 3.6 3.11 3.14",
}


def alignment_heads(spec: Model) -> list[list[int]]:
    """The alignment heads of a published size; of any other, every head of the upper half of the decoder's layers."""
    assert spec.decoder is not None
    layers = len(spec.decoder.layers)
    vocab = spec.head.vocab if isinstance(spec.head, LMHead) else 0
    if (layers, vocab) in ALIGNMENT_HEADS:
        return [[int(n) for n in pair.split(".")] for pair in ALIGNMENT_HEADS[layers, vocab].split()]
    attn = find_part(spec.decoder.layers, Attention)
    heads = 0 if attn is None else attn.heads
    return [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
