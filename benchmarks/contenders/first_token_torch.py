"""Nothing but `import torch`: what comes before the first word of whoever needs it."""

import torch

print(torch.__version__, flush=True)
