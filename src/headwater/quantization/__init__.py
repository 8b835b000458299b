"""Quantization: GGUF block formats, and linear and embedding layers whose weights stay in them."""
