"""File input and output for untrusted files: bounded reads, atomic writes, strict JSON."""
