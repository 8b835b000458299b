"""Transcription: speech to text with Whisper, window by window, with times, languages and subtitles."""
