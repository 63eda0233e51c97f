"""One self-contained page: the answer, the tables, the figures, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from ensbridge.evaluation.scores import COLUMNS, Summary, cells
from ensbridge.report.glossary import glossary, linker
from ensbridge.report.headline import control_sentence, headline, main_bridge
from ensbridge.report.style import LOOKS, variables
from ensbridge.report.tables import (
    TextRow,
    TextTable,
    comparison,
    corruption_notes,
    corruption_tables,
    seeds_text,
    source,
    uncertainty_tables,
)

if TYPE_CHECKING:
    from ensbridge.report.figures import Figure

# Columns that the page shows first: what its headline speaks of must be seen on a phone too.
_FIRST = ("NLL", "DEE", "MACs ×", "ACC")


def render_page(summary: Summary, figures: Sequence[Figure], severity: Figure) -> str:
    """Return the page as HTML that refers to nothing outside itself; `severity` belongs to its table."""
    template = files("ensbridge.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    terms = glossary(summary)
    environment.filters["linked"] = linker(terms)
    compared = comparison(summary)
    return environment.from_string(template).render(
        summary=summary,
        first=summary.first,
        several=len(summary.runs) > 1,
        seeds=seeds_text(summary),
        light=variables(dark=False),
        dark=variables(dark=True),
        headline=_unbroken(headline(summary)),
        control=_unbroken(control_sentence(summary)),
        scores=_scores(summary).in_order(_FIRST),
        glossary=terms,
        errors=any(row.gap_error is not None for row in summary.first.rows),
        one=next((group.first for group in summary.rows if group.model == "DE-1"), None),
        paper=compared and compared.in_order(_FIRST),
        paper_source=source(),
        corrupted=corruption_tables(summary),
        corrupted_notes=corruption_notes(summary),
        uncertainty=uncertainty_tables(summary),
        severity=severity,
        figures=figures,
        environments=_environments(summary),
    )


def _scores(summary: Summary) -> TextTable:
    """Every model's row; that of the main bridge stands out."""
    main, rows = main_bridge(summary), []
    for group in summary.rows:
        css = LOOKS[group.kind].variable
        css += " main" if main is not None and group.model == main.model else ""
        name, *texts = cells(group)
        rows.append(TextRow(_short_parts_whole(name), tuple(texts), css))
    headings = tuple(column.heading for column in COLUMNS[1:])
    return TextTable("Every model on the test split", (("", headings),), tuple(rows))


def _unbroken(text: str) -> str:
    """Keep a mean and its spread, or a name and its value, on one line."""
    return text.replace(" ± ", "\u00a0±\u00a0").replace(" = ", "\u00a0=\u00a0")


def _short_parts_whole(name: str) -> str:
    """Keep what stands in brackets on one line, where a narrow column has room for it."""
    return re.sub(r"\([^()]{,12}\)", lambda part: part[0].replace(" ", "\u00a0"), _unbroken(name))


def _environments(summary: Summary) -> list[tuple[str, str]]:
    """What the runs were made with, each value once; those that differ say so side by side."""
    keys = dict.fromkeys(key for run in summary.runs for key in run.environment)
    values = {key: dict.fromkeys(run.environment.get(key, "–") for run in summary.runs) for key in keys}
    return [(key, " · ".join(texts)) for key, texts in values.items()]
