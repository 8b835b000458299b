"""Starts a program anew each time and tells how long it took until its first line: import, loading, first logits.

Beside the clock stand the processor's seconds of the whole process: other work on the machine changes them little.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

print("ready", flush=True)
for _ in sys.stdin:
    begun, before = time.perf_counter(), sum(os.times()[2:4])
    command = [sys.executable, str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        said = process.stdout.readline()
        seconds = time.perf_counter() - begun
        process.stdout.read()
    assert said.strip(), f"{sys.argv[1]} said nothing"
    worked = sum(os.times()[2:4]) - before
    print(json.dumps({"seconds to first logits": seconds, "processor seconds": worked}), flush=True)
