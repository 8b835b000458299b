"""Inputs of an inspection: the model with its tokenizer, and a text as the input tokens of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.core.embeddings import ModelInputs
from headwater.core.model import Model, Transformer
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, TooLong, nearest
from headwater.families.hub import HUB
from headwater.families.load import load_spec
from headwater.families.presets import ALIASES, PRESETS, preset
from headwater.i18n import _
from headwater.io import strict_json
from headwater.parts import from_dict
from headwater.text.pieces import merge_partial_characters
from headwater.text.tokenizer import Tokenizer

VISIBLE_CHARACTERS = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣"}
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class ModelWithTokenizer(Protocol):
    """A model with its tokenizer: the result of headwater.load, or the Predictor of a training run."""

    @property
    def model(self) -> Transformer: ...
    @property
    def tokenizer(self) -> Any: ...


ModelLike = Transformer | ModelWithTokenizer


@dataclass(frozen=True)
class Token:
    """A token id with its text.

    If a character is encoded as several tokens, each has the character as its text; piece_index (from 1) of num_pieces
    tells them apart.
    """

    id: int
    text: str
    piece_index: int = 1
    num_pieces: int = 1

    @property
    def label(self) -> str:
        """The text for an axis: stripped of spaces, symbols for invisible characters, a superscript piece index.

        >>> Token(5, " cat").label, Token(6, "\\n").label, Token(7, "你", 2, 3).label
        ('cat', '⏎', '你²')
        """
        text = "".join(map(_visible, self.text.strip(" ") or self.text))
        if self.num_pieces > 1:
            text += str(self.piece_index).translate(SUPERSCRIPTS)
        return text


def _visible(character: str) -> str:
    if character in VISIBLE_CHARACTERS:
        return VISIBLE_CHARACTERS[character]
    return character if character.isprintable() else character.encode("unicode_escape").decode()


@dataclass(frozen=True, eq=False)
class TokenizedInput:
    """A text as input tokens of a model.

    tokens: the input of the stack before the head. source: the input of the encoder of an encoder-decoder.
    next_tokens: the token after each of `tokens`, as far as known; empty for a bidirectional model.
    """

    model: Transformer = field(repr=False)
    tokenizer: Any = field(repr=False)
    tokens: tuple[Token, ...]
    source: tuple[Token, ...] = ()
    next_tokens: tuple[Token, ...] = ()
    generated: bool = False
    labels: tuple[str, ...] = ()

    @property
    def ids(self) -> Tensor:
        return torch.tensor([[token.id for token in self.tokens]])

    @property
    def model_kwargs(self) -> dict[str, Tensor]:
        """The keyword arguments of the model's forward beside the ids."""
        if not self.source:
            return {}
        return {"source": torch.tensor([[token.id for token in self.source]])}

    @property
    def causal(self) -> bool:
        return self.model.decoder is not None

    def forward(self) -> Any:
        """The output of the model's head: logits [1, Q, V], or [1, classes]; of a multi-task head a dict of them."""
        return self.model(self.ids, **self.model_kwargs)

    def hidden_states(self) -> tuple[Tensor, ModelInputs]:
        """The last hidden states [1, Q, D] and the model inputs. Logits [1, Q, V] of a long text would be too large."""
        memory = self.model.encode(self.model_kwargs["source"]) if self.source else None
        inputs = self.model.inputs(self.ids, None, None, None, None)
        return self.model.hidden_states(inputs, memory=memory), inputs

    def decode_token(self, token_id: int) -> Token:
        """A token of the output vocabulary."""
        return label_tokens([token_id], self.tokenizer)[0]


TextLike = str | Iterable[int] | TokenizedInput  # a text, its token ids, or a tokenized input


def label_tokens(ids: Sequence[int], tokenizer: Any, from_source: bool = False) -> tuple[Token, ...]:
    """Tokens with their texts. from_source: of the source tokenizer, if the target has another one."""
    if tokenizer is None:
        return tuple(Token(n, str(n)) for n in ids)
    piece_bytes = partial(Tokenizer.piece_bytes, tokenizer) if from_source else tokenizer.piece_bytes
    pieces = [piece_bytes(n) if n < len(tokenizer) else b"?" for n in ids]
    tokens: list[Token] = []
    for text, num_pieces in merge_partial_characters(pieces):
        start = len(tokens)
        tokens += [Token(ids[start + n], text, n + 1, num_pieces) for n in range(num_pieces)]
    return tuple(tokens)


# ------------------------------------------------------------------------------------------------------- tokenization


@dataclass(frozen=True)
class InspectedModel:
    """A model with its tokenizer and special token ids. metadata: the task and labels of a model trained here."""

    model: Transformer
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    decoder_start_id: int | None = None
    max_positions: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    path: Path | None = None
    text_model: Any = None  # the model as headwater.generate takes it

    @classmethod
    def wrap(cls, model_like: ModelLike) -> InspectedModel:
        """Wrap a Transformer, the result of headwater.load, or a run."""
        if isinstance(model_like, Transformer):
            return cls(model_like, text_model=model_like)
        model = getattr(model_like, "model", None)
        if not isinstance(model, Transformer):
            raise BadInput(
                _(
                    "inspection: the model must be a headwater model, got {name}; use headwater.load",
                    name=type(model_like).__name__,
                )
            )
        metadata = getattr(model_like, "metadata", None) or getattr(model_like, "config", {}).get("metadata") or {}
        if "task" in metadata:
            return cls._from_run(model_like, metadata)
        return cls(
            model,
            model_like.tokenizer,
            tuple(getattr(model_like, "eos_ids", ())),
            decoder_start_id=getattr(model_like, "decoder_start_id", None),
            max_positions=getattr(model_like, "max_positions", None),
            path=getattr(model_like, "path", None),
            labels=tuple(getattr(model_like, "labels", ())),
            text_model=model_like,
        )

    @classmethod
    def _from_run(cls, run_model: ModelWithTokenizer, metadata: dict[str, Any]) -> InspectedModel:
        """The model and tokenizer of a training run; metadata: its task and labels."""
        from headwater.data.collate import SpecialTokens
        from headwater.generation.api import TextModel

        special = SpecialTokens.from_tokenizer(run_model.tokenizer)
        text_model = TextModel(
            run_model.model, run_model.tokenizer, eos_ids=(special.eos_id,), decoder_start_id=special.bos_id
        )
        return cls(
            run_model.model,
            run_model.tokenizer,
            (special.eos_id,),
            decoder_start_id=special.bos_id,
            metadata=metadata,
            labels=tuple(metadata.get("labels") or ()),
            text_model=text_model,
        )

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model.encoder is not None and self.model.decoder is not None

    def encode_prompt(self, text: str | Iterable[int]) -> list[int]:
        """Token ids of the model's input. A masked language model parses a mask token in the text."""
        if not isinstance(text, str):
            return [int(n) for n in text]
        if self.tokenizer is None:
            raise BadInput(
                _(
                    "inspection: a model without tokenizer takes token ids, got {text!r}; give ids, or use "
                    "headwater.load",
                    text=text[:40],
                )
            )
        if "task" in self.metadata:
            from headwater.tasks import get_task

            ids = get_task(self.metadata["task"]).encode_input(self.tokenizer, text)
        else:
            masked_lm = self.model.decoder is None and self.tokenizer.mask_id is not None
            ids = self.tokenizer.encode(text, parse_special=masked_lm)
        if not ids and self.tokenizer.bos_id is not None:
            ids = [self.tokenizer.bos_id]
        return self._check_length(ids)

    def _check_length(self, ids: list[int]) -> list[int]:
        if not ids:
            raise BadInput(_("inspection: the text must have at least one token, got none; enter some text"))
        if self.max_positions is not None and len(ids) > self.max_positions:
            raise TooLong(
                _(
                    "inspection: the model takes at most {max_positions} tokens, got {num_ids}; shorten the text",
                    max_positions=self.max_positions,
                    num_ids=len(ids),
                )
            )
        return ids

    def encode_target(self, text: str | Iterable[int]) -> list[int]:
        """Token ids of the decoder's text, with the end-of-sequence token."""
        if not isinstance(text, str):
            return [int(n) for n in text]
        if self.tokenizer is None:
            raise BadInput(
                _(
                    "inspection: a model without tokenizer takes a target of token ids, got a text; "
                    "give ids, or use headwater.load"
                )
            )
        ids = self._target_tokenizer().encode(text, add_special_tokens=not self.metadata)
        if not ids or ids[-1] not in self.eos_ids:
            ids = [*ids, *self.eos_ids[:1]]
        return self._check_length(ids)

    def _target_tokenizer(self) -> Any:
        """The tokenizer of the target, which may differ from that of the source."""
        if self.path is not None and (self.path / "target.spm").exists():
            from headwater.text.load import load_target_tokenizer

            return load_target_tokenizer(self.path)
        return getattr(self.tokenizer, "target", self.tokenizer)


def tokenize_input(
    model: ModelLike, text: TextLike, target: str | Iterable[int] | None = None, *, max_new_tokens: int = 128
) -> TokenizedInput:
    """The input tokens of a text. Without a target, an encoder-decoder generates up to max_new_tokens."""
    if isinstance(text, TokenizedInput):
        return text
    inspected = InspectedModel.wrap(model)
    ids = inspected.encode_prompt(text)
    if inspected.is_encoder_decoder:
        return _tokenize_pair(inspected, ids, target, max_new_tokens)
    if target is not None:
        raise BadInput(_("inspection: only an encoder-decoder has a target, got one; leave it out"))
    tokens = label_tokens(ids, inspected.tokenizer, from_source=True)
    return TokenizedInput(
        inspected.model,
        inspected.tokenizer,
        tokens,
        next_tokens=tokens[1:] if inspected.model.decoder is not None else (),
        labels=inspected.labels,
    )


def _tokenize_pair(
    inspected: InspectedModel, source_ids: list[int], target: str | Iterable[int] | None, max_new_tokens: int
) -> TokenizedInput:
    """Source and target of an encoder-decoder. The decoder's input is the target shifted right by the start token."""
    target_ids = _target_ids(inspected, source_ids, target, max_new_tokens)
    if inspected.decoder_start_id is None:
        raise BadInput(_("inspection: the decoder needs a start token, this model has none; use headwater.load"))
    return TokenizedInput(
        inspected.model,
        inspected.tokenizer,
        tokens=label_tokens([inspected.decoder_start_id, *target_ids[:-1]], inspected.tokenizer),
        source=label_tokens(source_ids, inspected.tokenizer, from_source=True),
        next_tokens=label_tokens(target_ids, inspected.tokenizer),
        generated=target is None,
    )


def _target_ids(
    inspected: InspectedModel, source: list[int], target: str | Iterable[int] | None, max_new_tokens: int
) -> list[int]:
    """Token ids of the target; generated from the source if it is None."""
    if target is not None:
        return inspected.encode_target(target)
    from headwater.generation.api import generate

    if inspected.decoder_start_id is None:
        raise BadInput(_("inspection: this model has no decoder start token, so it cannot generate; give a target"))
    return list(generate(inspected.text_model, source, max_tokens=max_new_tokens).ids)


# --------------------------------------------------------------------------------------------------
# Resolve a name or path to a model spec: a preset, an installed model, a model folder or file, or a spec file.


MAX_SPEC_BYTES = 16 * 2**20  # the spec of the largest known model has a few thousand bytes


def resolve_spec(name: str, vocab: int | None = None) -> Model:
    """The model spec of a name or path; a preset takes precedence over a file of the same name."""
    if name.lower() in PRESETS or name.lower() in ALIASES:
        return preset(name, vocab)
    path = Path(name)
    if not path.exists() and name not in HUB:
        hint = nearest(name, [*PRESETS, *ALIASES, *HUB])
        raise NotFound(
            _(
                "{name!r} must be the name of a preset or a model, or a file, and is none of them; {hint}",
                name=name,
                hint=hint,
            )
        )
    if vocab is not None:
        raise BadSetting(_("vocab applies to a preset, got it for the file {name}; change it in the file", name=name))
    if name in HUB or path.is_dir() or path.suffix == ".gguf":
        return load_spec(name)
    return load_spec(path.parent) if path.name == "config.json" else read_spec_file(path)


def read_spec_file(path: Path) -> Model:
    """Read a model spec from JSON, as written by parts.to_dict."""
    if path.stat().st_size > MAX_SPEC_BYTES:
        raise BadFile(
            _(
                "{path}: a spec has at most {max_bytes:,} bytes, this has {size:,}; is it weights?",
                path=path,
                max_bytes=MAX_SPEC_BYTES,
                size=path.stat().st_size,
            )
        )
    spec = from_dict(strict_json.parse_json_object(path.read_bytes(), path))
    if not isinstance(spec, Model):
        raise BadFile(
            _(
                "{path}: must hold a Model, it holds a {name}; write it with parts.to_dict(model.spec)",
                path=path,
                name=type(spec).__name__,
            )
        )
    return spec
