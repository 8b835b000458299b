"""The checker: tests a model against the laws of a Transformer."""
