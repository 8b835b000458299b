"""The command `headwater generate FILE PROMPT` with one token."""

import sys

from headwater.cli import main

sys.exit(main(["generate", *sys.argv[1:], "--max-tokens", "1", "--json"]))
