"""Parity of the families for long inputs: windows, blocks, chunks and global tokens, from files on disk, within 2e-5.

The inputs are long enough that every attention is sparse, and one row is padded on the right.
"""

from __future__ import annotations

import itertools
import warnings
import zlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from headwater.core import LayerNorm, LocalWindow
from headwater.families import FAMILIES
from headwater.families.export import match_family
from headwater.families.hf_folder import build_with_weights, load_hf_folder, save_hf_folder
from headwater.parts import swap
from headwater.variants.bigbird import BigBirdAttention, FirstBlockInEvaluation
from headwater.variants.chunked_attention import ChunkedAttention
from headwater.variants.longformer import LongformerAttention, NoGlobalTokens
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.transient_global import RelativeBiasWithSummaries, TransientGlobalAttention
from headwater.weights.hf_config import HFConfig
from headwater.weights.shards import open_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT, SHOWS, VOCAB, LENGTH = 2e-5, 4e-4, 53, 75
T.logging.set_verbosity_error()


@dataclass(frozen=True)
class LongCase:
    """A public model. separators: where the rows have the token that ends a question."""

    family: str
    model: str
    config: str
    settings: tuple[tuple[str, Any], ...]
    number: int
    length: int = LENGTH

    @property
    def id(self) -> str:
        return f"{self.model}-{self.number}"

    def build(self) -> Any:
        """With weights drawn wide enough that a wrong term shows."""
        torch.manual_seed(zlib.crc32(self.id.encode()))
        model = getattr(T, self.model)(getattr(T, self.config)(**dict(self.settings))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model


def cases(family: str, config: str, models: str, base: dict[str, Any], *odd: dict[str, Any]) -> list[LongCase]:
    return [
        LongCase(family, model, config, tuple({**base, **change}.items()), number)
        for model, (number, change) in itertools.product(models.split(), enumerate([{}, *odd]))
    ]


ENCODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 130,
}  # fmt: skip
PAIR = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
}  # fmt: skip
LONGFORMER = {**ENCODER, "attention_window": [8, 4], "type_vocab_size": 1, "pad_token_id": 1}
LED = {
    **PAIR, "attention_window": [8, 4], "max_encoder_position_embeddings": 160, "max_decoder_position_embeddings": 40,
}  # fmt: skip
BIGBIRD = {
    **ENCODER, "block_size": 4, "num_random_blocks": 2, "hidden_act": "gelu_new", "pad_token_id": 0, "sep_token_id": 2,
}  # fmt: skip
REFORMER = {
    "vocab_size": VOCAB, "hidden_size": 32, "attention_head_size": 6, "num_attention_heads": 2, "feed_forward_size": 48,
    "attn_layers": ["local", "lsh", "lsh"], "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [8, 24],
    "max_position_embeddings": 128, "num_hashes": 2, "hash_seed": 3, "num_buckets": [2, 4], "lsh_attn_chunk_length": 8,
    "local_attn_chunk_length": 4, "pad_token_id": 1,
}  # fmt: skip
REFORMER_ODD = (
    {"num_buckets": None, "num_hashes": 1}, {"num_buckets": 6, "local_attn_chunk_length": 6, "hidden_act": "gelu"},
    {"attn_layers": ["local"], "axial_pos_embds": False}, {"lsh_attn_chunk_length": 128, "chunk_size_feed_forward": 8},
)  # fmt: skip
LONGT5 = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "decoder_start_token_id": 0, "local_radius": 5, "global_block_size": 4,
}  # fmt: skip
SUMMARIES = {"encoder_attention_type": "transient-global"}
BIGBIRD_PEGASUS = {
    **PAIR, "block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 130, "pad_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
AROUND = {"local_num_chunks_after": 1, "lsh_num_chunks_after": 1}
CASES = [
    *cases("longformer", "LongformerConfig", "LongformerModel LongformerForMaskedLM "
           "LongformerForSequenceClassification LongformerForTokenClassification LongformerForQuestionAnswering",
           LONGFORMER,
           {"attention_window": 32, "type_vocab_size": 3}, {"num_attention_heads": 1, "layer_norm_eps": 1e-5},
           {"hidden_act": "relu", "attention_window": [4, 92]}, {"num_hidden_layers": 1, "attention_window": [6]}),
    *cases("led", "LEDConfig", "LEDModel LEDForConditionalGeneration LEDForQuestionAnswering", LED,
           {"attention_window": 16}, {"activation_function": "relu"}, {"encoder_attention_heads": 8},
           {"decoder_layers": 1, "attention_window": [4, 72]}),
    *cases("big_bird", "BigBirdConfig", "BigBirdModel BigBirdForMaskedLM BigBirdForSequenceClassification "
           "BigBirdForTokenClassification BigBirdForQuestionAnswering BigBirdForPreTraining", BIGBIRD,
           {"block_size": 5, "num_random_blocks": 3, "use_bias": False}, {"rescale_embeddings": True},
           {"attention_type": "original_full"}, {"block_size": 16, "num_attention_heads": 8, "type_vocab_size": 3}),
    *cases("reformer", "ReformerConfig", "ReformerModelWithLMHead", {**REFORMER, "is_decoder": True}, *REFORMER_ODD),
    *cases("reformer", "ReformerConfig", "ReformerModel ReformerForMaskedLM ReformerForSequenceClassification "
           "ReformerForQuestionAnswering", {**REFORMER, **AROUND}, *REFORMER_ODD),
    *cases("longt5", "LongT5Config", "LongT5Model LongT5ForConditionalGeneration", {**LONGT5, **SUMMARIES},
           {"encoder_attention_type": "local"}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
           {"local_radius": 40, "global_block_size": 16}, {"local_radius": 1, "relative_attention_num_buckets": 8,
           "relative_attention_max_distance": 9}, {"global_block_size": 70}, {"encoder_attention_type": "local",
           "local_radius": 7, "d_kv": 6}),
    *cases("bigbird_pegasus", "BigBirdPegasusConfig", "BigBirdPegasusModel BigBirdPegasusForConditionalGeneration "
           "BigBirdPegasusForSequenceClassification BigBirdPegasusForQuestionAnswering", BIGBIRD_PEGASUS,
           {"use_bias": True, "scale_embedding": False}, {"attention_type": "original_full"}, {"block_size": 5,
           "num_random_blocks": 3}, {"activation_function": "relu", "decoder_layers": 1}),
]  # fmt: skip
by_id = pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
BASE = [case for case in CASES if case.number == 0]


def read(out: Any) -> torch.Tensor:
    if "prediction_logits" in out:
        return out.prediction_logits
    if "start_logits" in out:
        return torch.stack((out.start_logits, out.end_logits), -1)
    return out.logits if "logits" in out else out.last_hidden_state


def batch(case: LongCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second padded on the right; three separators where the model looks for a question."""
    ids = torch.randint(5, VOCAB, (2, case.length), generator=torch.Generator().manual_seed(3))
    keep = torch.ones(2, case.length, dtype=torch.bool)
    keep[1, case.length - 9 :] = False
    if case.model in ("LongformerForQuestionAnswering", "BigBirdForQuestionAnswering"):
        ids[:, [6, 40, case.length - 10]] = 2
    ids[~keep] = dict(case.settings).get("pad_token_id", 1)
    return ids, keep


def global_tokens(case: LongCase) -> torch.Tensor:
    """Another number of global tokens in each row; one of them is padding, which is never global."""
    chosen = torch.zeros(2, case.length, dtype=torch.bool)
    chosen[0, [0, 3, 40]] = True
    chosen[1, [5, case.length - 1]] = True
    return chosen


def outputs(case: LongCase, theirs: Any, ours: Any, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Both outputs, where the tokens are real."""
    ids, keep = batch(case)
    more = {} if chosen is None else {"global_attention_mask": chosen.long()}
    with torch.no_grad():
        if ours.encoder is not None and ours.decoder is not None:
            rows = ids[:, :11].flip(1)
            if case.model.endswith("SequenceClassification"):  # the decoder's state where the source ends
                ids[:, -1] = 2
                rows = ids.clamp(min=5)
            named = {} if chosen is None else {"source_global_tokens": chosen}
            own = ours(rows, source=ids, source_attention_mask=keep, **named)
            return own, read(theirs(input_ids=ids, attention_mask=keep.long(), decoder_input_ids=rows, **more))
        types = None
        if (
            case.model == "BigBirdForQuestionAnswering"
        ):  # the public model has its own for the question, if none are given
            types = (torch.arange(case.length) > 6).long().expand(2, -1)
            more["token_type_ids"] = types
        own = ours(ids, attention_mask=keep, global_tokens=chosen, token_types=types)
        own = own["language"] if isinstance(own, dict) else own
        public = read(theirs(input_ids=ids, attention_mask=keep.long(), **more))
        if case.model == "BigBirdForQuestionAnswering":  # no answer begins in the question
            keep = keep & (public[..., 0] > -1e5)
            assert torch.equal(own > -1e5, public > -1e5)
        return (own[keep], public[keep]) if own.dim() == 3 else (own, public)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())


@by_id
def test_equals_the_public_model_and_back(case, tmp_path):
    public = case.build()
    public.save_pretrained(tmp_path / "theirs")
    loaded = load_hf_folder(tmp_path / "theirs")
    assert distance(*outputs(case, public, loaded.model)) < LIMIT
    save_hf_folder(loaded, tmp_path / "ours")
    again = getattr(T, case.model).from_pretrained(tmp_path / "ours").eval()
    assert distance(*outputs(case, again, loaded.model)) < LIMIT
    if loaded.model.output_stack.uses_global_tokens or case.family == "led":
        assert distance(*outputs(case, public, loaded.model, global_tokens(case))) < LIMIT


@pytest.mark.parametrize("case", BASE, ids=lambda c: c.id)
def test_a_spec_finds_its_family(case):
    """The config writer is the inverse of the reader."""
    config = getattr(T, case.config)(**dict(case.settings)).to_dict()
    head = next(name for name in FAMILIES[case.family].head_names)
    spec = FAMILIES[case.family].read_spec(HFConfig(config), head)
    match = match_family(spec, [case.family])
    assert getattr(match, "family", match) == case.family


FAULTS = {
    "no random block": (FirstBlockInEvaluation, lambda p: replace(p, count=0)),
    "a narrower ring": (ChunkedAttention, lambda p: replace(p, before=0)),
    "other directions": (LSHAttention, lambda p: replace(p, seed=p.seed + 1)),
    "one round more": (LSHAttention, lambda p: replace(p, rounds=p.rounds + 1)),
    "buckets that reach less far": (RelativeBiasWithSummaries, lambda p: replace(p, max_distance=20)),
    "summaries of other blocks": (TransientGlobalAttention, lambda p: replace(p, block_size=p.block_size + 1)),
    "blocks of another size": (BigBirdAttention, lambda p: replace(p, block_size=p.block_size + 1)),
    "a window wider by one": (LocalWindow, lambda p: LocalWindow(p.size + 1)),
    "a larger eps": (LayerNorm, lambda p: replace(p, eps=1e-1)),
    "no global token": (LongformerAttention, lambda p: replace(p, global_tokens=NoGlobalTokens())),
}


@pytest.mark.parametrize("case", BASE, ids=lambda c: c.id)
def test_a_wrong_part_shows(case, tmp_path):
    public = case.build()
    public.save_pretrained(tmp_path)
    family, loaded = FAMILIES[case.family], load_hf_folder(tmp_path)
    right = family.read_spec(HFConfig.from_json_file(tmp_path / "config.json"), loaded.head)
    seen = []
    for name, (kind, fault) in FAULTS.items():
        wrong = swap(right, kind, fault)
        if wrong == right:
            continue
        model = build_with_weights(wrong, family, loaded.head, open_weights(tmp_path))
        assert distance(*outputs(case, public, model)) > SHOWS, f"the check does not see: {name}"
        seen.append(name)
    assert len(seen) >= 2, seen
