"""The same file in llama.cpp (llama-cpp-python): one token."""

import os
import sys

from llama_cpp import Llama

threads = int(os.environ["OMP_NUM_THREADS"])
model = Llama(sys.argv[1], n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False)
model.eval(model.tokenize(sys.argv[2].encode(), add_bos=False))
token = model.sample(temp=0.0)
print(token, model.detokenize([token]).decode(), flush=True)
