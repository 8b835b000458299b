"""The cache of decoded recordings: what several processes read and write at once, and odd names."""

from __future__ import annotations

import numpy as np
import soundfile

from headwater.audio import sound_cache
from headwater.audio.sound_cache import Clip, decode_clips


def write(path, seconds=0.5):
    soundfile.write(path, np.sin(np.arange(int(16_000 * seconds)) / 9) / 2, 16_000)
    return str(path)


def test_who_reads_while_another_process_writes_reads_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "b.wav").write_bytes(b"nothing")
    clips = [Clip(write(tmp_path / "a.wav")), Clip(str(tmp_path / "b.wav"))]
    first = decode_clips(clips)
    (index,) = sound_cache.cache_folder().glob("*.problems")
    whole = index.read_text()
    for offsets in sound_cache.cache_folder().glob("*.npy"):
        offsets.unlink()  # as it is for a process that began at the same time

    seen = []
    monkeypatch.setattr("os.fsync", lambda descriptor: seen.append(index.read_text()))
    again = decode_clips(clips)
    assert seen and set(seen) == {whole}
    assert again.readable.tolist() == first.readable.tolist() == [0]


def test_each_problem_is_one_line_whatever_the_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    odd = write(tmp_path / "two\nlines.wav")
    clips = [Clip(""), Clip(odd, 9.0), Clip(str(tmp_path / "none\n.wav")), Clip(write(tmp_path / "a.wav"))]
    decoded = decode_clips(clips)
    assert decoded.readable.tolist() == [3]
    assert len(decoded.problems) == 3
    assert decoded.row(0).shape == (8_000,)
