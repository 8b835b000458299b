"""Weight file formats: safetensors, GGUF, pickles; config.json; tensor name maps between checkpoints and models."""
