"""Faults made on purpose, and what became of the work that they met: the parts of `benchmarks/soak.py`.

Models and files to spoil are those of the tests, so that there is one of each: `tests/` is on the path here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: children are forked, and threads are not
sys.path.append(str(Path(__file__).parents[2] / "tests"))
