"""Speech recognition: a recording to its text, by a Whisper that is tuned, or by a small one from scratch.

The decoder reads <|startoftranscript|> <|language|> <|transcribe|> <|notimestamps|> and then the text, on which alone
the loss is. Where nothing in the encoder learns, its states are computed once, and an epoch costs only the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.audio.augment import SoundAugmenter
from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.sound_cache import Clip
from headwater.core import LMHead, Model
from headwater.core.cache import dynamic_cache
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.error_rates import error_rates, is_unspaced
from headwater.data.examples import EXAMPLE_FORMATS
from headwater.data.ragged import Ragged
from headwater.data.readers.columns import language_code
from headwater.data.recordings import SPEECH, Transcribed
from headwater.errors import BadInput, BadSetting
from headwater.families.hf_folder import LoadedModel
from headwater.families.whisper import read_whisper_spec
from headwater.i18n import _
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData, TaskMetadata, rows_within_max_length
from headwater.tasks.batch import TensorBatch
from headwater.tasks.language_model import lm_head_loss
from headwater.tasks.sounds import (
    SCRATCH_INIT,
    SoundDataset,
    Windows,
    adapt_window,
    cache_encoder_states,
    frames_embedding,
    is_encoder_frozen,
    load_windows,
)
from headwater.text.tokenizer import Tokenizer
from headwater.transcription.api import transcribe
from headwater.transcription.rules import OutputRules
from headwater.transcription.search import MAX_OUTPUT_TOKENS, SearchSettings, decode_window
from headwater.transcription.speech_model import EncodedWindow, SpeechModel
from headwater.transcription.tokens import SpeechTokens, speech_tokenizer, trained_tokens
from headwater.weights.hf_config import HFConfig

TEXT_POSITIONS = 448
FASTEST_SPEECH = 30.0  # characters a second; a transcript with more says what the recording does not
FRAMES_PER_POSITION = 2


class SpeechDataset(SoundDataset):
    """Recordings and their texts, each after its prompt."""

    def __init__(
        self, windows: Windows, texts: Ragged, prompts: np.ndarray, tokens: SpeechTokens, config: TaskConfig
    ) -> None:
        special_tokens = SpecialTokens(pad_id=tokens.end, bos_id=tokens.start, eos_id=tokens.end)
        super().__init__(windows, texts.lengths + prompts.shape[1], special_tokens, config)
        self.texts = texts
        self.prompts = prompts  # [N, P]

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        prompts = self.prompts[examples]
        texts = self.texts.take(examples)
        text_ids = texts.to_padded(self.special_tokens.pad_id).reshape(len(examples), -1)
        ids = np.concatenate((prompts, text_ids), 1)  # [B, P + T]
        targets = np.full(ids.shape, IGNORE_INDEX, np.int64)
        first = prompts.shape[1] - 1
        targets[:, first:] = texts.with_affixes((), [self.special_tokens.eos_id]).to_padded(IGNORE_INDEX)
        mask = np.arange(ids.shape[1]) < (first + 1 + texts.lengths)[:, None]
        return TrainBatch(ids, mask, targets, **self.sound_arrays(examples, epoch))


class SpeechRecognition(Task[Transcribed]):
    """A text for a recording."""

    name = SPEECH
    verb = "transcribe"
    example_format = EXAMPLE_FORMATS[SPEECH]
    augmentable = True
    generates_text = True
    stacks = (True, True)
    default_position = "learned"
    default_metric = "wer"
    lr_factor = 0.5

    def extend_tokenizer(self, tokenizer: Tokenizer, config: TaskConfig, examples: Sequence[Transcribed]) -> Tokenizer:
        return speech_tokenizer(tokenizer, languages_of(config, examples))

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[Transcribed],
        valid: Sequence[Transcribed],
        labels: Sequence[str] = (),
    ) -> TaskData:
        frames_embedding(config)  # refuses a model that reads no sound
        tokens = trained_tokens(tokenizer, "")
        language = default_language(config, tokens)
        augmenter = SoundAugmenter.from_settings(config.augment, config.seed)
        notes: list[str] = []
        seconds = 0.0  # chosen from the recordings to learn from

        def build(split: str, rows: Sequence[Transcribed]) -> tuple[SpeechDataset, list[Transcribed]]:
            rows = with_known_languages(rows, language, tokens, split, notes)
            clips = [Clip(row.path, row.start, row.end) for row in rows]
            windows, readable = load_windows(config, clips, split, seconds, augmenter, notes)
            kept = [rows[i] for i in readable]
            note_fast_speech(kept, windows, split, notes)
            texts = Ragged.from_rows([tokens.encode(row.text) for row in kept])
            short = rows_within_max_length(config, texts.lengths, split, notes)
            prompts = np.array([tokens.prompt((), row.language, timestamps=False) for row in kept], np.int64)
            if len(short) < len(kept):
                windows = windows.take_rows(short)
            dataset = SpeechDataset(windows, texts.take(short), prompts[short], tokens, config)
            return dataset, [kept[i] for i in short]

        train_set, train_rows = build("train", train)
        seconds = train_set.windows.seconds
        valid_set, valid_rows = build("valid", valid)
        if valid is not train:  # both are the rows that `headwater eval` measures
            note_repeated_texts(train_rows, valid_rows, notes)
        num_tokens = int(train_set.lengths.sum())
        task = replace_metric(self, "cer") if is_unspaced([row.text for row in train_rows[:500]]) else self
        data = TaskData(task, tokenizer, train_set, valid_set, valid_rows, notes=notes, num_tokens=num_tokens)
        data.settings = {"window_seconds": seconds}
        data.window_seconds = seconds
        spoken = {row.language for row in train_rows}
        data.language = spoken.pop() if len(spoken) == 1 else ""
        return data

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return speech_spec(config, vocab_size)

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        return adapt_window(model, config)

    def prepare(self, model: Transformer, data: TaskData, config: Any, resumed: bool) -> None:
        """The states of a frozen encoder; sounds that change in each epoch are encoded in each epoch."""
        train = data.train
        valid = data.valid
        assert isinstance(train, SpeechDataset)
        assert isinstance(valid, SpeechDataset)
        if not is_encoder_frozen(model):
            return
        if train.windows.augmenter is not None:
            cache_encoder_states(model, [valid], config)
            data.notes.append(_("the encoder is frozen, but augmented recordings are encoded again in each epoch"))
            return
        size = cache_encoder_states(model, [train, valid], config)
        data.notes.append(_("the encoder is frozen: its states are computed once, {size:.2f} GB on disk", size=size))

    # ------------------------------------------------------------------------------------------------------ loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """Cross-entropy of the text after the prompt."""
        inputs = model.inputs(batch["ids"], batch.get("attention_mask"))
        hidden_states = model.hidden_states(inputs, memory=memory_of(model, batch))
        return lm_head_loss(model.head, hidden_states, inputs, batch["targets"], label_smoothing)

    # ----------------------------------------------------------------------------------------------- predictions

    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str | Path],
        *args: Any,
        **options: Any,
    ) -> list[str]:
        """The texts of recordings; options: those of headwater.transcribe."""
        speech_model = self.speech_model(model, tokenizer, metadata)
        return [transcribe(path, speech_model, **options).text for path in inputs]

    def speech_model(self, model: Transformer, tokenizer: Tokenizer, metadata: TaskMetadata) -> SpeechModel:
        """The model as `headwater transcribe` uses it."""
        return SpeechModel(LoadedModel(model, tokenizer, {"metadata": dict(metadata)}, Path(self.name)))

    @torch.no_grad()
    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, str]:
        """Texts of windows: by greedy decoding of a batch, or by beam search of one after the other."""
        dataset = data.valid
        assert isinstance(dataset, SpeechDataset)
        tokens = trained_tokens(data.tokenizer, data.language)
        speech_model = self.speech_model(model, data.tokenizer, data.metadata) if beam > 1 else None
        outputs: dict[int, str] = {}
        for rows, batch in batches:
            memory = memory_of(model, batch)
            prompts = torch.from_numpy(dataset.prompts[rows]).to(batch["ids"].device)
            if speech_model is None:
                limit = min(MAX_OUTPUT_TOKENS, 2 * int(dataset.texts.lengths[rows].max()) + 10)
                ids = greedy_transcripts(model, memory, prompts, tokens, limit)
            else:
                settings = SearchSettings(beam_size=beam, timestamps=False)
                ids = [
                    list(decode_window(speech_model, window, prompt, settings).ids)
                    for window, prompt in zip(windows_of(memory), prompts.tolist(), strict=True)
                ]
            outputs |= {int(row): tokens.text(each).strip() for row, each in zip(rows, ids, strict=True)}
        return outputs

    def reference(self, example: Transcribed) -> str:
        return example.text

    def metrics(self, outputs: list[str], references: list[str], data: TaskData) -> dict[str, float]:
        return error_rates(outputs, references) if outputs else {}

    @property
    def command(self) -> str:
        return "headwater transcribe recording.wav --model {run}"

    def format_input(self, example: Transcribed) -> str:
        return Path(example.path).name


# ------------------------------------------------------------------------------------------------------------- helpers


def speech_spec(config: TaskConfig, vocab_size: int) -> Model:
    """A Whisper of the sizes of a config, whose window has as many positions as it needs."""
    sizes: dict[str, Any] = {
        "d_model": config.d_model,
        "vocab_size": vocab_size,
        "max_source_positions": round(config.window_seconds * 50) or 1500,
        "max_target_positions": TEXT_POSITIONS,
        "dropout": config.dropout,
    }
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": config.layers,
            f"{side}_attention_heads": config.heads,
            f"{side}_ffn_dim": config.d_ff,
        }
    return replace(read_whisper_spec(HFConfig(sizes), "language"), init=SCRATCH_INIT)


def languages_of(config: TaskConfig, rows: Sequence[Transcribed]) -> list[str]:
    """The codes of the languages of a model from scratch: --language, and those of the rows; English for the others."""
    default = code_of(config.language or "en")
    if not default:
        raise BadSetting(
            _(
                "--language must be a code such as en or the name of a language, got {language!r}",
                language=config.language[:40],
            )
        )
    spoken = {row.language for row in rows} | ({""} if config.language else set())
    return sorted({code_of(name) if name else default for name in spoken} - {""}) or [default]


def code_of(language: str) -> str:
    """The code of a language, given by its name or a code of two or three letters; empty where it is neither."""
    name = language.strip().lower()
    return language_code(name) or (name if re.fullmatch("[a-z]{2,3}", name) else "")


def with_known_languages(
    rows: Sequence[Transcribed], default: str, tokens: SpeechTokens, split: str, notes: list[str]
) -> list[Transcribed]:
    """The rows in languages that the model knows, each with its code; a note counts the others."""
    known: list[Transcribed] = []
    reasons: list[str] = []
    for row in rows:
        try:
            language = tokens.find_language(row.language) if row.language else default
            known.append(row._replace(language=language))
        except BadSetting as fault:
            reasons.append(str(fault))
    if reasons:
        notes.append(
            _(
                "{count:,} of {total:,} {split} recordings are in languages that the model does not know and are left "
                "out: {reason}",
                count=len(reasons),
                total=len(rows),
                split=split,
                reason=reasons[0],
            )
        )
    if not known:
        raise BadInput(_("{split}: no recording can be used; {problem}", split=split, problem=(reasons or ["-"])[0]))
    return known


def default_language(config: TaskConfig, tokens: SpeechTokens) -> str:
    """The code of --language, which the model must know; else English, or the only one."""
    if config.language:
        return tokens.find_language(config.language)
    return "en" if "en" in tokens.languages else next(iter(tokens.languages))


def memory_of(model: Transformer, batch: TensorBatch) -> ModelInputs:
    """What the decoder reads: the encoder's states, computed now or before."""
    if "encoder_states" not in batch:
        return model.encode(batch["signal"])
    states = batch["encoder_states"]
    slots = torch.arange(states.shape[1], device=states.device).expand(states.shape[0], -1)
    return model.bridge(ModelInputs(slots, hidden_states=states))


def windows_of(memory: ModelInputs) -> list[EncodedWindow]:
    """The rows of a batch as encoded windows."""
    assert memory.hidden_states is not None
    pairs = zip(memory.ids.split(1), memory.hidden_states.split(1), strict=True)
    return [EncodedWindow(ModelInputs(ids, hidden_states=states), {}) for ids, states in pairs]


@torch.no_grad()
def greedy_transcripts(
    model: Transformer, memory: ModelInputs, prompts: Tensor, tokens: SpeechTokens, limit: int
) -> list[list[int]]:
    """The text tokens of each row of a batch, the most probable one at each step. prompts [B, P]."""
    rules = OutputRules(tokens, timestamps=False)
    cache = dynamic_cache(model)
    outputs: list[list[int]] = [[] for _unused in range(len(prompts))]
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    ids = prompts
    for _step in range(limit):
        logits = model.decode(ids, memory=memory, cache=cache)[:, -1].float()
        ids = rules.apply(logits, outputs).argmax(-1, keepdim=True)  # [B, 1]
        for output, token in zip(outputs, ids[:, 0].tolist(), strict=True):
            output.append(token)
        finished |= ids[:, 0] == tokens.end
        if bool(finished.all()):
            break
    return [output[: output.index(tokens.end)] if tokens.end in output else output for output in outputs]


def replace_metric(task: SpeechRecognition, metric: str) -> SpeechRecognition:
    """The task with another deciding metric."""
    other = SpeechRecognition()
    other.default_metric = metric
    return other


def note_fast_speech(rows: Sequence[Transcribed], windows: Windows, split: str, notes: list[str]) -> None:
    """A note of transcripts that are too long for their recordings."""
    seconds = windows.clips.samples.lengths / SAMPLE_RATE
    fast = [i for i, row in enumerate(rows) if len(row.text) > FASTEST_SPEECH * max(seconds[i], 0.1)]
    if fast:
        notes.append(
            _(
                "{count:,} {split} transcripts are longer than anyone speaks (more than {most:g} characters a second), "
                "the first is of {name}, {seconds:.1f} s; do they belong to these recordings?",
                count=len(fast),
                split=split,
                most=FASTEST_SPEECH,
                name=Path(rows[fast[0]].path).name,
                seconds=seconds[fast[0]],
            )
        )


def note_repeated_texts(train: Sequence[Transcribed], valid: Sequence[Transcribed], notes: list[str]) -> None:
    """A note where sentences of the validation set are learned too: then its error rate is of known sentences."""
    known = {row.text for row in train}
    repeated = sum(row.text in known for row in valid)
    if repeated:
        notes.append(
            _(
                "{count:,} of {total:,} validation texts are said in the training recordings too",
                count=repeated,
                total=len(valid),
            )
        )
