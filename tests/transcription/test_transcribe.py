"""Transcribing: windows, fallback, resuming, alignment, subtitles; with a small model whose text means nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import headwater
from headwater.audio.write import write_wav
from headwater.cli.transcribe import transcript_names
from headwater.errors import BadFile, BadInput, BadSetting
from headwater.transcription import search, windows
from headwater.transcription.journal import Journal
from headwater.transcription.search import SearchSettings, WindowOutput, decode_window
from headwater.transcription.subtitles import LineLimits, clock, write_transcript
from headwater.transcription.transcript import Segment, Transcript, Word
from headwater.transcription.windows import Progress, WindowSettings, split_segments
from headwater.transcription.words import dynamic_time_warping

STAMP = 50363
FAST = {"beam_size": 1, "best_of": 2, "temperature": [0.0, 0.6], "vad": False}


@pytest.fixture(autouse=True)
def short_outputs(monkeypatch):
    monkeypatch.setattr(search, "MAX_OUTPUT_TOKENS", 12)


def test_silence_says_nothing(babbler):
    for samples in (torch.zeros(160_000), torch.full((48_000,), 0.2), 0.05 * torch.ones(16_000)):
        assert headwater.transcribe(samples, babbler, beam_size=1).text == ""
    assert headwater.transcribe(torch.zeros(48_000), babbler, **FAST).text != ""  # without voice activity it would


def test_the_same_seed_gives_the_same_text(babbler, sound):
    sampled = {**FAST, "temperature": 0.9}
    first = headwater.transcribe(sound, babbler, **sampled)
    assert headwater.transcribe(sound, babbler, **sampled) == first
    assert headwater.transcribe(sound, babbler, **sampled, seed=7).text != first.text


def test_interrupted_is_resumed(babbler, sound, tmp_path):
    whole = headwater.transcribe(sound, babbler, timestamps="word", **FAST)
    seen = []

    def stop(segments, done, total):
        seen.append(done)
        if len(seen) == 2:
            raise KeyboardInterrupt

    settings = {"timestamps": "word", "journal": tmp_path / "journal", **FAST}
    with pytest.raises(KeyboardInterrupt):
        headwater.transcribe(sound, babbler, on_segments=stop, **settings)
    with (tmp_path / "journal").open("a") as file:
        file.write('{"frame": 9')  # the line that was being written
    resumed = []
    again = headwater.transcribe(sound, babbler, on_segments=lambda *given: resumed.append(given[1]), **settings)
    assert again.segments == whole.segments
    assert resumed[0] == seen[1] > 0
    assert resumed == sorted(resumed)


def test_killed_is_resumed_with_the_same_text(babbler, sound, tmp_path):
    """A process of its own is killed at its second report, again and again, until the recording is done."""
    settings = {"timestamps": "word", **FAST}
    whole = headwater.transcribe(sound, babbler, **settings)
    reports = []

    def kill(segments, done, total):
        reports.append(done)
        if len(reports) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    ends = []
    while not ends or (ends[-1] == -signal.SIGKILL and len(ends) < 20):
        child = os.fork()
        if not child:
            headwater.transcribe(sound, babbler, journal=tmp_path / "journal", on_segments=kill, **settings)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert len(ends) > 2 and ends[-1] == 0
    again = headwater.transcribe(sound, babbler, journal=tmp_path / "journal", **settings)
    assert again.segments == whole.segments


def test_a_journal_of_other_settings_is_begun_anew(babbler, sound, tmp_path):
    headwater.transcribe(sound, babbler, journal=tmp_path / "journal", **FAST)
    other = headwater.transcribe(sound[:80_000], babbler, journal=tmp_path / "journal", **FAST)
    assert other.segments == headwater.transcribe(sound[:80_000], babbler, **FAST).segments
    (tmp_path / "journal").write_text("damaged\n{}\n")
    segments: list[Segment] = [Segment(0, 1, "old")]
    assert Journal(tmp_path / "journal", "").open(["x"], segments) is None
    assert segments == []


def test_a_journal_that_cannot_be_opened_for_writing_keeps_what_it_has(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    Journal(path, "").open(["x"], [])
    Journal(path, "").append(Progress(3000, segments=(Segment(0.0, 2.0, "one"),)))

    def full(*names):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(BadFile, match="no space left"):
            Journal(path, "").open(["x"], [])
        with pytest.raises(BadFile, match="no space left on device; make room"):
            Journal(path, "").append(Progress(3000))
    segments: list[Segment] = []
    progress = Journal(path, "").open(["x"], segments)
    assert progress is not None and progress.frame == 3000
    assert segments == [Segment(0.0, 2.0, "one")]


def output(*ids: int) -> WindowOutput:
    return WindowOutput(tuple(ids), -0.5, 0.1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("ids", "times", "after"),
    [
        ((STAMP, 1, 2), [(10.0, 13.0)], 1300),  # no closing stamp
        ((STAMP, 1, STAMP + 50), [(10.0, 11.0)], 1300),
        ((STAMP, 1, STAMP + 50, STAMP + 60, 2, STAMP + 80), [(10.0, 11.0), (11.2, 11.6)], 1300),
        ((STAMP, 1, STAMP + 50, STAMP + 50), [(10.0, 11.0)], 1100),
        ((STAMP, 1, STAMP + 50, STAMP + 60, 2), [(10.0, 11.0)], 1100),  # what is unfinished comes again
    ],
)
def test_segments_and_the_next_window(babbler, ids, times, after):
    segments, frame = split_segments(babbler, output(*ids), 1000, 300)
    assert [(segment.start, segment.end) for segment in segments] == times
    assert frame == after


def test_fallback_rises_until_the_text_is_plausible(babbler, monkeypatch):
    answers = {
        0.0: WindowOutput((1,), -0.1, 0.0, 0.0, 3.0),  # repeats itself
        0.2: WindowOutput((2,), -2.0, 0.0, 0.2, 1.0),  # improbable
        0.4: WindowOutput((3,), -0.9, 0.0, 0.4, 1.0),
    }
    tried = []

    def decode(model, window, prompt, search):
        tried.append(search.temperature)
        return answers.get(search.temperature, answers[0.2])

    monkeypatch.setattr(windows, "decode_window", decode)
    settings = WindowSettings("en")
    assert windows.decode_with_fallback(babbler, None, [], settings, 0) is answers[0.4]
    assert tried == [0.0, 0.2, 0.4]

    answers[0.4] = answers[0.0]
    best = windows.decode_with_fallback(babbler, None, [], settings, 0)
    assert best == replace(answers[0.2], temperature=1.0)  # of those that do not repeat themselves
    silent = answers[0.0] = WindowOutput((1,), -1.5, 0.9, 0.0, 1.0)
    assert windows.decode_with_fallback(babbler, None, [], settings, 0) is silent


def test_beams_and_greedy(babbler, sound):
    from headwater.audio.mel import LogMel

    window = babbler.encode(LogMel(sound).window(0, 300))
    prompt = babbler.tokens.prompt()
    greedy = decode_window(babbler, window, prompt, SearchSettings(beam_size=1))
    assert decode_window(babbler, window, prompt, SearchSettings(beam_size=4)).avg_logprob >= greedy.avg_logprob - 0.5
    with torch.inference_mode():  # a beam of one is greedy search
        cache = babbler.new_cache(window)
        logits = search.forward_each(babbler.transformer, cache, [prompt], [1])[0].clone()
        one = search._beam_search(babbler, cache, logits, search.OutputRules(babbler.tokens, True), 1, 12)
    assert tuple(token for token in one.ids if token != 50256) == greedy.ids


def test_improbable_ends_do_not_stop_the_beams(babbler, monkeypatch):
    """A model that is sure of "2 3 4 5 end": at each step every beam also has an improbable end."""
    end, sure = babbler.tokens.end, [2, 3, 4, 5, babbler.tokens.end]

    def logits_after(ids):
        logits = torch.full((end + 1,), -12.0)
        logits[end] = -6.0
        logits[sure[len(ids)] if list(ids) == sure[: len(ids)] else 7] = 6.0
        return logits

    beams = [()]
    cache = Mock()
    cache.reorder = lambda rows: beams.__setitem__(slice(None), [beams[row] for row in rows])

    def next_logits(model, cache, new_ids):
        beams[:] = [(*beam, *ids) for beam, ids in zip(beams, new_ids, strict=True)]
        return torch.stack([logits_after(beam) for beam in beams])

    monkeypatch.setattr(search, "forward_last", next_logits)
    for size in (2, 3, 5):
        beams[:] = [()]
        best = search._beam_search(babbler, cache, logits_after(())[None], Mock(), size, 12)
        assert list(best.ids) == sure


def test_native_and_module_decoding_agree(babbler, sound, monkeypatch):
    fast = headwater.transcribe(sound, babbler, **FAST)
    monkeypatch.setattr(babbler, "_native", None)
    assert headwater.transcribe(sound, babbler, **FAST).text == fast.text


def naive_path(cost: np.ndarray) -> float:
    total = np.full(cost.shape, np.inf)
    for i, j in np.ndindex(*cost.shape):
        before = [total[a, b] for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if a >= 0 and b >= 0]
        total[i, j] = cost[i, j] + (min(before) if before else 0)
    return float(total[-1, -1])


@pytest.mark.parametrize("seed", range(6))
def test_time_warping_finds_the_cheapest_path(seed):
    random = np.random.default_rng(seed)
    cost = random.standard_normal((random.integers(1, 9), random.integers(1, 20)))
    rows, columns = dynamic_time_warping(cost)
    steps = set(zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True))
    assert steps <= {(1, 1), (1, 0), (0, 1)}
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, cost.shape[0] - 1, cost.shape[1] - 1)
    assert cost[rows, columns].sum() == pytest.approx(naive_path(cost), abs=1e-5)


# --------------------------------------------------------------------------------------------------------- subtitles

SAID = ["we", "had", "it", "all", "before", "us"]
WORDS = tuple(Word(f" {text}", n * 0.5, n * 0.5 + 0.5, 0.9) for n, text in enumerate(SAID))
ODD = Segment(3661.5, 3662.0, " <b> & --> 你好")
TALK = Transcript((Segment(0.0, 3.0, " we had it all before us", words=WORDS), ODD), "en", 3700.0)


def test_formats():
    assert write_transcript(TALK, "txt") == "we had it all before us\n<b> & --> 你好\n"
    assert "2\n01:01:01,500 --> 01:01:02,000\n<b> & -> 你好\n" in write_transcript(TALK, "srt")
    assert "01:01:01.500 --> 01:01:02.000\n&lt;b&gt; &amp; --&gt; 你好\n" in write_transcript(TALK, "vtt")
    assert write_transcript(TALK, "vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:03.000\nwe had")
    assert write_transcript(TALK, "tsv").splitlines()[2] == "3661500\t3662000\t<b> & --> 你好"
    read = json.loads(write_transcript(TALK, "json"))
    assert [segment["text"] for segment in read["segments"]] == [segment.text for segment in TALK.segments]
    assert Segment.from_dict({k: v for k, v in read["segments"][0].items() if k != "id"}).words == WORDS
    with pytest.raises(BadSetting, match="did you mean 'srt'"):
        write_transcript(TALK, "str")


@pytest.mark.parametrize("words", [WORDS, ()])
def test_lines_are_no_wider_than_asked(words):
    talk = Transcript((Segment(0.0, 3.0, " we had it all before us", words=words),), "en", 3.0)
    text = write_transcript(talk, "srt", LineLimits(width=10, lines=2))
    lines = [line for line in text.splitlines() if line and "-->" not in line and not line.isdigit()]
    assert max(map(len, lines)) <= 10
    assert " ".join(lines) == "we had it all before us"
    assert len([line for line in text.splitlines() if "-->" in line]) == 2
    if words:
        assert "00:00:00,000 --> 00:00:02,500" in text


def test_clock_rounds_to_milliseconds():
    assert [clock(s, ".") for s in (0, 59.9996, 3599.9999)] == ["00:00:00.000", "00:01:00.000", "01:00:00.000"]


# --------------------------------------------------------------------------------------------------------- bad input


def test_bad_settings(babbler, sound):
    for name, value, said in [
        ("task", "summarize", "transcribe or translate"),
        ("language", "fr", "hears English only"),
        ("beam_size", 0, "from 1 to 64"),
        ("best_of", 99, "from 1 to 64"),
        ("temperature", [], "from 0 to 10"),
        ("temperature", -1, "from 0 to 10"),
    ]:
        with pytest.raises(BadSetting, match=said):
            headwater.transcribe(sound, babbler, **{name: value})
    with pytest.raises(BadSetting, match="float32 or int8"):
        headwater.transcribe(sound, "whisper-tiny.en", precision="int3")
    with pytest.raises(BadInput, match="not a finite number"):
        headwater.transcribe(torch.full((16_000,), torch.nan), babbler)


def test_several_files_are_told_apart(babbler, sound, tmp_path, monkeypatch, capsys):
    from headwater.cli import main

    monkeypatch.setattr("headwater.transcription.speech_model.load_speech_model", lambda *args: babbler)
    files = [str(tmp_path / name) for name in ("a.wav", "missing.wav", "b.wav")]
    for file in (files[0], files[2]):
        write_wav(Path(file), sound[:48_000], 16_000)
    flags = ["--beam-size", "1", "--temperature", "0"]
    assert main(["transcribe", *files, *flags]) != 0
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line.startswith("==>")] == [f"==> {file} <==" for file in files]
    assert "missing.wav does not exist" in said.err

    assert main(["transcribe", *files, *flags, "--to", "srt"]) != 0
    assert "add --out FOLDER" in capsys.readouterr().err
    assert main(["transcribe", *files, *flags, "--to", "srt", "--out", str(tmp_path / "out")]) != 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.srt", "b.srt"]


def test_each_transcript_has_a_name_of_its_own():
    assert transcript_names(["a.wav", "b.wav", "-"]) == ["a", "b", "stdin"]
    assert transcript_names(["a.wav", "a.mp3"]) == ["a.wav", "a.mp3"]
    assert transcript_names(["x/a.wav", "y/a.wav", "x/b.wav"]) == ["x-a.wav", "y-a.wav", "b"]
    with pytest.raises(BadSetting, match="is named twice"):
        transcript_names(["x/a.wav", "x/../x/a.wav"])


def test_a_model_that_does_not_hear_is_refused(babbler, sound):
    from headwater.families.builders import transformer
    from headwater.families.load import to_loaded_model

    with pytest.raises(BadInput, match="does not read sound"):
        headwater.transcribe(sound, to_loaded_model(transformer(50, 50, d_model=8, heads=2, layers=1).build()))


def test_live_gives_what_was_said_before_a_pause(babbler, sound):
    from headwater.transcription.live import LiveTranscriber

    live = LiveTranscriber(babbler, WindowSettings("en", beam_size=1, temperatures=(0.0,), best_of=1))
    stream = torch.cat((sound[:32_000], torch.zeros(32_000), sound[:80_000], torch.zeros(48_000)))
    told = []
    for number, block in enumerate(stream.split(4_000)):
        told += [(number, segment) for segment in live.push(block)]
    told += [(999, segment) for segment in live.finish()]
    assert told and told[0][0] < 16  # before the second passage begins
    starts = [segment.start for _number, segment in told]
    assert starts == sorted(starts) and starts[-1] > 3.5
