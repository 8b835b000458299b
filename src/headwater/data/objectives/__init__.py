"""From ids to what a model is given and what it must say; all chance is a function of (seed, epoch, index)."""
