"""Starts a program anew each time and tells how long it took until its first line: import, loading, first logits.

Beside the clock stand the processor's seconds of the whole process: other work on the machine changes them little. The
first start warms the disk, and what the program said then is reported as a fact.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path


def once() -> tuple[str, dict[str, float]]:
    begun, before = time.perf_counter(), sum(os.times()[2:4])
    command = [sys.executable, str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        said = process.stdout.readline().strip()
        seconds = time.perf_counter() - begun
        process.stdout.read()
    assert said, f"{sys.argv[1]} said nothing"
    return said, {"seconds": seconds, "processor seconds": sum(os.times()[2:4]) - before}


print(json.dumps({"said": once()[0]}), flush=True)
for _ in sys.stdin:
    print(json.dumps(once()[1]), flush=True)
