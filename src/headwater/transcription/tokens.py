"""The special tokens of a Whisper vocabulary: languages, tasks, timestamps, and those that are never generated.

    end of text · start of transcript · one for each language · translate · transcribe · start of LM · start of previous
    text · no speech · no timestamps · <|0.00|> <|0.02|> … <|30.00|>

They follow the text tokens in this order. An English-only model has the same, and uses no language and no task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from headwater.data.readers.columns import language_code
from headwater.errors import BadFile, BadSetting, nearest
from headwater.families.hf_folder import LoadedModel
from headwater.i18n import _
from headwater.text.spec import added_token
from headwater.text.tokenizer import Tokenizer

SPEECH_TASK = "speech-recognition"  # in the metadata of a model that was trained here
SECONDS_PER_STAMP = 0.02
MAX_PREVIOUS_TOKENS = 223
ENGLISH_PIECES = 50_256  # text tokens of the English-only vocabulary, which has the tokens of all languages too
# Symbols that stand for sounds or remarks rather than speech, and are never transcribed.
REMARKS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}"),
    *("♪♪", "♪♪♪"),
)
MUSIC = "♩♪♫♬♭♮♯"  # of several tokens, of which the first is theirs alone
# Languages written without spaces: a word is a character.
UNSPACED = frozenset(("zh", "ja", "th", "lo", "my", "yue"))


@dataclass(frozen=True)
class SpeechTokens:
    """The tokenizer of a speech model and the ids of its special tokens."""

    tokenizer: Tokenizer
    multilingual: bool
    end: int
    start: int
    languages: dict[str, int]  # code -> id
    translate: int
    transcribe: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]  # as the first token
    timestamps: bool = True  # whether the model was trained with them
    only_language: str = ""  # the language it was trained on, where it was one
    continues: bool = True  # whether it was trained with the text before as its prompt

    @property
    def first_stamp(self) -> int:
        """The id of <|0.00|>."""
        return self.no_timestamps + 1

    def is_stamp(self, token: int) -> bool:
        return token >= self.first_stamp

    def seconds(self, stamp: int) -> float:
        """The time of a timestamp token in its window."""
        return (stamp - self.first_stamp) * SECONDS_PER_STAMP

    def text(self, ids: Sequence[int]) -> str:
        """The text of output tokens, without timestamps and special tokens."""
        return self.tokenizer.decode_bytes([token for token in ids if token < self.end]).decode("utf-8", "replace")

    def prompt(
        self, previous: Sequence[int] = (), language: str = "en", task: str = "transcribe", timestamps: bool = True
    ) -> list[int]:
        """The decoder's first tokens: the text before this window, then what to do with it."""
        before = [self.start_of_previous, *previous[-MAX_PREVIOUS_TOKENS:]] if previous and self.continues else []
        what = [self.languages[language], self.translate if task == "translate" else self.transcribe]
        return [
            *before,
            self.start,
            *(what if self.multilingual else []),
            *([] if timestamps and self.timestamps else [self.no_timestamps]),
        ]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that is given as the one before."""
        return self.tokenizer.encode(" " + text.strip(), add_special_tokens=False) if text.strip() else []

    def words(self, ids: Sequence[int], language: str) -> list[tuple[str, list[int]]]:
        """Text tokens as words, each with its tokens: parted at spaces and punctuation, or character by character."""
        characters: list[tuple[str, list[int]]] = []
        pieces = [self.tokenizer.piece_bytes(token) for token in ids]
        first = 0
        for last in range(1, len(ids) + 1):
            raw = b"".join(pieces[first:last])
            if _is_utf8(raw) or last == len(ids):
                characters.append((raw.decode("utf-8", "replace"), list(ids[first:last])))
                first = last
        if language in UNSPACED:
            return characters
        words: list[tuple[str, list[int]]] = []
        for text, tokens in characters:
            begins = not words or text.startswith(" ") or _is_punctuation(text.strip())
            if begins:
                words.append((text, tokens))
            else:
                words[-1] = (words[-1][0] + text, words[-1][1] + tokens)
        return words

    @cached_property
    def language_names(self) -> dict[str, str]:
        """English names of the languages, in lower case, and their codes."""
        from babel import Locale

        names = Locale("en").languages
        return {names[code].lower(): code for code in self.languages if code in names}

    def find_language(self, name: str) -> str:
        """The code of a language, given by its code, a locale (zh-CN) or its name."""
        code = name.strip().lower()
        code = self.language_names.get(code, code)
        code = code if code in self.languages else language_code(code) or code
        if not self.multilingual:
            only = self.only_language
            if code != only:
                raise BadSetting(
                    _(
                        "this model hears {only} only, got {language!r}; use a multilingual one",
                        only=_("English") if only == "en" else only,
                        language=name[:40],
                    )
                )
            return only
        if code not in self.languages:
            known = [*self.languages, *self.language_names]
            raise BadSetting(
                _("the language {language!r} is not known; {nearest}", language=name[:40], nearest=nearest(code, known))
            )
        return code


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_punctuation(text: str) -> bool:
    """Whether a text is a run of ASCII punctuation as it stands in the ASCII table, or empty."""
    return text in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def speech_tokens(loaded: LoadedModel) -> SpeechTokens:
    """The special tokens of a loaded Whisper, or of a model that was trained here on single recordings."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or loaded.spec.decoder is None:
        raise BadFile(_("{path}: a speech model needs a tokenizer, there is none beside it", path=loaded.path))
    vocab: int = getattr(loaded.spec.head, "vocab", len(tokenizer))
    metadata = loaded.config.get("metadata") or {}
    if metadata.get("task") == SPEECH_TASK:
        return trained_tokens(tokenizer, str(metadata.get("language") or ""), loaded.path)
    tokens = find_speech_tokens(tokenizer, vocab, loaded.path)
    suppressed = loaded.generation_setting("suppress_tokens") or tokens.suppressed
    suppressed_first = loaded.generation_setting("begin_suppress_tokens") or tokens.suppressed_first
    return replace(tokens, suppressed=_ids(suppressed, vocab), suppressed_first=_ids(suppressed_first, vocab))


def trained_tokens(tokenizer: Tokenizer, language: str, where: object = "tokenizer") -> SpeechTokens:
    """The special tokens as training on single recordings uses them: no timestamps, no text before, any symbol."""
    tokens = find_speech_tokens(tokenizer, len(tokenizer), where)
    language = language or ("" if tokens.multilingual else next(iter(tokens.languages), "en"))
    special = {tokenizer.token_to_id(text) for text in tokenizer.special_tokens} | set(
        range(tokens.end, len(tokenizer))
    )
    suppressed = tuple(sorted(token for token in special if token is not None and token != tokens.end))
    return replace(
        tokens, suppressed=suppressed, suppressed_first=(), timestamps=False, only_language=language, continues=False
    )


def find_speech_tokens(tokenizer: Tokenizer, vocab: int, where: object = "tokenizer") -> SpeechTokens:
    """The special tokens of a tokenizer; vocab: the rows of the model's table."""

    def find(*names: str) -> int:
        for name in names:
            token = tokenizer.token_to_id(f"<|{name}|>")
            if token is not None:
                return token
        raise BadFile(
            _("{path}: the tokenizer of a speech model must have <|{name}|>, it has not", path=where, name=names[0])
        )

    start = find("startoftranscript")
    translate = find("translate")
    transcribe = find("transcribe")
    pieces = {token: (tokenizer.backend.id_to_token(token) or "") for token in range(start + 1, translate)}
    special = (start, translate, transcribe, find("startoflm"), find("startofprev"), find("nospeech", "nocaptions"))
    end = find("endoftext")
    languages = {piece.strip("<|>"): token for token, piece in pieces.items()}
    multilingual = len(languages) > 1 and end != ENGLISH_PIECES
    return SpeechTokens(
        tokenizer,
        multilingual=multilingual,
        end=end,
        start=start,
        languages=languages,
        translate=translate,
        transcribe=transcribe,
        start_of_previous=special[4],
        no_speech=special[5],
        no_timestamps=find("notimestamps"),
        suppressed=_ids([*_remark_tokens(tokenizer), *special], vocab),
        suppressed_first=_ids([*tokenizer.encode(" ", add_special_tokens=False)[:1], end], vocab),
        timestamps=find("notimestamps") + 1 < vocab,
        only_language="" if multilingual else "en",
    )


def _ids(values: Iterable[object], vocab: int) -> tuple[int, ...]:
    """Those of the values that are token ids."""
    return tuple(token for token in values if type(token) is int and 0 <= token < vocab)


def speech_tokenizer(tokenizer: Tokenizer, languages: Sequence[str]) -> Tokenizer:
    """A tokenizer that was trained on transcripts, with the special tokens of a speech model after its own."""
    names = ["endoftext", "startoftranscript", *languages, "translate", "transcribe", "startoflm", "startofprev"]
    spec = tokenizer.spec
    first = len(tokenizer)
    special = [f"<|{name}|>" for name in (*names, "nospeech", "notimestamps")]
    spec["added_tokens"] += [added_token(token, first + n) for n, token in enumerate(special)]
    roles = {"bos": special[1], "eos": special[0], "pad": special[0], "unk": "<unk>"}
    return Tokenizer(spec, roles, where=tokenizer.where)


def _remark_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of remarks, and the hyphen and the quote at the beginning of a word."""
    ids = {tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (" -", " '")}
    for symbol in (*REMARKS, *MUSIC):
        for text in (symbol, " " + symbol):
            pieces = tokenizer.encode(text, add_special_tokens=False)
            if len(pieces) == 1 or symbol in MUSIC:
                ids.add(pieces[0])
    return sorted(ids)
