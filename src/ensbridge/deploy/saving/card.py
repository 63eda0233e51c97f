"""`README.md`, the model card: what the model is, what it costs, how it is loaded, what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ensbridge.deploy.saving.description import Description, Facts
from ensbridge.deploy.saving.metadata import Result, results_of, write_head
from ensbridge.evaluation.choices import choices_table
from ensbridge.evaluation.fidelity import Fidelity
from ensbridge.evaluation.scores import COLUMNS, Row, Scores, cells, parse_scores, summarise
from ensbridge.metrics.cost import count_macs, count_params
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.input_specs import made_up_inputs
from ensbridge.utils.text import one_line

_FOLDER = '"path/to/this/folder"'


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
    results = evaluation_results(fast, scores, dataset)
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
        try:
            macs = [count_macs(net, made_up_inputs(facts.input_specs, 1)) for net in (fast.source, fast)]
        except Exception as error:  # a network may take only such inputs as cannot be made up
            reason = f"Multiply-accumulates were not counted: made-up inputs fail ({_text(one_line(error))})."
            return "\n".join([*lines, "", reason])
        shapes = ", ".join(map(str, facts.input_specs))
        return "\n".join([*lines, _cost_line(f"multiply-accumulates, one example ({_text(shapes)})", *macs)])
    if facts.image_shape is None:
        return "\n".join([*lines, "", "Multiply-accumulates were not counted: no image shape was given."])
    like = next(fast.source.parameters(), torch.zeros(1))
    image = torch.zeros(1, *facts.image_shape, dtype=like.dtype, device=like.device)
    try:
        macs = [count_macs(net, image) for net in (fast.source, fast)]
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"image_shape is {facts.image_shape}, which the model cannot take ({error})"
        ) from error
    shape = "×".join(map(str, facts.image_shape))
    return "\n".join([*lines, _cost_line(f"multiply-accumulates, one image of {shape}", *macs)])


def _cost_line(name: str, one: int, both: int) -> str:
    ratio = f"×{both / one:.3f}" if one else "–"
    return f"| {name} | {one:,} | {both:,} | {ratio} |"


def _use(description: Description) -> str:
    source = description.source
    call = f"eb.load({_FOLDER})"
    if source.build is None:
        call = f"eb.load({_FOLDER}, source=net)  # net: your {_text(source.name)}, to be filled"
    elif not source.build.startswith("ensbridge.nets:"):
        call = f'eb.load({_FOLDER}, allow=["{source.build}"])  # imports it, so only if you trust it'
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


def evaluation_results(
    fast: FastEnsemble, scores: Scores | Fidelity | None, dataset: str | None
) -> list[Result]:
    """A model's own figures, as far as it is known which they are, for the card's metadata."""
    if isinstance(scores, Fidelity):
        row = scores.row
        return [] if row is None else results_of(row, dataset, "test")
    if isinstance(scores, Scores):
        matching = rows_of(fast, scores.rows)
        return results_of(matching[0], dataset or scores.dataset, "test") if len(matching) == 1 else []
    chosen = [choice for choice in fast.choices if choice.chosen]
    return (
        [Result(dataset or "validation images", "validation", "nll", "NLL", chosen[0].nll)] if chosen else []
    )


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
