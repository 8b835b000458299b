"""Draw one SVG in a process of its own: a small drawing can ask for endless memory, time or recursion.

Standard input is a JSON object of svg, width or height (pixels), seconds and memory (bytes); standard output is the
PNG. What is wrong with the drawing comes as one line on standard error, with exit status 1.

Like text/chat_sandbox.py it imports nothing of this package, so that each sets its limits itself.
"""

from __future__ import annotations

import json
import sys

DPI = 96.0  # of drawings in millimeters or points


def set_resource_limits(seconds: int, memory: int) -> None:
    """Limit the memory and the processor time of this process, and forbid it to write files."""
    try:
        import resource
    except ImportError:  # not POSIX: only the time limit from outside applies
        return
    limits = (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, limit in limits:
        try:
            resource.setrlimit(kind, (limit, limit))
        except (ValueError, OSError):
            continue


def main() -> int:
    """Draw what comes in; the exit status."""
    request = json.loads(sys.stdin.buffer.read())
    set_resource_limits(request["seconds"], request["memory"])
    import resvg_py

    svg = request["svg"]
    no_fonts = "<text" not in svg  # reading the fonts of the system takes longer than most drawings
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=svg,
            width=request.get("width"),
            height=request.get("height"),
            dpi=DPI,
            skip_system_fonts=no_fonts,
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(bytes(png))
    return 0


if __name__ == "__main__":
    sys.exit(main())
