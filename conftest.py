"""Every test starts from the same random state, so that none passes or fails by luck.

`pytest --seed 7` starts all of them elsewhere: a test that fails there leans on one lucky draw.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--seed`."""
    parser.addoption("--seed", type=int, default=0, help="the random state that every test starts from")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures that a module or the whole run shares, whichever test comes to build them."""
    _start(item.config)


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> None:
    """After them, so that a test does not see whether it was the one that built them."""
    _start(request.config)


def _start(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what a test might read unawares
    torch.manual_seed(seed)
