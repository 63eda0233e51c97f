"""What models' uncertainty is worth, as a section of the page: abstaining, prediction sets, other images."""

from __future__ import annotations

from collections.abc import Iterable

from ensbridge.evaluation.scores import Group, ImageScore, Summary, Uncertainty
from ensbridge.evaluation.scores.columns import mean_text
from ensbridge.report.text_table import TextRow, TextTable

SCORES: dict[ImageScore, str] = {
    "msp": "MSP",
    "entropy": "entropy",
    "mutual_information": "MI",
    "disagreement": "disagreement",
}
TERMS = {
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


def tables(summary: Summary) -> tuple[TextTable, ...]:
    """Abstaining and prediction sets, then a table for each set of other images; none where not measured."""
    groups = [group for group in summary.rows if _measured(group)]
    if not groups:
        return ()
    names = dict.fromkeys(d.images for group in groups for run in _measured(group) for d in run.ood)
    return (_selective(groups), *(_detection(groups, name) for name in names))


def terms(summary: Summary) -> tuple[tuple[str, str], ...]:
    """The words of the section for the glossary; none where it is not shown."""
    return tuple(TERMS.items()) if tables(summary) else ()


def _measured(group: Group) -> list[Uncertainty]:
    return [row.uncertainty for row in group.rows if row.uncertainty is not None]


def _selective(groups: list[Group]) -> TextTable:
    methods = dict.fromkeys(
        (s.method, s.alpha) for group in groups for run in _measured(group) for s in run.sets
    )
    blocks = [("selective risk, ×1000", ("AURC", "AUGRC"))]
    blocks += [
        (f"{method.upper()} sets for {100 * (1 - alpha):g} %", ("coverage", "set size"))
        for method, alpha in methods
    ]
    rows = []
    for group in groups:
        runs = _measured(group)
        cells = [_cell(1000 * getattr(run, name) for run in runs) for name in ("aurc", "augrc")]
        for kind in methods:
            sets = [s for run in runs for s in run.sets if (s.method, s.alpha) == kind]
            cells += [_cell(100 * s.coverage for s in sets), _cell(s.size for s in sets)]
        rows.append(TextRow(group.model, tuple(cells)))
    return TextTable("Abstaining, and prediction sets", tuple(blocks), tuple(rows))


def _detection(groups: list[Group], images: str) -> TextTable:
    rows = []
    for group in groups:
        cells = []
        for name in ("auroc", "fpr95"):
            for score in SCORES:
                detections = [d for run in _measured(group) for d in run.ood]
                detections = [d for d in detections if (d.images, d.score) == (images, score)]
                error = detections[0].auroc_se if name == "auroc" and len(detections) == 1 else None
                text = _cell(100 * getattr(d, name) for d in detections)
                cells.append(text if error is None else f"{text} ± {100 * error:.2f}")
        rows.append(TextRow(group.model, tuple(cells)))
    names = tuple(SCORES.values())
    return TextTable(f"OOD: {images}", (("AUROC", names), ("FPR95", names)), tuple(rows))


def _cell(values: Iterable[float]) -> str:
    return mean_text(list(values), 2)
