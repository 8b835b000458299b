"""Training: from batches to a model that can be trusted. Read losses, objectives, loop, checkpoints.

settings      one typed tree behind the flags, the YAML file and headwater.train(...)
losses        sums of log-probabilities, the vocabulary in chunks
objectives    batch -> loss of a model
schedules, optimiser, averaging   how a gradient becomes a step
loop          the steps, in an order and with a chance that depend on their number alone
storage, checkpoints, lock        what is on disk is whole, or is not there
courses, material   what is taught; exam   how it is measured
planning, starting, teaching      from files to a trained model; use   at work
run           the folder of a run
events, journals, progress, plots   who hears about it
team          several processes
"""
