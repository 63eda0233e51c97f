"""One self-contained page: the answer, the table, the figure, and how to read them."""

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ensbridge.files import open_folder, write_atomically
from ensbridge.report.figures import cost_quality
from ensbridge.report.headline import control_sentence, headline, main_bridge
from ensbridge.scores import COLUMNS, Kind, Scores, cells

# The meaning of the rows, told only for the kinds that the table holds.
_ROW_MEANINGS: dict[Kind, tuple[str, str]] = {
    "ensemble": ("DE-k", "Deep ensemble of k separately trained networks; DE-1 is one network, the source."),
    "bridge": (
        "+L DBN",
        "The source plus L diffusion bridges trained towards the ensemble, in one sampling step unless more"
        " are named; (KL) is the same network trained by KL divergence to the ensemble’s prediction.",
    ),
    "control": ("control", "The same bridge with the source alone as its target: smoothing, no ensemble."),
}


def render_page(scores: Scores) -> str:
    """Return the page as HTML that refers to nothing outside itself."""
    template = files("ensbridge.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    main = main_bridge(scores)
    kinds = {row.kind for row in scores.rows}
    return environment.from_string(template).render(
        scores=scores,
        headline=headline(scores),
        control=control_sentence(scores),
        columns=COLUMNS,
        rows=[(row.kind, row is main, cells(row)) for row in scores.rows],
        row_meanings=[meaning for kind, meaning in _ROW_MEANINGS.items() if kind in kinds],
        one=next((row for row in scores.rows if row.model == "DE-1"), None),
        # The same figure for two widths, of which the page shows one, so that its text keeps its size.
        figure_wide=Markup(cost_quality(scores, width=824, height=460)),
        figure_narrow=Markup(cost_quality(scores, width=350, height=440)),
    )


def write_page(scores: Scores, path: str | Path) -> Path:
    """Write the page to a file, or as `report.html` into a folder, and return where it is."""
    path = Path(path)
    if path.is_dir():
        path = path / "report.html"
    open_folder(path.parent)
    write_atomically(path, render_page(scores).encode())
    return path
