"""The pages of results/ from its JSON: prose from the templates in studies/pages, figures from the scores.

    python studies/make_pages.py

No torch and no GPU. A template's `{{ … }}` are cells of tables; `table("name")` is a whole table that was
measured without a file of scores, from results/tables.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, wraps
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import ensbridge as eb

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
DIGITS = {"acc": 2, "nll": 4, "brier": 4, "ece": 3, "cnll": 4, "dee": 2}
SCORES = {"msp": "MSP", "entropy": "entropy", "mutual_information": "MI", "disagreement": "disagreement"}
FAR = ("digits", "uniform", "gaussian", "textures")
SHIPPED = (("acc", 2), ("nll", 3), ("dee", 2))  # scores and their digits
PAGES = (
    *("best-for-the-cost", "cifar10", "cifar10/runs", "cifar100", "paper", "quickstart"),
    *("reliability", "uncertainty"),
)
Row = dict[str, Any]


@cache
def read(name: str) -> Any:
    """A file of results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@cache
def measured(name: str) -> list[Row]:
    """The rows of a file of scores in results/cifar10."""
    return [asdict(row) for row in eb.evaluation.read_scores(RESULTS / "cifar10" / name).rows]


def named(rows: Iterable[Row], model: str) -> Row:
    """The one row of a model."""
    (row,) = [row for row in rows if row["model"] == model]
    return row


def cells(*values: str) -> str:
    """Cells of a row, without the outer bars."""
    return " | ".join(values)


def lines(rows: Callable[..., Iterator[Sequence[str]]]) -> Callable[..., str]:
    """Lines of a table from a function that yields the cells of each."""

    @wraps(rows)
    def joined(*arguments: str) -> str:
        return "\n".join(f"| {cells(*row)} |" for row in rows(*arguments))

    return joined


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value and its error; nothing where there is none."""
    return "" if value is None else f"{value:.{digits}f} ± {error:.{digits}f}".replace("-", "−")


# ------------------------------------------------------------------------------ CIFAR-10


def score(row: Row, name: str, per_seed: Sequence[str] = (), bold: Sequence[str] = ()) -> str:
    """A score of the summary: mean, its spread over seeds and, where asked, every seed's."""
    values, digits, member = row[name], DIGITS[name], row["method"] == "DE"
    if name == "dee" and member:
        return str(row["members"])
    if name == "dee" and all(row["beyond the largest ensemble"]):
        text = "> 5"
    else:
        text = f"{values['mean']:.{digits}f}"
        several = len(row["seed"]) > 1 and not member and name != "ece"
        text += f" ± {values['sd']:.{digits}f}" if several and values["sd"] is not None else ""
    text = f"**{text}**" if name in bold else text
    each_seed = ", ".join(f"{value:.{digits}f}" for value in values["each"])
    return f"{text} ({each_seed})" if name in per_seed else text


def ten(model: str, per_seed: Sequence[str] = (), bold: Sequence[str] = ()) -> str:
    """Costs and scores of a model over the seeds."""
    row = named(read("cifar10.json")["rows"], model)
    costs = f"{row['macs_ratio']:.3f}", f"{row['params_ratio']:.3f}"
    return cells(*costs, *(score(row, name, per_seed, bold) for name in ("acc", "nll", "cnll", "ece", "dee")))


def plain(row: Row, *names: str, digits: dict[str, int] = DIGITS, most: int = 3) -> list[str]:
    """Scores of one seed."""
    texts = []
    for name in names:
        if name == "dee" and row["method"] == "DE":
            texts.append(str(row["members"]))
        elif isinstance(row[name], str):  # such as ">3"
            texts.append(f"> {most}")
        else:
            texts.append(f"{row[name]:.{2 if name == 'dee' else digits[name]}f}")
    return texts


def gain(row: Row) -> str:
    """By how much a bridge's NLL is below its control's."""
    return with_error(row["nll_gain_over_control"], row["nll_gain_over_control_se"])


def second_set(model: str) -> str:
    """Scores on the second set of members, on test and on validation images."""
    test, held = (named(measured(f"job-{part}.json"), model) for part in ("test", "validation"))
    both = " / ".join(plain(held, "acc", "nll"))
    return cells(
        f"{test['macs_ratio']:.3f}",
        *plain(test, "acc", "nll", "ece", "cnll", "dee"),
        both,
        gain(test),
        gain(held),
    )


def switch(model: str, cutmix: int = 0) -> str:
    """Scores of an ablation."""
    row = named(measured(f"switches-mixup0.4-cutmix{cutmix}-validation.json"), model)
    return cells(*plain(row, "acc", "nll", "ece", "dee"))


def switches_of_members() -> str:
    """The same of DE-1, DE-2 and DE-3."""
    rows = measured("switches-mixup0.4-cutmix0-validation.json")[:3]
    columns = zip(*(plain(row, "acc", "nll", "ece", "dee") for row in rows), strict=True)
    return cells(*(" / ".join(column) for column in columns))


def corrupted(model: str, paper: str = "") -> str:
    """Means over the corruptions at severity 1, over all five, and at severity 5."""
    by_severity = {row["severity"]: row for row in read("cifar10.json")["corrupted"] if row["model"] == model}
    first = [f"{by_severity[1][f'{name}_19']:.{DIGITS[name]}f}" for name in ("acc", "nll", "ece", "cnll")]
    means = {
        name: mean(by_severity[at][f"{name}_19"] for at in range(1, 6)) for name in ("acc", "nll", "cnll")
    }
    whole = [f"{value:.{DIGITS[name]}f}" for name, value in means.items()]
    return cells(*first, paper, *whole, f"{by_severity[5]['nll_19']:.3f}")


def run(file: str, model: str) -> str:
    """Everything that one run measured of a model."""
    row = named(measured(f"{file}-test.json"), model)
    digits = DIGITS | {"ece": 4}
    costs = f"{row['macs_ratio']:.3f}", f"{row['params_ratio']:.3f}"
    scores = plain(row, "acc", "nll", "brier", "ece", "cnll", "dee", digits=digits, most=5)
    return cells(*costs, *scores, with_error(row["gap"], row["gap_error"], 2))


# ------------------------------------------------------------------------------ CIFAR-100


def hundred(model: str) -> str:
    """Costs and scores of a model, its validation scores, and what the paper has."""
    document = read("cifar100.json")
    row, held = named(document["rows"], model), named(document["validation"], model)
    paper = [theirs for theirs in document["paper"] if theirs["model"] == model]
    single = row | {name: row[name]["mean"] for name in DIGITS}
    single["dee"] = ">3" if row["beyond the largest ensemble"] == [True] else single["dee"]
    ((better, error),) = row["below its control's NLL"]
    return cells(
        f"{row['macs_ratio']:.3f}",
        f"{row['params_ratio']:.3f}",
        *plain(single, "acc", "nll", "brier", "ece", "cnll", "dee"),
        with_error(better, error),
        f"{held['acc']['mean']:.2f} / {held['nll']['mean']:.4f}",
        *(f"*{theirs['acc']:.2f} / {theirs['nll']:.4f} / {theirs['dee']:.4g}*" for theirs in paper),
        *([] if paper else [""]),
    )


def hundred_gain(name: str) -> str:
    """By how much a bridge is better than its control, paired over images."""
    gains = read("cifar100.json")["better than the control"][name]
    nlls = [with_error(gains[part]["nll"], gains[part]["error"]) for part in ("test", "validation", "both")]
    return cells(*nlls, with_error(gains["both"]["points"], gains["both"]["points error"], 2))


# ------------------------------------------------------------------------------ digits, and whole tables


@lines
def shipped(part: str) -> Iterator[Sequence[str]]:
    """The rows of a figure of the quick start, over its three seeds."""
    summary = eb.report.shipped("digits")
    assert summary is not None
    for group in summary.tradeoff if part == "tradeoff" else summary.capacity:
        scores = [
            f"{group.mean(name):.{digits}f} ± {group.spread(name):.{digits}f}" for name, digits in SHIPPED
        ]
        scores[-1] = f">{scores[-1]}" if group.dee_is_bound else scores[-1]
        yield group.model, f"{group.first.macs_ratio:.2f}", *scores


def table(name: str) -> str:
    """A whole table as it was measured."""
    content = read("tables.json")[name]
    head, *rows = (
        f"| {cells(*line)} |" for line in (content["columns"], *(row["cells"] for row in content["rows"]))
    )
    return "\n".join([head, "|---" * len(content["columns"]) + "|", *rows])


# ------------------------------------------------------------------------------ the best model for the cost


@lines
def levers() -> Iterator[Sequence[str]]:
    """What each change does to the NLL."""
    for row in read("cifar10/levers.json")["levers"]:
        change = f"{row['nll_change']:+.4f} ± {row['se']:.4f}"
        yield row["lever"].replace("-", "−"), change.replace("-", "−")


@lines
def lever_models() -> Iterator[Sequence[str]]:
    """Every model of these runs."""
    for row in read("cifar10/levers.json")["rows"]:
        scores = f"{100 * row['acc']:.2f}", f"{row['nll']:.4f}", f"{row['ece']:.4f}"
        yield row["inputs"] or "members", row["model"], f"{row['macs_ratio']:.3f}", *scores


@lines
def pair_on_digits() -> Iterator[Sequence[str]]:
    """The distilled source with a bridge beside every other model, over seeds."""
    document = read("headline.json")
    for name in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["model"] == name]
        scores = [
            with_error(mean(row[key] for row in rows), stdev(row[key] for row in rows), digits)
            for key, digits in (("acc", 2), ("nll", 4), ("cnll", 4), ("ece", 3))
        ]
        below = [difference for difference, _ in document["below"].get(name, [])]
        gain = with_error(mean(below), stdev(below) / len(below) ** 0.5, 4) if below else ""
        on = f"{sum(difference > 0 for difference in below)} of {len(below)}" if below else ""
        yield name, f"{rows[0]['macs_ratio']:.2f}", *scores, gain, on


@lines
def controls() -> Iterator[Sequence[str]]:
    """Every control on digits beside the pair: means over sets of members."""
    document = read("controls.json")
    above = {row["of"]: row for row in document["above"]}
    for name in dict.fromkeys(row["model"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["model"] == name]
        scores = [
            with_error(mean(row[key] for row in rows), stdev(row[key] for row in rows), digits)
            for key, digits in (("acc", 2), ("nll", 3), ("cnll", 3))
        ]
        difference = above.get(name)
        gain, count = "", ""
        if difference:
            errors = f"{difference['se_sets']:.3f} / {difference['se_images']:.3f}"
            gain = f"{difference['nll']:+.3f} ± {errors}".replace("-", "−")
            count = f"{sum(value > 0 for value in difference['sets'])} of {len(difference['sets'])}"
        yield name, f"{rows[0]['macs_ratio']:.2f}", *scores, gain, count


@lines
def short_rates() -> Iterator[Sequence[str]]:
    """The cNLL of small networks that were distilled in few steps, by rate, seed by seed."""
    rows = read("short-distillation.json")["rows"]
    steps = list(dict.fromkeys(row["steps"] for row in rows))
    for name in dict.fromkeys(row["model"] for row in rows):
        by_steps = [[row for row in rows if (row["model"], row["steps"]) == (name, count)] for count in steps]
        yield name, *(", ".join(f"{row['cnll']:.3f}" for row in some) for some in by_steps)


@lines
def label_weights(dataset: str) -> Iterator[Sequence[str]]:
    """Networks by the labels' weight, means over seeds, and the change of cNLL from w = 0 with its error."""
    rows = [row for row in read("label-weight.json")["rows"] if row["dataset"] == dataset]
    without = {row["seed"]: row["cnll"] for row in rows if row["model"] == "0"}
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        means = [mean(row[score] for row in of_model) for score in ("acc", "nll", "cnll")]
        changes = [row["cnll"] - without[row["seed"]] for row in of_model]
        change = "" if name == "0" else with_error(mean(changes), stdev(changes) / len(changes) ** 0.5, 3)
        yield name, f"{100 * means[0]:.1f}", f"{means[1]:.3f}", f"{means[2]:.3f}", change


@lines
def best(part: str) -> Iterator[Sequence[str]]:
    """Every model of the best for the cost on CIFAR-10, means over seeds."""
    digits = {"acc": 2, "nll": 4, "cnll": 4, "ece": 4, "calibrated_ece": 4}
    for row in read("cifar10/best.json")["rows"]:
        if row["part"] == part:
            costs = f"{row['macs_ratio']:.3f}", f"{row['params_ratio']:.3f}"
            scores = [
                f"{row[name]['mean']:.{count}f}"
                + (f" ± {row[name]['sd']:.{count}f}" if row[name]["sd"] is not None else "")
                for name, count in digits.items()
            ]
            yield row["model"], *costs, *scores, f"± {row['nll_se']:.4f}"


@lines
def best_differences(part: str) -> Iterator[Sequence[str]]:
    """Paired differences of the NLL, with errors over seeds and, as far as known, over images."""
    for row in read("cifar10/best.json")["differences"]:
        if row["part"] == part:
            images = "" if row["se"] is None else f"± {row['se']:.4f}"
            if row["image_seeds"] not in (0, 3):
                images += f" ({row['image_seeds']} seed)"
            yield row["of"], row["than"], with_error(row["nll"], row["se_seeds"]), images


@lines
def tried() -> Iterator[Sequence[str]]:
    """Short runs that chose the optimiser, its rate and what bridges read."""
    for row in read("cifar10/best.json")["tried"]:
        scores = f"{row['acc']:.2f}", f"{row['nll']:.4f}", f"{row['ece']:.3f}"
        yield str(row["epochs"]), row["model"], row["bridge"] or "none", *scores


def lowest(method: str, source: str) -> str:
    """The setting of a method that cross-validation on digits preferred, and its NLL."""
    rows = read("headline-choice.json")["rows"]
    rows = [row for row in rows if (row["method"], row["source"]) == (method, source)]
    row = min(rows, key=lambda row: row["nll"])
    return cells(row["model"], f"{row['nll']:.3f}")


def choice(name: str) -> str:
    """The NLL of a model by cross-validation on digits."""
    return next(f"{row['nll']:.3f}" for row in read("headline-choice.json")["rows"] if row["model"] == name)


# ------------------------------------------------------------------------------ the paper


def minutes(row: Row) -> float:
    """What a run that was not made would take to train."""
    images = read("not-run.json")["images in an epoch"]
    return sum(epochs * images / rate for _, epochs, rate in row["work"]) / 60


@lines
def not_run() -> Iterator[Sequence[str]]:
    """Every run of the paper that was not made, with its cost."""
    for row in read("not-run.json")["rows"]:
        yield row["dataset"], row["what"], f"`{row['command']}`", f"{minutes(row):.0f}", row["basis"]


def not_run_total() -> str:
    """The minutes of all of them."""
    return f"{sum(map(minutes, read('not-run.json')['rows'])):.0f}"


def not_run_images() -> str:
    """The images of an epoch."""
    return f"{read('not-run.json')['images in an epoch']:,}"


# ------------------------------------------------------------------------------ uncertainty


def paired(row: Row, key: str, scale: float = 100, digits: int = 2) -> str:
    """A difference to another model or score, with its error; nothing where there is none."""
    difference, error = row.get(key, (0, 0))
    return with_error(scale * difference, scale * error, digits) if error else ""


def percent(row: Row, name: str, digits: int) -> str:
    """A share with its error, in per cent."""
    return with_error(100 * row[name], 100 * row[f"{name}_se"], digits)


def by_score(part: str, **wanted: str) -> dict[tuple[str, str], dict[str, Row]]:
    """The rows of a part of uncertainty.json by model and score, then by images."""
    rows: dict[tuple[str, str], dict[str, Row]] = {}
    for row in read("uncertainty.json")[part]:
        if wanted.items() <= row.items():
            rows.setdefault((row["model"], SCORES[row["score"]]), {})[row["images"]] = row
    return rows


@lines
def detections(images: str, *against: str) -> Iterator[Sequence[str]]:
    """How well every score finds other images, or errors, and by how much better than others."""
    for key, sets in by_score("detection").items():
        row = sets[images]
        others = [paired(row, f"over {other}") for other in against]
        yield *key, percent(row, "auroc", 2), percent(row, "fpr95", 1), *others


@lines
def far() -> Iterator[Sequence[str]]:
    """AUROC for each of the far sets; MSP is left out."""
    for key, sets in by_score("detection").items():
        if key[1] != "MSP":
            yield *key, *(percent(sets[name], "auroc", 1) for name in FAR)


@lines
def abstaining() -> Iterator[Sequence[str]]:
    """AURC and AUGRC in thousandths, and prediction sets."""
    for row in read("uncertainty.json")["abstaining"]:
        areas = [with_error(1000 * row[name], 1000 * row[f"{name}_se"], 2) for name in ("aurc", "augrc")]
        below = [paired(row, f"below {name}", 1000) for name in ("DE-1", "control", "DE-5")]
        sets = [f"{100 * kind['coverage']:.1f} / {kind['size']:.3f}" for kind in row["sets"]]
        yield row["model"], f"{100 * row['acc']:.2f}", *areas, *below, *sets


@lines
def correlations(target: str) -> Iterator[Sequence[str]]:
    """Rank correlations with an ensemble's mutual information."""
    for key, sets in by_score("correlation", target=target).items():
        figures = []
        for row in (sets["test"], sets["cifar100"]):
            figures += [with_error(row["rank"], row["rank_se"], 3), paired(row, "over own entropy", 1, 3)]
        partial = sets["test"]["partial"]
        figures.append("" if partial is None else f"{partial:.2f}")
        if key[1] != "MSP":
            yield *key, *figures


def uncertain(part: str, **wanted: str) -> Row:
    """One row of uncertainty.json."""
    (row,) = [row for row in read("uncertainty.json")[part] if wanted.items() <= row.items()]
    return row


def auroc(images: str, model: str, score: str = "entropy", digits: int = 2) -> str:
    """How well a score finds images, in per cent."""
    return f"{100 * uncertain('detection', images=images, model=model, score=score)['auroc']:.{digits}f}"


def auroc_lead(images: str, model: str, score: str, other: str, part: str = "detection") -> str:
    """By how many points it is better than another model's, or than the model's own entropy."""
    return signed(uncertain(part, images=images, model=model, score=score)[f"over {other}"], 100, 2)


def augrc(model: str) -> str:
    """The AUGRC of a model, in thousandths."""
    return f"{1000 * uncertain('abstaining', model=model)['augrc']:.2f}"


def augrc_below(model: str, other: str) -> str:
    """By how much it is lower than another's."""
    return paired(uncertain("abstaining", model=model), f"below {other}", 1000)


def sets_of(model: str, method: str) -> str:
    """How many classes a model's prediction sets have on average."""
    kinds = {kind["method"]: kind for kind in uncertain("abstaining", model=model)["sets"]}
    return f"{kinds[method]['size']:.3f}"


def rank(target: str, model: str, score: str, images: str = "test", digits: int = 3) -> str:
    """A score's rank correlation with an ensemble's mutual information."""
    row = uncertain("correlation", target=target, model=model, score=score, images=images)
    return f"{row['rank']:.{digits}f}"


def rank_lead(target: str, model: str, score: str, images: str = "test") -> str:
    """By how much that is larger than entropy's."""
    row = uncertain("correlation", target=target, model=model, score=score, images=images)
    return signed(row["over own entropy"], 1, 3)


def signed(difference: Sequence[float], scale: float, digits: int) -> str:
    """A difference with its sign and its error."""
    value, error = (scale * number for number in difference)
    return f"{'+' if value > 0 else ''}{with_error(value, error, digits)}"


def calibrated_scores() -> str:
    """AUROC of the distilled networks' scores once calibrated, and what it was before."""
    rows: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in read("uncertainty.json")["recalibrated"]:
        key = row["model"], f"{row['temperature']:.2f}", SCORES[row["score"]]
        rows.setdefault(key, {})[row["images"]] = row
    lines = []
    for key, sets in rows.items():
        found = [sets[name] for name in ("errors", "cifar100", *FAR)]
        figures = [f"{100 * row['auroc']:.1f} ({100 * row['change']:+.1f})" for row in found]
        lines.append(f"| {cells(*key, *figures)} |".replace("(-", "(−"))
    return "\n".join(lines)


def images_of(name: str) -> str:
    """How many images of a set there are."""
    return f"{read('uncertainty.json')['images'][name]:,}"


# ------------------------------------------------------------------------------ reliability


def count_of(value: Any) -> str:
    """A cell of what was counted: a list is as many sentences about something that was wrong."""
    if isinstance(value, list):
        floats = value and isinstance(value[0], float)
        return ", ".join(f"{number:.0f}" for number in value) if floats else str(len(value))
    return f"{value:,}" if isinstance(value, int) else str(value)


@lines
def counted(part: str, *columns: str) -> Iterator[Sequence[str]]:
    """A row of counts for everything that a part of the soak tried."""
    for row in read("reliability.json")[part]["rows"]:
        yield [count_of(row[name]) for name in columns]


def total(part: str, *columns: str) -> str:
    """The sum of counts over all rows of a part."""
    rows = read("reliability.json")[part]["rows"]
    numbers = [row[name] for row in rows for name in columns]
    return f"{sum(len(value) if isinstance(value, list) else value for value in numbers):,}"


def soak(part: str, name: str = "") -> str:
    """Something else that the soak noted."""
    document = read("reliability.json")
    value = document[part][name] if name else document[part]
    if isinstance(value, list):
        return ", ".join(f"`{text}`" for text in value)
    return f"{value:.0f}" if isinstance(value, float) else str(value)


CALLED: tuple[Callable[..., str], ...] = (  # by templates
    *(ten, second_set, switch, switches_of_members, corrupted, run),
    *(hundred, hundred_gain, shipped, table, levers, lever_models, pair_on_digits, choice, lowest),
    *(best, best_differences, tried, controls, short_rates, label_weights),
    *(detections, far, abstaining, correlations, images_of, auroc, auroc_lead, augrc, augrc_below),
    *(sets_of, rank, rank_lead, calibrated_scores),
    *(not_run, not_run_total, not_run_images),
    *(counted, total, soak),
)


def pages() -> dict[Path, str]:
    """Every page by where it lies in the repository."""
    loader = FileSystemLoader(Path(__file__).parent / "pages")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.update({function.__name__: function for function in CALLED})
    texts = {}
    for name in PAGES:
        text = environment.get_template(f"{name.replace('/', '-')}.md.j2").render()
        texts[RESULTS / f"{name}.md"] = re.sub(r"\| +(?=\|)", "| ", text)  # empty cells
    return texts


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
