"""The commands, each a thin call into the package, a file for each of their subjects.

Nothing here imports torch before a command needs it. Bad input ends with one sentence and exit code 2.
"""

from ensbridge.cli.base import main

# isort: split
# The order of the commands in --help.
from ensbridge.cli import runs, models, serve, bench, data  # noqa: I001

__all__ = ["bench", "data", "main", "models", "runs", "serve"]
