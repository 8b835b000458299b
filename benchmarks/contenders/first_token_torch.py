"""Only `import torch`: the start-up time of every contender that needs it."""

import torch

print(torch.__version__, flush=True)
