"""Request schemas (pydantic): strict types, bounds on every length and number, no unknown fields."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headwater.errors import BadFile, BadInput
from headwater.i18n import _
from headwater.inspection.inputs import TokenizedInput, label_tokens, tokenize_input
from headwater.io.strict_json import parse_json_object
from headwater.serving.model_store import OpenModel

MAX_BODY_BYTES = 1 << 21  # 30 seconds of sound have 1.3 MB
MAX_SAMPLES_CHARS = 30 * 16_000 * 2 * 4 // 3  # of 30 seconds in base64
MAX_TEXT_CHARS = 60_000
MAX_INPUT_TOKENS = 2048  # of a text that is inspected
MAX_PROMPT_TOKENS = 8192  # of a prompt for generation

Name = Annotated[str, Field(min_length=1, max_length=120)]
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_INPUT_TOKENS)]
Index = Annotated[int, Field(ge=0, le=1 << 16)]


class ApiRequest(BaseModel):
    """Base of all request schemas: strict types, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ModelRequest(ApiRequest):
    """A request about one model of the model store."""

    model: Name


class CheckRequest(ModelRequest):
    """Run the checker. laws: some of them, so that a large model can be checked law by law; none means all."""

    laws: Annotated[list[Name], Field(max_length=20)] = []


class ImageRequest(ModelRequest):
    """An image file in base64. patch: the query of the attention, counted row by row; none is the class token."""

    image: Annotated[str, Field(min_length=1, max_length=MAX_BODY_BYTES)]
    patch: Index | None = None


class VisibilityRequest(ModelRequest):
    """Who sees whom in one layer of a text of `length` tokens; position: None is the middle."""

    layer: Index = 0
    length: Annotated[int, Field(ge=8, le=4096)] = 64
    position: Annotated[int, Field(ge=0, lt=4096)] | None = None


class TextRequest(ModelRequest):
    """Input text: that of a single stack or of the decoder; source: that of the encoder. Token ids win over texts."""

    text: Text = ""
    source: Text = ""
    ids: TokenIds | None = None
    source_ids: TokenIds | None = None


class AttentionHeadRequest(ApiRequest):
    """One head of a trace; head -1 is the mean over heads, -2 the maximum."""

    trace_id: Name
    kind: Name
    layer: Index
    head: Annotated[int, Field(ge=-2, le=1 << 16)]


class TileRequest(AttentionHeadRequest):
    """One tile of uint8 weights; see AttentionTrace.tile."""

    level: Annotated[int, Field(ge=0, le=6)]
    row: Index
    column: Index
    power: Annotated[float, Field(ge=0.1, le=1)] = 1.0


class BlockRequest(AttentionHeadRequest):
    """A block of float32 weights: rows and columns are [first, end)."""

    rows: tuple[Index, Index]
    columns: tuple[Index, Index]


class ThumbnailsRequest(ApiRequest):
    """Thumbnails of all layers and heads of one kind of attention."""

    trace_id: Name
    kind: Name


class SamplingRequest(TextRequest):
    """Sampling of the next token (headwater.generation.sampling). num_generated: how many of the ids were sampled."""

    num_generated: Index = 0
    temperature: Annotated[float, Field(gt=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    num_candidates: Annotated[int, Field(ge=1, le=200)] = 24

    def sampling_options(self) -> dict[str, Any]:
        """Keyword arguments of build_processors."""
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class FillMaskRequest(TextRequest):
    """Predictions of a masked language model at one position."""

    position: Index
    num_candidates: Annotated[int, Field(ge=1, le=200)] = 24


class LogitLensRequest(TextRequest):
    """The logit lens at the last num_positions positions."""

    num_positions: Annotated[int, Field(ge=1, le=64)] = 12


class SpeechRequest(ModelRequest):
    """A recording: 16-bit samples at 16 kHz in base64, at most 30 seconds. language: None to detect it."""

    samples: Annotated[str, Field(min_length=4, max_length=MAX_SAMPLES_CHARS)]
    language: Name | None = None


class AttributionRequest(TextRequest):
    """Attribution of one output: a label, or a token at a position (-1: the last; None: see default_position)."""

    position: Annotated[int, Field(ge=-1, le=MAX_INPUT_TOKENS)] | None = None
    token_id: TokenId | None = None


class AblateLayerRequest(TextRequest):
    """Ablation of each head of one layer in turn."""

    kind: Name
    layer: Index


class AblateHeadRequest(AblateLayerRequest):
    """Ablation of one head, with the changed predictions at one position."""

    head: Index
    position: Annotated[int, Field(ge=-1, le=MAX_INPUT_TOKENS)] = -1


class ChatRequestMessage(ApiRequest):
    """One message of a chat."""

    role: Annotated[str, Field(pattern="^(system|user|assistant)$")]
    content: Text


class ChatRequest(SamplingRequest):
    """Streamed generation from chat messages, a prompt (text) or a source."""

    messages: Annotated[list[ChatRequestMessage], Field(max_length=200)] = []
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 128


class WalkthroughRequest(TextRequest):
    """The forward pass of one layer and head, step by step."""

    layer: Index = 0
    head: Index = 0
    position: Index = 0


class RunRequest(ApiRequest):
    """Metrics of a training run after a line of metrics.jsonl that the page has."""

    run: Name
    after_line: Annotated[int, Field(ge=-1, lt=1 << 53)] = -1


class CheckpointRequest(RunRequest):
    """One attention head and the generated text at one checkpoint of a run."""

    checkpoint: Annotated[int, Field(ge=0, lt=1 << 53)]
    text: Text = ""
    source: Text = ""
    kind: Name = "decoder.self_attn"
    layer: Index = 0
    head: Annotated[int, Field(ge=-2, le=1 << 16)] = 0


RequestT = TypeVar("RequestT", bound=ApiRequest)


def parse_request(request_type: type[RequestT], raw: bytes) -> RequestT:
    """Validate the bytes of a request. An error names the field, never its contents."""
    try:
        return request_type.model_validate(_lists_to_tuples(parse_json_object(raw, _("the request")), request_type))
    except BadFile as fault:
        raise BadInput(_("the request is not valid JSON: {reason}", reason=str(fault).partition(";")[0])) from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(step) for step in first["loc"])[:80]
        message = _("the request's {field} is invalid: {reason}", field=path or _("body"), reason=first["msg"][:120])
        raise BadInput(message) from None


def _lists_to_tuples(value: dict[str, Any], request_type: type[ApiRequest]) -> dict[str, Any]:
    """Lists of JSON as tuples, where the schema has a tuple."""
    return {k: tuple(v) if isinstance(v, list) and k in ("rows", "columns") else v for k, v in value.items()}


def tokenize_request(open_model: OpenModel, request: TextRequest, max_tokens: int = MAX_INPUT_TOKENS) -> TokenizedInput:
    """Tokens of a request. An encoder-decoder with a source and no text generates the target itself.

    Tokens are counted first: a text that is too long is refused before any forward pass.
    """
    inspected = open_model.inspected
    model = inspected.model

    # A text for a single stack
    if request.ids is None and not inspected.is_encoder_decoder:
        prompt_ids = check_num_tokens(inspected.encode_prompt(request.text), max_tokens)
        return tokenize_input(open_model.loaded, prompt_ids)

    # The source of an encoder-decoder
    source_ids: list[int] = []
    if inspected.is_encoder_decoder:
        if not (request.source_ids or request.source):
            raise BadInput(_("an encoder-decoder needs a source, got none; give source or source_ids"))
        source_ids = check_num_tokens(request.source_ids or inspected.encode_prompt(request.source), max_tokens)
        _check_ids("source_ids", source_ids, model.encoder)

    # Its target: a text, or none to generate one
    if request.ids is None:
        target_ids = check_num_tokens(inspected.encode_target(request.text), max_tokens) if request.text else None
        return tokenize_input(open_model.loaded, source_ids, target_ids)

    # Token ids
    _check_ids("ids", check_num_tokens(request.ids, max_tokens), model.output_stack)
    tokens = label_tokens(request.ids, inspected.tokenizer, from_source=not inspected.is_encoder_decoder)
    source_tokens = label_tokens(source_ids, inspected.tokenizer, from_source=True)
    next_tokens = tokens[1:] if model.decoder is not None else ()
    return TokenizedInput(model, inspected.tokenizer, tokens, source_tokens, next_tokens, labels=inspected.labels)


def check_num_tokens(ids: list[int], max_tokens: int = MAX_INPUT_TOKENS) -> list[int]:
    """The ids themselves; raises BadInput if there are more than max_tokens."""
    if len(ids) > max_tokens:
        raise BadInput(
            _(
                "at most {max_tokens} tokens are allowed here, got {num_ids}; shorten the text",
                max_tokens=max_tokens,
                num_ids=len(ids),
            )
        )
    return ids


def _check_ids(field_name: str, ids: list[int], stack: Any) -> None:
    vocab_size = stack.embed.tokens.num_embeddings
    too_large = [token_id for token_id in ids if token_id >= vocab_size]
    if too_large:
        raise BadInput(
            _(
                "{field} must be below the vocabulary size {vocab_size}, got {token_id}; use ids of this model's "
                "tokenizer",
                field=field_name,
                vocab_size=vocab_size,
                token_id=too_large[0],
            )
        )
