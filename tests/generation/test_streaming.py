"""Streamed text is the whole text; stop strings cut exactly, however tokens cut them."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.errors import BadSetting
from headwater.generation.streaming import StopString, TextStream, build_stop_strings


def decode_completion(decode, prompt, ids, stop_strings=()):
    """The text of a complete output: by definition what the stream releases."""
    stream = TextStream.after_prompt(decode, prompt, stop_strings)
    output = ""
    for token in ids:
        text, stream = stream.push(token)
        output += text
        if stream.stop_found:
            break
    return output + stream.flush()


def letters(ids):
    return bytes(ids).decode("utf-8", "replace")


def pieces(ids):
    """A decoder in which the first word loses its space, as sentencepiece has it."""
    return "".join(chr(i).replace("_", " ") for i in ids).removeprefix(" ")


def slowly(text, marks):
    """The text before the stop string that is complete first; of several that end together, before the longest."""
    for end in range(1, len(text) + 1):
        result = [mark for mark in marks if text[:end].endswith(mark)]
        if result:
            return text[: end - max(map(len, result))]
    return text


words = st.text("ab你🙂é", max_size=20)
marks = st.lists(st.text("ab你🙂", min_size=1, max_size=4), max_size=4)


@given(words, marks)
@example("aab", ["ab"])
@example("abab", ["abb", "ba"])
@example("你", ["你"])
def test_any_text_and_any_stop_strings(text, given_marks):
    stream, said = TextStream.after_prompt(letters, (), build_stop_strings(given_marks)), ""
    for token in text.encode():
        piece, stream = stream.push(token)
        said += piece
        assert "\ufffd" not in piece, "only whole characters"
        assert slowly(text, given_marks).startswith(said), "nothing is ever taken back"
        if stream.stop_found:
            break
    assert (
        said + stream.flush()
        == slowly(text, given_marks)
        == decode_completion(letters, (), text.encode(), build_stop_strings(given_marks))
    )


@given(st.binary(max_size=24))
def test_bytes_that_are_no_text_are_released_in_the_end(raw):
    assert decode_completion(letters, (), raw) == letters(raw)


@given(st.text("ab_", max_size=12), st.text("ab_", max_size=12))
def test_prompt_and_completion_make_the_full_text(prompt, rest):
    ids = [ord(c) for c in prompt + rest]
    said = decode_completion(pieces, ids[: len(prompt)], ids[len(prompt) :])
    assert pieces(ids[: len(prompt)]) + said == pieces(ids)


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=12))
def test_a_match_is_found_as_early_as_it_can_be(mark, text):
    stop, matched = StopString(mark), 0
    for end in range(1, len(text) + 1):
        matched = stop.advance(matched, text[end - 1])
        longest = max(n for n in range(len(mark) + 1) if text[:end].endswith(mark[:n]))
        assert matched == longest


def test_a_wrong_table_would_be_found():
    class Forgetful(StopString):
        failure_table = property(lambda self: [0] * len(self.text))

    matched, broken = 0, 0
    for character in "aaab":
        matched, broken = StopString("aab").advance(matched, character), Forgetful("aab").advance(broken, character)
    assert matched == 3 and broken != 3


def test_text_is_held_only_while_it_may_become_a_stop_string():
    stream = TextStream.after_prompt(letters, (), build_stop_strings(["</s>"]))
    said = []
    for token in b"a<b</x</s>c":
        piece, stream = stream.push(token)
        said.append(piece)
        if stream.stop_found:
            break
    assert said == ["a", "", "<b", "", "", "</x", "", "", "", ""] and stream.stop_found and stream.flush() == ""


@pytest.mark.parametrize(
    ("given_marks", "words_"),
    [
        (["a"] * 65, "stop must be at most 64 strings, got 65"),
        (["a" * 1001], "a stop string must have 1 to 1000 characters, got 1001"),
        ([""], "got 0"),
        ([None], "got None"),
    ],
)
def test_limits(given_marks, words_):
    with pytest.raises(BadSetting) as fault:
        build_stop_strings(given_marks)
    assert words_ in str(fault.value) and "\n" not in str(fault.value)


@settings(max_examples=1)
@given(st.just(None))
def test_the_worst_stop_strings_cost_no_square(_):
    """64 strings that all but match, 3000 characters: measured 0.4 s; a quadratic scan takes minutes."""
    stream = TextStream.after_prompt(letters, (), build_stop_strings(["a" * (1000 - i) + "b" for i in range(1, 65)]))
    start = time.perf_counter()
    for _token in range(1000):
        _, stream = stream.push(97)
    assert time.perf_counter() - start < 10
