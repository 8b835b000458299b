"""AudioLM (Borsos et al. 2022): semantic, coarse and fine sound tokens, by three models that are trained in one run.

semantic  <start> s1 s2 …                                             the next token
coarse    s1 s2 … <pad> <start> c1,1 c1,2 c2,1 …                      the next code, codebook after codebook
fine      codebooks 0 … k of all frames, k unknown in a part of them  codebook k of that part (Bark's form)

Recordings become tokens by a sound codec and by k-means; token files (.npz) are read as they are. Each batch has crops
of the clips, for each of the three models its own; the loss is the sum of three means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.audio.write import spectrogram_image, write_wav
from headwater.audiolm.audio_model import AUDIOLM_TEMPERATURES, SEMANTIC_FOLDER, AudioModel
from headwater.audiolm.baselines import baseline_bits
from headwater.audiolm.crops import CropDataset, trained_tokens
from headwater.audiolm.recordings import fit_semantic, open_sound_codec, read_voices
from headwater.audiolm.semantic import SemanticCodec
from headwater.audiolm.stages import SamplingRule
from headwater.codecs import save_codec
from headwater.codecs.encodec import EnCodecModel
from headwater.codecs.folder import CODEC_FOLDER
from headwater.core import Embeddings, LMHead, Model
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX, SpecialTokens
from headwater.data.readers.sound_files import TOKEN_SUFFIX
from headwater.data.recordings import SoundFile, sound_format
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder, encoder
from headwater.i18n import _
from headwater.parts import swap
from headwater.tasks.base import EvalBatch, StackKwargs, Task, TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch
from headwater.tasks.language_model import lm_head_loss
from headwater.text.tokenizer import Tokenizer
from headwater.variants.audiolm import STAGES, AudioLanguageModel, AudioLM, AudioTokens
from headwater.variants.codes import Codes, LastCodeHead
from headwater.vision.sheets import write_png
from headwater.weights.native import save_native

DEFAULT_SEMANTIC_CODES = 256
PROMPT_SECONDS = 2.0  # of the clip that is continued in the plots folder
CONTINUED_SECONDS = 3.0


@dataclass
class AudioTaskData(TaskData):
    """The datasets, the layout of the tokens, and what made them."""

    tokens: AudioTokens = field(default_factory=AudioTokens)
    codec: EnCodecModel | None = None
    semantic_codec: SemanticCodec | None = None


class StageBits(NamedTuple):
    """For each stage the negative log-likelihood of its tokens in bits, and how many there are."""

    bits: tuple[float, ...]
    counts: tuple[int, ...]


class AudioLanguageModelTask(Task[SoundFile]):
    """Sound that continues sound."""

    name = "audio-language-model"
    verb = "continue"
    example_format = sound_format("audio-language-model")
    default_metric = "loss"
    default_steps = 2000
    generates_text = True  # tokens of sound, which are learned as those of text
    reads_text = False

    # ------------------------------------------------------------------------------------------------ data and model

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[SoundFile],
        valid: Sequence[SoundFile],
        labels: Sequence[str] = (),
    ) -> TaskData:
        notes: list[str] = []
        codec = open_sound_codec(config.codec)
        semantic = None
        recordings = [row.path for row in train if not row.path.endswith(TOKEN_SUFFIX)]
        if recordings:
            if codec is None:
                raise BadSetting(
                    _(
                        "audio-language-model needs a sound codec for recordings; train one with --task sound-codec "
                        "and give --codec, or give token files (.npz)"
                    )
                )
            semantic = fit_semantic(
                recordings, config.vocab or DEFAULT_SEMANTIC_CODES, config.semantic_model, config.seed
            )

        sides = [read_voices([row.path for row in rows], codec, semantic, notes) for rows in (train, valid)]
        frame_rate = codec.frame_rate if codec is not None else None
        tokens = trained_tokens([*sides[0], *sides[1]], config.context_length, frame_rate, semantic)
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        train_set = CropDataset(sides[0], tokens, special_tokens, config.batch_tokens, config.seed, moving=True)
        valid_set = CropDataset(sides[1], tokens, special_tokens, config.batch_tokens, config.seed, moving=False)
        notes.append(_describe_baselines(baseline_bits(sides[0], sides[1], tokens)))
        examples = [SoundFile(str(owner)) for owner in valid_set.owners]
        count = sum(len(voice.semantic) + voice.fine.numel() for voice in sides[0])
        return AudioTaskData(
            self,
            tokenizer,
            train_set,
            valid_set,
            examples,
            notes=notes,
            num_tokens=count,
            tokens=tokens,
            codec=codec,
            semantic_codec=semantic,
        )

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        """Three models of one size."""
        return audiolm_spec(config, AudioTokens())

    def adapt_spec(self, spec: Model, data: TaskData) -> Model:
        """The same models for the tokens of the data."""
        return with_tokens(cast(AudioLM, spec), cast(AudioTaskData, data).tokens)

    def describe_model(self, model: Any) -> str:
        spec = cast(AudioLM, model.spec)
        sizes = {name: sum(p.numel() for p in getattr(model, name).parameters()) for name in STAGES}
        tokens = spec.tokens
        return _(
            "AudioLM, semantic ({semantic:,} weights, {semantic_codes:,} tokens), coarse ({coarse:,}, {coarse_books} "
            "of {books} codebooks of {codes:,}), fine ({fine:,})",
            semantic=sizes["semantic"],
            coarse=sizes["coarse"],
            fine=sizes["fine"],
            semantic_codes=tokens.semantic_codes,
            coarse_books=tokens.coarse_books,
            books=tokens.books,
            codes=tokens.codes,
        )

    def save_model(self, folder: Path, model: Any, data: TaskData) -> None:
        save_native(folder, model, data.metadata)
        audio = cast(AudioTaskData, data)
        for codec, name in ((audio.codec, CODEC_FOLDER), (audio.semantic_codec, SEMANTIC_FOLDER)):
            if codec is not None and not (folder / name / "config.json").is_file():
                save_codec(codec, folder / name)

    # ---------------------------------------------------------------------------------------------- loss and metrics

    def loss(self, model: Any, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """The sum of the three means, times the number of rows."""
        sums = dict.fromkeys(STAGES, batch["ids"].new_zeros((), dtype=torch.float32))
        counts = dict.fromkeys(STAGES, 0)
        for part in stage_parts(model, batch):
            inputs = part.model.inputs(part.ids)
            hidden_states = part.model.hidden_states(inputs)
            loss = lm_head_loss(part.model.head, hidden_states, inputs, part.targets, label_smoothing)
            sums[part.stage] = sums[part.stage] + loss
            counts[part.stage] += int((part.targets != IGNORE_INDEX).sum())
        means = [sums[stage] / max(1, counts[stage]) for stage in STAGES]
        return torch.stack(means).sum() * len(batch["ids"])

    def num_targets(self, batch: TensorBatch) -> int:
        return len(batch["ids"])

    @torch.no_grad()
    def predict_rows(
        self, model: Any, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, StageBits]:
        outputs: dict[int, StageBits] = {}
        for rows, batch in batches:
            bits = torch.zeros(len(rows), len(STAGES))
            counts = torch.zeros(len(rows), len(STAGES), dtype=torch.long)
            for part in stage_parts(model, batch):
                logits = part.model(part.ids).float().flatten(0, 1)
                losses = F.cross_entropy(logits, part.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
                stage = STAGES.index(part.stage)
                bits[:, stage] += losses.view(len(rows), -1).sum(1).cpu() / math.log(2)
                counts[:, stage] += (part.targets != IGNORE_INDEX).sum(1).cpu()
            for row, row_bits, row_counts in zip(rows, bits.tolist(), counts.tolist(), strict=True):
                outputs[int(row)] = StageBits(tuple(row_bits), tuple(row_counts))
        return outputs

    def reference(self, example: SoundFile) -> str:
        return example.path

    def metrics(self, outputs: list[StageBits], references: list[str], data: TaskData) -> dict[str, float]:
        """Bits a token of each stage."""
        sums = {name: [(each.bits[n], each.counts[n]) for each in outputs] for n, name in enumerate(STAGES)}
        return {
            f"{name}_bits": sum(bits for bits, _count in pairs) / max(1, sum(count for _bits, count in pairs))
            for name, pairs in sums.items()
        }

    def format_input(self, example: SoundFile) -> str:
        return _("recording {number}", number=example.path)

    def format_output(self, example: SoundFile, output: Any) -> str:
        if not isinstance(output, StageBits):
            return str(output)
        each = (bits / max(1, count) for bits, count in zip(*output, strict=True))
        return ", ".join(f"{name} {bits:.2f}" for name, bits in zip(STAGES, each, strict=True))

    # -------------------------------------------------------------------------------------------------------- usage

    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str],
        *args: Any,
        **options: Any,
    ) -> list[Any]:
        raise BadInput(
            _("an AudioLM needs its codec beside it; use `headwater continue CLIP --model RUN` or audiolm.audio_model")
        )

    @property
    def command(self) -> str:
        return "headwater continue clip.wav --model {run} --out continued.wav"

    def write_pictures(self, folder: Path, model: Any, data: TaskData) -> None:
        """plots/continuations.png and .wav: a validation clip, and how the model continues it."""
        audio = cast(AudioTaskData, data)
        if audio.codec is None:
            return
        speaker = AudioModel(model, audio.tokens, folder, codec=audio.codec, semantic_codec=audio.semantic_codec)
        prompt = cast(CropDataset, data.valid).voices[0].first(audio.tokens, PROMPT_SECONDS)
        rules = [SamplingRule(temperature) for temperature in AUDIOLM_TEMPERATURES]
        sound = speaker.decode(speaker.continue_voice(prompt, CONTINUED_SECONDS, rules).after(prompt).fine)
        write_wav(folder / "continuation.wav", sound, speaker.sample_rate)
        mark = len(prompt.fine) / audio.tokens.frame_rate
        write_png(spectrogram_image([sound], speaker.sample_rate, mark), folder / "continuation.png")


# --------------------------------------------------------------------------------------------------------------- losses


class StagePart(NamedTuple):
    """What one model of a stage reads, and what it should predict."""

    stage: str
    model: Transformer
    ids: Tensor  # [B, Q], of the fine model [B, F, K]
    targets: Tensor  # [B, Q] or [B, F]


def stage_parts(model: Any, batch: TensorBatch) -> list[StagePart]:
    """The inputs and targets of the stages: in training one codebook of the fine model, in validation all of them."""
    audio = cast(AudioLanguageModel, model)
    tokens = audio.tokens

    # coarse: each code predicts the next; the head numbers codes from 0
    coarse_ids = batch["source"]
    codes = coarse_ids[:, tokens.coarse_semantic + 1 :]
    targets = torch.full_like(coarse_ids, IGNORE_INDEX)
    is_padding = codes == tokens.coarse_pad
    targets[:, tokens.coarse_semantic : -1] = (codes - tokens.coarse_offset).masked_fill(is_padding, IGNORE_INDEX)
    parts = [
        StagePart("semantic", audio.semantic, batch["ids"], batch["targets"]),
        StagePart("coarse", audio.coarse, coarse_ids, targets),
    ]

    # fine: a codebook that is not known, with those before it
    fine = batch["signal"]
    if "code_targets" in batch:
        return [*parts, StagePart("fine", audio.fine, fine, batch["code_targets"])]
    unknown = torch.full_like(fine[..., :1], tokens.codes)
    for book in range(tokens.coarse_books, tokens.books):
        ids = torch.cat((fine[..., :book], unknown), -1)
        targets = fine[..., book].masked_fill(fine[..., book] == tokens.codes, IGNORE_INDEX)
        parts.append(StagePart("fine", audio.fine, ids, targets))
    return parts


# ---------------------------------------------------------------------------------------------------- data and model


def audiolm_spec(config: TaskConfig, tokens: AudioTokens) -> AudioLM:
    """Three models of one size: two causal ones, and one that sees all frames."""
    sizes = stack_sizes(config)
    causal: StackKwargs = {**sizes, "encoder_attention": ""}
    both_ways: StackKwargs = {**sizes, "decoder_attention": ""}
    semantic = decoder(1, activation="gelu", **causal)
    if "cache" in semantic.on_meta().output_stack.unsupported:
        name = (config.decoder_attention or config.attention).partition(":")[0]
        raise BadSetting(
            _("attention {name} has no KV cache, which continues sounds; use full, window or linear", name=name)
        )
    coarse = decoder(1, LMHead(1), activation="gelu", **causal)
    fine = encoder(1, LastCodeHead(2, 1), activation="gelu", **both_ways)
    fine = swap(fine, Embeddings, lambda embed: Codes(2, 1, embed.position, embed.dropout))
    semantic, coarse, fine = (replace(stage, tied=()) for stage in (semantic, coarse, fine))
    return with_tokens(AudioLM(semantic=semantic, coarse=coarse, fine=fine), tokens)


def with_tokens(spec: AudioLM, tokens: AudioTokens) -> AudioLM:
    """The same models for tokens of another layout. Each head shares the table of its codebook where there is one."""

    def resize(model: Model, vocab: int, head_vocab: int) -> Model:
        model = swap(model, Embeddings, lambda embed: replace(embed, vocab=vocab))
        return swap(model, LMHead, lambda head: replace(head, vocab=head_vocab))

    coarse_books = tokens.coarse_books
    fine = swap(spec.fine, Codes, lambda embed: replace(embed, books=tokens.books, vocab=tokens.codes + 1))
    fine = swap(fine, LastCodeHead, lambda head: LastCodeHead(tokens.books, tokens.codes + 1, coarse_books))
    tied = [("semantic.head.out", "semantic.decoder.embed.tokens")]
    tied += [
        (f"fine.head.books.{k - coarse_books}", f"fine.encoder.embed.tables.{k}")
        for k in range(coarse_books, tokens.books)
    ]
    return replace(
        spec,
        semantic=resize(spec.semantic, tokens.semantic_infer + 1, tokens.semantic_infer + 1),
        coarse=resize(spec.coarse, tokens.coarse_infer + 1, coarse_books * tokens.codes),
        fine=fine,
        tokens=tokens,
        tied=tuple(tied),
    )


def _describe_baselines(bits: dict[str, dict[str, float]]) -> str:
    """A note: what simple predictions of the validation tokens cost."""
    text = "; ".join(f"{name} " + " ".join(f"{bits[name][stage]:.2f}" for stage in STAGES) for name in bits)
    return _("bits a token without a model ({stages}): {text}", stages=", ".join(STAGES), text=text)
