"""Scores of outputs against references: one function on lists each."""
