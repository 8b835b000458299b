"""Start a program in a fresh process per round; seconds until its first line: import, loading, first logits.

The CPU seconds of the process are reported too: other load on the machine changes them little. The first start warms
the disk cache, and its output is reported as a fact.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def once() -> tuple[str, dict[str, float]]:
    start, before = time.perf_counter(), sum(os.times()[2:4])
    command = [sys.executable, str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        output = process.stdout.readline().strip()
        seconds = time.perf_counter() - start
        process.stdout.read()
    assert output, f"{sys.argv[1]} printed nothing"
    return output, {"seconds": seconds, "CPU seconds": sum(os.times()[2:4]) - before}


print(json.dumps({"output": once()[0]}), flush=True)
for _ in sys.stdin:
    print(json.dumps(once()[1]), flush=True)
