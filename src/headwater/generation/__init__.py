"""From a model to text: choosers, loops, beams, guesses and a batching engine. Read choosers, ask, engine, slots."""
