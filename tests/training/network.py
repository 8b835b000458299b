"""Two processes on two machines with a wire between them that can be cut: network namespaces, as Linux has them.

The process that forks the ranks must itself be alone in a namespace (`unshare --user --map-root-user --net`), so that
nothing outside is touched.
A cut wire is silent: packets go to an address of the link that nobody has, so that neither side sees an error.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.9.0.1", "10.9.0.2")
NOBODY = "02:00:00:00:00:99"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def move_out() -> None:
    """This process has a network of its own from now on, without anything in it."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def plug_in(rank: int) -> None:
    """This end of the wire. Both ends know each other's address of the link, so that no question can get lost."""
    ip("link", "set", "lo", "up")
    while subprocess.run(["ip", "link", "show", f"wire{rank}"], capture_output=True, check=False).returncode:
        time.sleep(0.01)
    ip("addr", "add", f"{ADDRESSES[rank]}/24", "dev", f"wire{rank}")
    ip("link", "set", f"wire{rank}", "address", _place(rank))
    ip("link", "set", f"wire{rank}", "up")
    fix(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = f"wire{rank}"


def fix(rank: int) -> None:
    _send_to(_place(1 - rank), rank)


def cut(rank: int) -> None:
    _send_to(NOBODY, rank)


def _send_to(place: str, rank: int) -> None:
    ip("neigh", "replace", ADDRESSES[1 - rank], "lladdr", place, "dev", f"wire{rank}", "nud", "permanent")


def _place(rank: int) -> str:
    return f"02:00:00:00:00:0{rank + 1}"


def lay(far: int) -> None:
    """A wire from here to the network of another process, once it has one."""
    own, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{far}/ns/net")
    while theirs.readlink() == own.readlink():
        time.sleep(0.01)
    subprocess.run(["ip", "link", "delete", "wire0"], capture_output=True, timeout=10, check=False)  # of the last trial
    ip("link", "add", "wire0", "type", "veth", "peer", "name", "wire1")
    ip("link", "set", "wire1", "netns", str(far))


def possible() -> bool:
    """Whether this machine lets us have networks of our own."""
    words = ["unshare", "--user", "--map-root-user", "--net", "ip", "link", "add", "wire0", "type", "veth"]
    try:
        return subprocess.run(words, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
