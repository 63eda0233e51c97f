"""Reading `scores.json`: every value is checked against its type; errors name the value and the remedy."""

from __future__ import annotations

from pathlib import Path

from ensbridge._aliases import upgrade_row, upgrade_scores
from ensbridge.evaluation.scores.rows import CorruptedRow, Curve, Scores
from ensbridge.utils.files import read_json
from ensbridge.utils.text import command
from ensbridge.utils.typed_json import JsonReader

# The file may be anything, a stranger's or a letter: it is never to be deleted on our word.
REMEDY = "give a scores.json as ensbridge evaluate writes it"
_READER = JsonReader(REMEDY, ignore_unknown=True)


def read_scores(path: str | Path) -> Scores:
    """Read a `scores.json`, or the one inside a run folder."""
    path = Path(path)
    if path.is_dir():
        folder, path = path, path / "scores.json"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no scores.json; give the folder of an evaluated run "
                f"({command('evaluate', folder)})"
            )
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a scores.json or the run folder that holds one")
    try:
        document = read_json(path, REMEDY)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return parse_scores(document, where=str(path))


def parse_scores(document: object, where: str = "scores") -> Scores:
    """Check a decoded `scores.json` and give it its types; `where` names it in errors."""
    scores: Scores = _READER.read(Scores, upgrade_scores(document), where)
    if not scores.rows:
        raise ValueError(f"{where}: rows is [], expected a list of at least one row; {REMEDY}")
    for name in ("rows", "tradeoff", "capacity"):
        seen: set[tuple[str, int]] = set()
        for row in getattr(scores, name):
            if (row.model, row.members) in seen:
                raise ValueError(
                    f"{where}: {name} has {row.model!r} twice for {row.members} members; {REMEDY}"
                )
            seen.add((row.model, row.members))
    classes = len(scores.class_names)
    for number, transition in enumerate(scores.transitions):
        lengths = {len(transition.source), len(transition.ensemble), *map(len, transition.path)}
        times = len(transition.times)
        if lengths != {classes} or len(transition.path) != times or transition.label >= classes:
            raise ValueError(
                f"{where}: transitions[{number}] does not fit {classes} classes and {times} times; {REMEDY}"
            )
    for number, curve in enumerate(scores.curves):
        if len(curve.images) != len(curve.loss):
            raise ValueError(
                f"{where}: curves[{number}] has {len(curve.images)} images and {len(curve.loss)} losses; "
                f"{REMEDY}"
            )
    _check_corrupted(scores, where)
    return scores


def parse_corrupted(document: object, where: str = "row") -> CorruptedRow:
    """Check a decoded row of a model under a corruption and give it its types."""
    return _READER.read(CorruptedRow, document, where)


def parse_curve(document: object, where: str = "curve") -> Curve:
    """Check a decoded training curve and give it its types."""
    return _READER.read(Curve, upgrade_row(document), where)


def _check_corrupted(scores: Scores, where: str) -> None:
    """Refuse models under corruptions that were not all measured once on the same images."""
    measured: dict[str, dict[tuple[int, str], str]] = {}
    for row in scores.corrupted:
        key = (row.severity, row.corruption)
        if key in measured.setdefault(row.model, {}):
            raise ValueError(
                f"{where}: corrupted has {row.model!r} twice under {row.corruption!r} at severity "
                f"{row.severity}; {REMEDY}"
            )
        measured[row.model][key] = row.images
    first = next(iter(measured), "")
    for model, images in measured.items():
        if images != measured[first]:
            raise ValueError(f"{where}: corrupted has {first!r} and {model!r} on different images; {REMEDY}")
