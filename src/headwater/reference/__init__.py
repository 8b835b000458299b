"""The Transformer in NumPy: forward and hand-written backward, no torch. To be read as a text, in this order:

     1  gradients.py    a part gives its value and the way back; parameters by path
     2  ops.py          linear map, softmax, norms, activations, dropout
     3  masks.py        who may look at whom
     4  config.py       the sizes, and the weights that follow from them
     5  positions.py    six ways to say where a token stands
     6  attention.py    scaled dot-product, many heads
     7  model.py        block, stack, the three shapes
     8  loss.py         cross-entropy with label smoothing
     9  optimiser.py    Adam, warm-up, clipping
    10  weights.py      safetensors in and out
    11  decode.py       greedy decoding
    12  copy_task.py    something to learn
    13  figures.py      what attention looked at

There is nothing but this page in `headwater.reference` itself; every name is imported from the file that explains it:

    from headwater.reference.model import Config, Transformer
    logits, back = Transformer(Config(vocab=100, shape="decoder"))(ids)
    gradients = back(dlogits)

`python -m headwater.reference` trains it, compares three sizes and draws the figures. The torch core must give the same
outputs and gradients; where the two differ, this edition is the one that can be checked by eye.
"""
