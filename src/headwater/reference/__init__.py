"""The Transformer in NumPy: forward and hand-written backward pass, no torch. Read the files in this order:

     1  gradients.py    every operation returns its value and its backward function; parameters by path
     2  ops.py          linear layer, softmax, norms, activations, dropout
     3  masks.py        attention masks
     4  config.py       the config, and the shapes and initial values of the weights
     5  positions.py    six position encodings
     6  attention.py    scaled dot-product attention, multi-head attention
     7  model.py        block, stack, the three shapes
     8  loss.py         cross-entropy with label smoothing
     9  optimizer.py    Adam, warm-up, clipping
    10  weights.py      read and write safetensors
    11  decode.py       greedy decoding
    12  copy_task.py    the copy task
    13  figures.py      figures of attention weights
    14  lsh.py          LSH attention: hashing, sorting, chunks
    15  linear_attention.py   attention in linear time, as sums and as a recurrence
    16  vision.py       patches of images, and the contrastive loss
    17  speech.py       log-mel spectrograms, and the convolutions that read them
    18  sound_codes.py  residual vector quantization: a vector as a code for each codebook

`headwater.reference` itself has no names; import each from the file that defines it:

    from headwater.reference.model import Config, Transformer
    logits, backward = Transformer(Config(vocab=100, shape="decoder"))(ids)
    gradients = backward(dlogits)

`python -m headwater.reference` trains it, compares three sizes and draws the figures. The torch core must give the same
outputs and gradients; where the two differ, this edition is the one that can be checked by reading.
"""
