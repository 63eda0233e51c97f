"""One self-contained page: the answer, the tables, the figures, and how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ensbridge.evaluation.scores import COLUMNS, Group, Kind, Summary, cells
from ensbridge.report import corrupted
from ensbridge.report.headline import control_sentence, headline, main_bridge
from ensbridge.report.paper import comparison, source
from ensbridge.report.style import LOOKS, variables

if TYPE_CHECKING:
    from ensbridge.report.writing import Part

# The meaning of the rows, told only for the methods that the table holds.
_ROW_MEANINGS: dict[Kind, tuple[str, str]] = {
    "DE": (
        "DE-k",
        "Deep ensemble: k separately trained networks, their probabilities averaged; DE-1 is one network, the"
        " source.",
    ),
    "ED": (
        "ED",
        "Ensemble distillation: one new network, trained towards the members’ softened predictions.",
    ),
    "EnD2": (
        "EnD²",
        "Ensemble distribution distillation: one new network, trained to predict a Dirichlet distribution"
        " over the members’ predictions (the proxy form).",
    ),
    "BN": (
        "+L BN",
        "The source plus L bridge networks, each built like its last blocks (small: with half the channels)"
        " and trained to predict, from an inner feature, what a network midway on a low-loss curve to another"
        " member predicts; the prediction is the mean of all, the source’s own among them.",
    ),
    "DBN": (
        "+L DBN",
        "The source plus L diffusion bridges trained towards the ensemble, in one sampling step unless more"
        " are named; the mean of the bridges is the prediction. (KL): a network of the same kind trained"
        " straight by KL divergence to the ensemble’s prediction; (DE-k): all its bridges together stand for"
        " k members, where without it each stands for the target.",
    ),
    "control": (
        "control",
        "The bridge with the source alone as its target, so that no other member has a part in it; +L"
        " control: the mean of L of them. What as many bridges trained the same way, (KL) or not, gain"
        " beyond it is owed to the ensemble.",
    ),
}


def render_page(summary: Summary, parts: Sequence[Part], severity: Part) -> str:
    """Return the page as HTML that refers to nothing outside itself; `severity` is a part of its table."""
    template = files("ensbridge.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    main = main_bridge(summary)
    kinds = {group.kind for group in summary.rows}
    return environment.from_string(template).render(
        summary=summary,
        first=summary.first,
        seeds=_seeds(summary),
        light=variables(dark=False),
        dark=variables(dark=True),
        headline=_unbroken(headline(summary)),
        control=_unbroken(control_sentence(summary)),
        columns=[(column.heading, column.explain(summary)) for column in COLUMNS],
        errors=any(row.gap_error is not None for row in summary.first.rows),
        rows=[(_class(group, main), cells(group)[0], _split(cells(group)[1:])) for group in summary.rows],
        row_meanings=[meaning for kind, meaning in _ROW_MEANINGS.items() if kind in kinds],
        one=next((group.first for group in summary.rows if group.model == "DE-1"), None),
        paper=_paper(summary),
        paper_source=source(),
        corrupted=_corrupted(summary),
        severity=_figure(severity),
        figures=[_figure(part) for part in parts],
        environments=_environments(summary),
    )


def _paper(summary: Summary) -> dict[str, object] | None:
    found = comparison(summary)
    if found is None:
        return None
    rows = []
    for model, pairs in found.rows:
        ours, theirs = zip(*pairs, strict=True)
        rows += [("", model, _split(ours)), ("theirs", "paper", _split(theirs))]
    return {"headings": found.headings, "rows": rows, "notes": found.notes}


def _corrupted(summary: Summary) -> dict[str, object] | None:
    found = corrupted.tables(summary)
    if not found:
        return None
    tables = [
        {
            "heading": table.heading,
            "blocks": table.blocks,
            "columns": table.columns,
            "rows": [("theirs" if theirs else "", name, _split(cells)) for theirs, name, cells in table.rows],
            "has_paper": table.has_paper,
        }
        for table in found
    ]
    return {"tables": tables, "notes": corrupted.notes(summary)}


def _figure(part: Part) -> dict[str, object]:
    drawn = part.drawn
    return {
        "name": part.plot.name,
        "heading": part.plot.heading,
        "note": part.note,
        "caption": part.plot.caption(drawn.data) if drawn else "",
        # The same figure for two widths, of which the page shows one, so that its text keeps its size.
        "wide": Markup(drawn.wide) if drawn else None,
        "narrow": Markup(drawn.narrow) if drawn else None,
    }


def _class(group: Group, main: Group | None) -> str:
    name = LOOKS[group.kind].variable
    return f"{name} main" if main is not None and group.model == main.model else name


def _split(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Part each cell's mean from its spread, which the page writes smaller."""
    return [(mean, spread) for mean, _, spread in (text.partition(" ± ") for text in texts)]


def _unbroken(text: str) -> str:
    """Keep a mean and its spread, or a name and its value, on one line."""
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" = ", "\u00a0=\u00a0")


def _seeds(summary: Summary) -> str:
    names = ", ".join(map(str, summary.seeds))
    return f"seed {names}" if len(summary.seeds) == 1 else f"seeds {names}"


def _environments(summary: Summary) -> list[tuple[str, str]]:
    """What the runs were made with, each value once; those that differ say so side by side."""
    keys = dict.fromkeys(key for run in summary.runs for key in run.environment)
    values = {key: dict.fromkeys(run.environment.get(key, "–") for run in summary.runs) for key in keys}
    return [(key, " · ".join(found)) for key, found in values.items()]
