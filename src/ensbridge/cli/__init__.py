"""The commands, each a thin call into the package, a file for each of their subjects.

Nothing here imports torch before a command needs it. Bad input ends with one sentence and exit code 2.
"""

from ensbridge.cli import bench, compress, data, models, runs, serve
from ensbridge.cli.base import app, main

# The order of --help: what most people come for, then the paper's experiments.
_ORDER = (
    *("quickstart", "compress", "fidelity", "predict", "serve", "export", "bench", "push"),
    *("train", "evaluate", "report"),
)
app.registered_commands.sort(key=lambda command: _ORDER.index(getattr(command.callback, "__name__", "")))

__all__ = ["bench", "compress", "data", "main", "models", "runs", "serve"]
