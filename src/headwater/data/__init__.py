"""From a user's files to batches of ids, and from outputs to scores. numpy only; torch begins after it.

reading/     files -> examples, with every bad row counted and placed
look         what the files hold, said before training
split        which rows are held out: a function of their text
learn        a tokenizer from the data
ragged       ids as compact arrays
chance, order   randomness and order without state: functions of (seed, epoch, index)
batches, packing   batches counted in tokens; documents packed into rows
objectives/  ids -> what a model is given and what it must say
augment      small changes of the text
dates        the embedded data set
metrics/     outputs -> scores
"""
