"""Hostile files without harm: a process of little memory and time, and pipes that let go of readers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ensbridge

CHILD = """
import resource, sys
sys.path[:0] = {path!r}
import numpy, torch, PIL.Image
import ensbridge.data, ensbridge.models.stored_network, ensbridge.deploy.batch
from pathlib import Path
import _sets
from ensbridge.data import cifar, folder, sources, unpickling
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {memory}, used + {memory}))
try:
    {code}
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
else:
    print("nothing")
"""

LET_GO = """
import os, sys, time
while os.path.exists(sys.argv[1]):
    time.sleep(0.02)
    try:
        os.close(os.open(sys.argv[1], os.O_WRONLY | os.O_NONBLOCK))
    except OSError:  # nobody reads
        pass
"""


def outcome(code: str, memory: int = 2**29, seconds: float = 300) -> str:
    """What one statement raises in a process that may take so many bytes more, or how else it ends."""
    path = [str(Path(ensbridge.__file__).parents[1]), str(Path(__file__).parent)]
    words = [sys.executable, "-c", CHILD.format(path=path, memory=memory, code=code)]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "endless"
    return (
        done.stdout.strip() if done.returncode == 0 else f"ended by {done.returncode}: {done.stderr[-500:]}"
    )


@contextmanager
def pipe(path: Path) -> Iterator[Path]:
    """A named pipe; whoever waits to read it is let go with an end of file."""
    os.mkfifo(path)
    # Another process: one that waits in a library of another language may keep all threads here waiting.
    process = subprocess.Popen([sys.executable, "-c", LET_GO, path], stderr=subprocess.DEVNULL)
    try:
        yield path
    finally:
        process.kill()
        process.wait()
