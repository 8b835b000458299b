"""Ideas beyond the core, one a file, added without touching it."""
