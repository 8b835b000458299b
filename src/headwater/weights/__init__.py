"""Weight files in and out: safetensors, sharded folders, GGUF, name tables, settings. Nothing here trusts a file."""
