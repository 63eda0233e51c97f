"""The page's glossary: what its abbreviations mean, and links to them from its text."""

from __future__ import annotations

import re
from collections.abc import Callable

from markupsafe import Markup, escape

from ensbridge.evaluation.scores import COLUMNS, Kind, Summary
from ensbridge.report.tables import uncertainty_tables

Entry = tuple[str, str, str]  # the anchor, the term, what it means

# The meaning of the rows, told only for the methods that the table holds.
_ROWS: dict[Kind, tuple[str, str]] = {
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
        " directly by KL divergence to the ensemble’s prediction; (DE-k): all its bridges together stand for"
        " k members, where without it each stands for the target.",
    ),
    "control": (
        "control",
        "The bridge with the source alone as its target, so that no other member has a part in it; +L"
        " control: the mean of L of them. What as many bridges trained the same way, (KL) or not, gain"
        " beyond it is due to the ensemble.",
    ),
}
_UNCERTAINTY = {
    "AURC": "Area under the risk-coverage curve, by MSP: the error rate of the accepted images, mean"
    " over every share of the images that may be accepted. Lower is better.",
    "AUGRC": "Area under the generalised risk-coverage curve, by MSP: as AURC, but of errors among all"
    " images, so that each error weighs the same. Lower is better.",
    "LAC": "Least ambiguous sets: conformal prediction sets of all classes that are probable enough;"
    " they are the smallest on average.",
    "APS": "Adaptive prediction sets: conformal sets that are larger for harder images; randomised.",
    "coverage": "Share of the test images whose prediction set holds their label, in percent.",
    "set size": "Mean number of classes in a prediction set. Lower is better at the same coverage.",
    "OOD": "Out of distribution: images of a set that the model was not made for.",
    "AUROC": "Probability that an OOD image has a higher score than a test image, in percent: 50 is"
    " chance, 100 is best.",
    "FPR95": "Share of the OOD images that pass where 95 % of the test images pass, in percent. Lower"
    " is better.",
    "MSP": "Score of uncertainty: one minus the largest probability.",
    "entropy": "Score of uncertainty: the entropy of the prediction.",
    "MI": "Score of uncertainty of an ensemble: mutual information, the part of its entropy that"
    " the members disagree about.",
    "disagreement": "Score of a bridge: total variation between the source’s prediction and the model’s. It"
    " is not the disagreement of an ensemble’s members.",
}
_WORDS = (
    ("KL", "Kullback–Leibler divergence between two predictions, in nats; also the loss that is one."),
    ("T", "Temperature: what logits are divided by before they become probabilities."),
)
# How a term is written where it is used; the others are their own name.
_WRITTEN = {"DE-k": r"DE-\d+", "+L BN": "BN", "+L DBN": "DBN", "MACs ×": "MACs", "T": r"T(?=[\s\u00a0]=)"}


def glossary(summary: Summary) -> dict[str, list[Entry]]:
    """Every term of the page by the kind of thing that it names."""
    methods = {group.kind for group in summary.rows}
    columns = [(column.heading, column.explain(summary)) for column in COLUMNS[1:]]
    rows = [meaning for method, meaning in _ROWS.items() if method in methods]
    kinds = {
        "Columns": columns,
        "Rows": rows,
        "Uncertainty": tuple(_UNCERTAINTY.items()) if uncertainty_tables(summary) else (),
        "Other words": _WORDS,
    }
    return {
        kind: [(_anchor(term), term, meaning) for term, meaning in terms]
        for kind, terms in kinds.items()
        if terms
    }


def linker(entries: dict[str, list[Entry]]) -> Callable[[str], Markup]:
    """A filter that links the terms in a text to their meanings; the rest of the text is escaped."""
    anchors = {term: anchor for terms in entries.values() for anchor, term, _ in terms}
    written = "|".join(f"({_WRITTEN.get(term) or re.escape(term)})" for term in anchors)
    pattern, targets = re.compile(rf"(?<![\w-])(?:{written})(?![\w²])"), list(anchors.values())

    def link(term: re.Match[str]) -> str:
        return f'<a href="#{targets[(term.lastindex or 1) - 1]}">{term[0]}</a>'

    return lambda text: Markup(pattern.sub(link, str(escape(text))))


def _anchor(term: str) -> str:
    """A term's anchor in the page.

    >>> _anchor("EnD²"), _anchor("+L DBN"), _anchor("MACs ×")
    ('term-end2', 'term-dbn', 'term-macs')
    """
    plain = term.replace("²", "2").replace("+L ", "").removesuffix(" ×").removesuffix("-k")
    return f"term-{plain.lower()}"
