"""One self-contained page: the answer, the tables, the figures, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ensbridge.evaluation.scores import COLUMNS, Group, Summary, cells
from ensbridge.report import corrupted, uncertainty
from ensbridge.report.glossary import glossary, linker
from ensbridge.report.headline import control_sentence, headline, main_bridge
from ensbridge.report.paper import comparison, source
from ensbridge.report.style import LOOKS, variables

if TYPE_CHECKING:
    from ensbridge.report.writing import Part

# Columns that the page shows first: what its headline speaks of must be seen on a phone too.
_FIRST = ("model", "NLL", "DEE", "MACs ×", "ACC")


def render_page(summary: Summary, parts: Sequence[Part], severity: Part) -> str:
    """Return the page as HTML that refers to nothing outside itself; `severity` is a part of its table."""
    template = files("ensbridge.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    main, terms = main_bridge(summary), glossary(summary)
    environment.filters["linked"] = linker(terms)
    order = _order([column.heading for column in COLUMNS])
    return environment.from_string(template).render(
        summary=summary,
        first=summary.first,
        seeds=_seeds(summary),
        light=variables(dark=False),
        dark=variables(dark=True),
        headline=_unbroken(headline(summary)),
        control=_unbroken(control_sentence(summary)),
        headings=[COLUMNS[place].heading for place in order],
        glossary=terms,
        errors=any(row.gap_error is not None for row in summary.first.rows),
        rows=[
            (
                _class(group, main),
                _short_parts_whole(cells(group)[0]),
                _split([cells(group)[place] for place in order[1:]]),
            )
            for group in summary.rows
        ],
        one=next((group.first for group in summary.rows if group.model == "DE-1"), None),
        paper=_paper(summary),
        paper_source=source(),
        corrupted=_corrupted(summary),
        uncertainty=uncertainty.render(summary, environment.filters["linked"]),
        severity=_figure(severity),
        figures=[_figure(part) for part in parts],
        environments=_environments(summary),
    )


def _paper(summary: Summary) -> dict[str, object] | None:
    found = comparison(summary)
    if found is None:
        return None
    rows, order = [], _order(found.headings)
    for model, pairs in found.rows:
        ours, theirs = zip(*(pairs[place] for place in order), strict=True)
        rows += [("", model, _split(ours)), ("theirs", "paper", _split(theirs))]
    headings = [found.headings[place] for place in order]
    return {"headings": headings, "rows": rows, "notes": found.notes}


def _order(headings: Sequence[str]) -> list[int]:
    """The places of columns as the page shows them.

    >>> _order(["MACs ×", "ACC", "NLL", "ECE", "DEE"])
    [2, 4, 0, 1, 3]
    """
    rank = {heading: place for place, heading in enumerate(_FIRST)}
    return sorted(range(len(headings)), key=lambda place: rank.get(headings[place], len(rank)))


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


def _short_parts_whole(name: str) -> str:
    """Keep what stands in brackets on one line, where a narrow column has room for it."""
    return re.sub(r"\([^()]{,12}\)", lambda part: part[0].replace(" ", "\u00a0"), _unbroken(name))


def _seeds(summary: Summary) -> str:
    names = ", ".join(map(str, summary.seeds))
    return f"seed {names}" if len(summary.seeds) == 1 else f"seeds {names}"


def _environments(summary: Summary) -> list[tuple[str, str]]:
    """What the runs were made with, each value once; those that differ say so side by side."""
    keys = dict.fromkeys(key for run in summary.runs for key in run.environment)
    values = {key: dict.fromkeys(run.environment.get(key, "–") for run in summary.runs) for key in keys}
    return [(key, " · ".join(found)) for key, found in values.items()]
