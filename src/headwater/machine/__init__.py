"""What the machine does in C beside torch: compiled on first use, and always with a readable formula beside it."""
