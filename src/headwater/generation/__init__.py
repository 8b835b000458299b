"""Text generation: sampling, beam search, speculative decoding and continuous batching. Start with api and engine."""
