"""The command `headwater generate FILE PROMPT`, one token of it."""

import sys

from headwater.cli import main

sys.exit(main(["generate", *sys.argv[1:], "--max-tokens", "1", "--json"]))
