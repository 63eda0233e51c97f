"""`README.md`, the model card: what the model is, what it costs, how it is loaded, what was measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ensbridge.deploy.saving.description import Description, Facts
from ensbridge.deploy.saving.folder import CARD_FOLDER, CARD_START
from ensbridge.evaluation.choices import choices_table
from ensbridge.evaluation.fidelity import Fidelity
from ensbridge.evaluation.scores import COLUMNS, Row, Scores, cells, parse_scores, summarise
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.input_specs import made_up_inputs
from ensbridge.utils.text import one_line

TAGS = ("ensbridge", "image-classification", "deep-ensembles", "uncertainty")
TASK = "image-classification"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}", re.ASCII | re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


class Results(NamedTuple):
    """Figures of a model on a part of a data set."""

    dataset: str
    split: str
    figures: Sequence[tuple[str, str, float]]  # what the hub's evaluate calls it, its name, its value


def write_card(
    fast: FastEnsemble,
    description: Description,
    scores: Scores | Fidelity | Mapping[str, Any] | None = None,
    license: str | None = None,
    base_models: Sequence[str] = (),
    dataset: str | None = None,
) -> str:
    """The whole card."""
    if isinstance(scores, Mapping):
        scores = parse_scores(json.loads(json.dumps(scores)))
    results = _evaluation_results(fast, scores, dataset)
    parts = [
        write_head(_title(fast), license, base_models, results),
        f"# {_title(fast)}\n\n{_what(fast, description)}",
        f"## Cost\n\n{_cost(fast, description.facts)}",
        f"## Use\n\n```python\n{_use(description)}\n```",
        f"## Measured\n\n{_measured(fast, scores)}",
        f"---\nThis card belongs to the weights with SHA-256 `{description.sha256}`.",
    ]
    return "\n".join(f"{part}\n" for part in parts)


def _title(fast: FastEnsemble) -> str:
    return "One network" if fast.members == 1 else f"One network in place of {fast.members}"


def _what(fast: FastEnsemble, description: Description) -> str:
    bridges = fast.each_bridge()
    title = getattr(fast.source, "title", None)  # of another library's network
    name = _text(title if isinstance(title, str) else description.source.name)
    source = f"a source network (`{name}`)"
    if fast.source_distilled:
        source += f", distilled from {fast.members} networks,"
    if not bridges:
        return f"An ensbridge `FastEnsemble`: {source} alone, at temperature {fast.temperature:g}."
    kind = "bridge network" if description.bridges[0].kind == "feature" else "diffusion bridge"
    steps = _steps(fast)
    stands = "its source alone, as a control" if fast.members == 1 else f"{fast.members} networks"
    mean = "the source and the bridges" if fast.average_source else "the bridges"
    share = (
        f", with {fast.source_logit_weight:+.3g} of the source's own logits,"
        if fast.source_logit_weight
        else ","
    )
    return (
        f"An ensbridge `FastEnsemble`: {source} that runs once, and "
        f"{_count(len(bridges), kind)} of {_count(steps, 'step')} from its "
        f"{_read(fast.features)} towards the prediction of {stands}. The softmax of its output is the mean "
        f"over {mean}{share} at temperature {fast.temperature:g}."
    )


def _read(features: Sequence[str]) -> str:
    names = " and ".join(f"`{_text(name)}`" for name in features)
    return f"feature{'s' * (len(features) > 1)} {names}"


def _cost(fast: FastEnsemble, facts: Facts) -> str:
    params, one = count_params(fast), count_params(fast.source)
    lines = [
        "| | source | source and bridges | ratio |",
        "|---|---:|---:|---:|",
        _cost_line("parameters", one, params),
    ]
    if facts.input_specs is not None:
        inputs = made_up_inputs(facts.input_specs, 1)
        what = f"one example ({_text(', '.join(map(str, facts.input_specs)))})"
    elif facts.image_shape is not None:
        like = next(fast.source.parameters(), torch.zeros(1))
        inputs = torch.zeros(1, *facts.image_shape, dtype=like.dtype, device=like.device)
        what = f"one image of {'×'.join(map(str, facts.image_shape))}"
    else:
        return "\n".join([*lines, "", "Multiply-accumulates were not counted: no image shape was given."])
    try:
        macs = [count_macs(net, inputs) for net in (fast.source, fast)]
    except Exception as error:  # a network may take only such inputs as cannot be made up
        if facts.input_specs is None:
            raise ValueError(
                f"image_shape is {facts.image_shape}, which the model cannot take ({error})"
            ) from error
        reason = f"Multiply-accumulates were not counted: made-up inputs fail ({_text(one_line(error))})."
        return "\n".join([*lines, "", reason])
    return "\n".join([*lines, _cost_line(f"multiply-accumulates, {what}", *macs)])


def _cost_line(name: str, one: int, both: int) -> str:
    ratio = f"×{both / one:.3f}" if one else "–"
    return f"| {name} | {one:,} | {both:,} | {ratio} |"


def _use(description: Description) -> str:
    source = description.source
    call = f"eb.load({CARD_FOLDER})"
    if source.build is None:
        call = f"eb.load({CARD_FOLDER}, source=net)  # net: your {_text(source.name)}, to be filled"
    elif not source.build.startswith("ensbridge.nets:"):
        call = f'eb.load({CARD_FOLDER}, allow=["{source.build}"])  # imports it, so only if you trust it'
    specs = description.facts.input_specs or ()
    names = [_text(spec.name) for spec in specs if spec.name]
    given = ", ".join(f"{name}={name}" for name in names if name.isidentifier())
    if len(specs) != len(names):
        given = ", ".join(f"input_{number}" for number in range(len(specs)))
    return f"import ensbridge as eb\n\nmodel = {call}\nprobabilities = model({given or 'images'}).softmax(-1)"


def _measured(fast: FastEnsemble, scores: Scores | Fidelity | None) -> str:
    if scores is None and fast.choices:
        return (
            "On the validation images that chose and calibrated it, so that it looks a little better than it "
            f"is:\n\n```text\n{choices_table(fast.choices)}\n```"
        )
    if scores is None:
        return "Nothing was measured when this model was saved: its quality is not known from this card."
    if isinstance(scores, Fidelity):
        return f"Beside the real ensemble, when it was saved:\n\n```text\n{scores}\n```"
    if not isinstance(scores, Scores):
        raise ValueError(f"scores are a {type(scores).__name__}; give Scores, or what fidelity returned")
    rows = summarise([scores]).rows
    lines = [
        [column.heading for column in COLUMNS],
        [":--", *["--:"] * (len(COLUMNS) - 1)],
        *map(cells, rows),
    ]
    table = "\n".join(f"| {' | '.join(map(_text, line))} |" for line in lines)
    machine = ", ".join(f"{key} {value}" for key, value in scores.environment.items())
    return (
        f"Data set {_text(scores.dataset)}, seed {scores.seed}; {_text(machine) or 'unknown machine'}.\n\n"
        f"{table}\n\n{_which(fast, scores.rows)} {_control(fast, scores.rows)}"
    )


def _which(fast: FastEnsemble, rows: Sequence[Row]) -> str:
    """Name the row that is this model as far as its anatomy tells; figures of another would mislead."""
    matching = rows_of(fast, rows)
    if not matching:
        return (
            "No row has this model's size, bridges, steps and members: its own figures are not among these."
        )
    names = " or ".join(_text(row.model) for row in matching)
    fitted = " or ".join(f"{row.temperature:.3f}" for row in matching if row.temperature is not None)
    words = f" Calibrated (cNLL), its logits are divided by {fitted}, fitted on validation." if fitted else ""
    return f"By its size, bridges, steps and members this model is the row {names}.{words}"


def rows_of(fast: FastEnsemble, rows: Sequence[Row]) -> list[Row]:
    """The rows that have a model's size, bridges, steps and members."""
    identity = (count_params(fast), len(fast.bridges), _steps(fast), fast.members)
    return [row for row in rows if (row.params, row.bridges, row.steps, row.members) == identity]


def _evaluation_results(
    fast: FastEnsemble, scores: Scores | Fidelity | None, dataset: str | None
) -> Results | None:
    """A model's own figures, as far as it is known which they are; accuracy as a share, as the hub has it."""
    if isinstance(scores, Fidelity):
        rows = [] if scores.row is None else [scores.row]
    elif isinstance(scores, Scores):
        rows, dataset = rows_of(fast, scores.rows), dataset or scores.dataset
    else:
        chosen = [("nll", "NLL", choice.nll) for choice in fast.choices if choice.chosen]
        return Results(dataset or "validation images", "validation", chosen[:1])
    if len(rows) != 1:
        return None
    figures = (
        ("accuracy", "accuracy", rows[0].acc / 100),
        ("nll", "NLL", rows[0].nll),
        ("ece", "expected calibration error", rows[0].ece),
        ("brier_score", "Brier score", rows[0].brier),
    )
    finite = [
        (metric, name, value) for metric, name, value in figures if value is not None and math.isfinite(value)
    ]
    return Results(dataset or "unknown", "test", finite)


def _control(fast: FastEnsemble, rows: Sequence[Row]) -> str:
    """Name the controls of as many bridges; fewer would leave to the ensemble what another bridge gives."""
    if not fast.bridges:
        return "It has no bridge, and so no control."
    controls = [row for row in rows if row.control and row.bridges == len(fast.bridges)]
    names = [_text(row.model) for row in controls]
    if not names:
        of = "" if len(fast.bridges) == 1 else f" of {len(fast.bridges)} bridges"
        return f"No control{of} was measured: how much of the gain is due to the ensemble is not known."
    return (
        f"{' and '.join(names)}: trained towards the source alone; only what exceeds that is the ensemble's."
    )


def _steps(fast: FastEnsemble) -> int:
    return max((bridge.steps for bridge in fast.each_bridge()), default=0)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _text(text: str) -> str:
    """Text on one line that Markdown leaves as it is."""
    return " ".join(text.replace("`", "'").replace("|", "\\|").replace("<", "&lt;").split())


# ------------------------------------------------------------------------------ the head


def is_licence(text: str) -> bool:
    """Whether the hub may take it for a licence's identifier.

    >>> is_licence("apache-2.0"), is_licence("Apache 2.0")
    (True, False)
    """
    return _LICENCE.fullmatch(text) is not None


def is_hub_name(text: str) -> bool:
    """Whether a model on the hub may have this name.

    >>> is_hub_name("timm/resnet18.a1_in1k"), is_hub_name("/models/resnet18")
    (True, False)
    """
    return _HUB_NAME.fullmatch(text) is not None


def check_origin(licence: str | None, base_models: Sequence[str] = ()) -> None:
    """Refuse what a card could not say of a model's licence and of what it was made of."""
    if licence is not None and not is_licence(licence):
        raise ValueError(f"license is {licence!r}; give an identifier such as 'apache-2.0' or 'mit'")
    for name in base_models:
        if not is_hub_name(name):
            raise ValueError(
                f"base_models has {name!r}; give names on the hub, such as 'timm/resnet18.a1_in1k'"
            )


def write_head(
    title: str, licence: str | None = None, base_models: Sequence[str] = (), results: Results | None = None
) -> str:
    """The lines between "---", which huggingface_hub's ModelCardData reads.

    >>> print(write_head("One network", "mit"))
    ---
    library_name: ensbridge
    pipeline_tag: image-classification
    license: "mit"
    tags:
    - ensbridge
    - image-classification
    - deep-ensembles
    - uncertainty
    ---
    """
    check_origin(licence, base_models)
    models = list(dict.fromkeys(base_models))
    lines = [CARD_START.rstrip(), f"pipeline_tag: {TASK}"]
    if licence is not None:
        lines.append(f"license: {json.dumps(licence)}")
    if models:
        lines += ["base_model:", *(f"- {json.dumps(name)}" for name in models)]
    lines += ["tags:", *(f"- {tag}" for tag in TAGS)]
    if results is not None and results.figures:
        lines += [
            "model-index:",
            f"- name: {json.dumps(title)}",
            "  results:",
            "  - task:",
            f"      type: {TASK}",
            "    dataset:",
            f"      name: {json.dumps(results.dataset)}",
            f"      type: {json.dumps(_slug(results.dataset))}",
            f"      split: {results.split}",
            "    metrics:",
        ]
        for metric, name, value in results.figures:
            lines += [
                f"    - type: {metric}",
                f"      value: {value:.8f}",  # YAML reads 1e-05 as text
                f"      name: {json.dumps(name)}",
            ]
    return "\n".join([*lines, "---"])


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_/-]+", "-", name.lower()).strip("-/") or "unknown"
