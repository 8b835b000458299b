"""Tokenizer loaders, one per file format."""
