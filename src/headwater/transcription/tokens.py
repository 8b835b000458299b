"""The special tokens of a Whisper vocabulary: languages, tasks, timestamps, and those that are never generated.

    end of text · start of transcript · one for each language · translate · transcribe · start of LM · start of previous
    text · no speech · no timestamps · <|0.00|> <|0.02|> … <|30.00|>

They follow the text tokens in this order. An English-only model has the same, and uses no language and no task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headwater.errors import BadFile, BadSetting, nearest
from headwater.families.hf_folder import LoadedModel
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer

SECONDS_PER_STAMP = 0.02
MAX_PREVIOUS_TOKENS = 223
MULTILINGUAL_VOCAB = 51_865
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
        before = [self.start_of_previous, *previous[-MAX_PREVIOUS_TOKENS:]] if previous else []
        what = [self.languages[language], self.translate if task == "translate" else self.transcribe]
        return [
            *before,
            self.start,
            *(what if self.multilingual else []),
            *([] if timestamps else [self.no_timestamps]),
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
        """The code of a language, given by its code or its English name."""
        code = name.strip().lower()
        code = self.language_names.get(code, code)
        if not self.multilingual:
            if code != "en":
                raise BadSetting(
                    _("this model hears English only, got {language!r}; use a multilingual one", language=name[:40])
                )
            return "en"
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
    """The special tokens of a loaded Whisper."""
    tokenizer = loaded.tokenizer
    if tokenizer is None or loaded.spec.decoder is None:
        raise BadFile(_("{path}: a speech model needs a tokenizer, there is none beside it", path=loaded.path))

    def find(*names: str) -> int:
        for name in names:
            token = tokenizer.token_to_id(f"<|{name}|>")
            if token is not None:
                return token
        raise BadFile(
            _(
                "{path}: the tokenizer of a speech model must have <|{name}|>, it has not",
                path=loaded.path,
                name=names[0],
            )
        )

    start = find("startoftranscript")
    translate = find("translate")
    transcribe = find("transcribe")
    pieces = {token: (tokenizer.backend.id_to_token(token) or "") for token in range(start + 1, translate)}
    special = (start, translate, transcribe, find("startoflm"), find("startofprev"), find("nospeech", "nocaptions"))
    end = find("endoftext")
    vocab: int = getattr(loaded.spec.head, "vocab", len(tokenizer))
    suppressed = loaded.generation_setting("suppress_tokens") or [*_remark_tokens(tokenizer), *special]
    suppressed_first = loaded.generation_setting("begin_suppress_tokens") or [
        *tokenizer.encode(" ", add_special_tokens=False)[:1],
        end,
    ]
    return SpeechTokens(
        tokenizer,
        multilingual=vocab >= MULTILINGUAL_VOCAB,
        end=end,
        start=start,
        languages={piece.strip("<|>"): token for token, piece in pieces.items()},
        translate=translate,
        transcribe=transcribe,
        start_of_previous=special[4],
        no_speech=special[5],
        no_timestamps=find("notimestamps"),
        suppressed=tuple(token for token in suppressed if type(token) is int and 0 <= token < vocab),
        suppressed_first=tuple(token for token in suppressed_first if type(token) is int and 0 <= token < vocab),
    )


def _remark_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens of remarks, and the hyphen and the quote at the beginning of a word."""
    ids = {tokenizer.encode(mark, add_special_tokens=False)[0] for mark in (" -", " '")}
    for symbol in (*REMARKS, *MUSIC):
        for text in (symbol, " " + symbol):
            pieces = tokenizer.encode(text, add_special_tokens=False)
            if len(pieces) == 1 or symbol in MUSIC:
                ids.add(pieces[0])
    return sorted(ids)
