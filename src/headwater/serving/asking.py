"""What a page may ask, field by field: strict types, bounds on every length and number, nothing unknown."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwater.errors import BadFile, BadInput
from headwater.inspection.subjects import Reading, named, read
from headwater.inspection.words import Both
from headwater.serving.shelf import Opened
from headwater.weights.strict_json import parse_object

MOST_BODY, MOST_TEXT = 1 << 20, 60_000
MOST_TOKENS, MOST_PROMPT = 2048, 8192  # of a text that is looked at, and of one that is gone on with

Name = Annotated[str, Field(min_length=1, max_length=120)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MOST_TOKENS)]
Small = Annotated[int, Field(ge=0, le=1 << 16)]


class Ask(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OfModel(Ask):
    model: Name


class Check(OfModel):
    """only: some of the laws, so that a large model can be asked one by one; none means all."""

    only: Annotated[list[Name], Field(max_length=20)] = []


class OfText(OfModel):
    """text: what a single stack reads, or the decoder writes; source: what the encoder reads. ids win over texts."""

    text: Text = ""
    source: Text = ""
    ids: Ids | None = None
    source_ids: Ids | None = None


class OfTrace(Ask):
    trace: Name
    kind: Name
    layer: Small
    head: Annotated[int, Field(ge=-2, le=1 << 16)]


class Tile(OfTrace):
    level: Annotated[int, Field(ge=0, le=6)]
    row: Small
    column: Small
    power: Annotated[float, Field(ge=0.1, le=1)] = 1.0


class Block(OfTrace):
    rows: tuple[Small, Small]
    columns: tuple[Small, Small]


class Thumbs(Ask):
    trace: Name
    kind: Name


class Chosen(OfText):
    """How the next token is chosen: see generation.choosers. new: how many of the ids were chosen before it."""

    new: Small = 0
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    shown: Annotated[int, Field(ge=1, le=200)] = 24

    def choosers(self) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class Hidden(OfText):
    place: Small
    shown: Annotated[int, Field(ge=1, le=200)] = 24


class Lens(OfText):
    places: Annotated[int, Field(ge=1, le=64)] = 12


class Why(OfText):
    """Which output is explained: a label, or the token said at a place (-1: the last; None: the server picks one)."""

    place: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    token: Id | None = None


class EachOff(OfText):
    """The heads of one layer, each switched off in turn."""

    kind: Name
    layer: Small


class Without(EachOff):
    head: Small
    place: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] = -1


class Message(Ask):
    role: Annotated[str, Field(pattern="^(system|user|assistant)$")]
    content: Text


class Talk(Chosen):
    messages: Annotated[list[Message], Field(max_length=200)] = []
    tokens: Annotated[int, Field(ge=1, le=1024)] = 128


class Step(OfText):
    layer: Small = 0
    head: Small = 0
    place: Small = 0


class OfRun(Ask):
    run: Name
    after: Annotated[int, Field(ge=-1, lt=1 << 53)] = -1


class Checkpoint(OfRun):
    checkpoint: Annotated[int, Field(ge=0, lt=1 << 53)]
    text: Text = ""
    source: Text = ""
    kind: Name = "decoder.self_attn"
    layer: Small = 0
    head: Annotated[int, Field(ge=-2, le=1 << 16)] = 0


A = TypeVar("A", bound=Ask)


def parsed(kind: type[A], raw: bytes) -> A:
    """A request from its bytes. What is wrong is told by the field's name, never by its contents."""
    try:
        return kind.model_validate(_whole(parse_object(raw, "the request"), kind))
    except BadFile as fault:
        raise BadInput(Both(str(fault).partition(";")[0], "请求不是合格的 JSON")) from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])[:80]
        what = Both(
            f"the request's {where or 'body'} is refused: {first['msg'][:120]}", f"请求里的 {where or '正文'} 不合规定"
        )
        raise BadInput(what) from None


def _whole(value: dict[str, Any], kind: type[Ask]) -> dict[str, Any]:
    """JSON has one list; a pair is a tuple here."""
    return {k: tuple(v) if isinstance(v, list) and k in ("rows", "columns") else v for k, v in value.items()}


def reading_of(opened: Opened, ask: OfText, most: int = MOST_TOKENS) -> Reading:
    """The tokens that are meant; a decoder that has a source and no text writes one itself.

    Tokens are counted first: a text that is too long is refused before the model does anything.
    """
    subject = opened.subject
    if ask.ids is None and not subject.two:
        return read(opened.given, counted(subject.prompt(ask.text), most))
    if subject.two and not (ask.source_ids or ask.source):
        raise BadInput(
            Both(
                "an encoder-decoder reads a source, got none; give source or source_ids",
                "编码器-解码器要读源文，却没有；请填源文",
            )
        )
    source_ids = counted(ask.source_ids or subject.prompt(ask.source), most) if subject.two else []
    if subject.two:
        _check_ids("source_ids", source_ids, subject.model.encoder)
    if ask.ids is None:
        target = counted(subject.target(ask.text), most) if ask.text else None
        return read(opened.given, source_ids, target)
    _check_ids("ids", counted(ask.ids, most), subject.model.writer)
    tokens = named(ask.ids, subject.tokenizer, source=not subject.two)
    source_tokens = named(source_ids, subject.tokenizer, source=True)
    follows = tokens[1:] if subject.model.decoder is not None else ()
    return Reading(subject.model, subject.tokenizer, tokens, source_tokens, follows, labels=subject.labels)


def counted(ids: list[int], most: int = MOST_TOKENS) -> list[int]:
    """The ids, if they are not too many."""
    if len(ids) > most:
        en = f"at most {most} tokens are read here, got {len(ids)}; shorten the text"
        raise BadInput(Both(en, f"这里最多读 {most} 个词元，得到 {len(ids)} 个；请缩短文字"))
    return ids


def _check_ids(what: str, ids: list[int], stack: Any) -> None:
    size = stack.embed.tokens.num_embeddings
    if beyond := [n for n in ids if n >= size]:
        en = f"{what} must be below {size}, got {beyond[0]}; they are another model's"
        raise BadInput(Both(en, f"{what} 应小于 {size}，得到 {beyond[0]}；它们属于别的模型"))
