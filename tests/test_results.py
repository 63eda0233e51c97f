"""What is said of CIFAR-10 and CIFAR-100 is what was measured: words and tables against the scores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "results" / "cifar10.md").read_text(encoding="utf-8")
SCORES = json.loads((ROOT / "results" / "cifar10.json").read_text())
ROWS = {row["model"]: row for row in SCORES["rows"]}
SECOND = {row["model"]: row for row in SCORES["second set of members"]}
READINGS = "DEE of KL, T = 4"
HUNDRED_PAGE = (ROOT / "results" / "cifar100.md").read_text(encoding="utf-8")
HUNDRED = json.loads((ROOT / "results" / "cifar100.json").read_text())

# What the page's first table calls them; averages of predictions that are no models are not in the scores.
NAMES = {
    "DE-1": "DE-1",
    "DE-2": "DE-2",
    "DE-3": "DE-3",
    "DE-5": "DE-5",
    "+1 DBN (KL, T = 4), zoo:cifar10 is seed 0": "+1 DBN (KL, T = 4)",
    "+1 DBN, the paper's loss, T = 2, 5 steps into 1": "+1 DBN",
    "… in its 5 steps": "+1 DBN (5 steps)",
    "control of it, 1 step": "control",
    "+1 DBN (KL), T = 2": "+1 DBN (KL)",
    "+2 DBN (KL, T = 4), seeds 0 and 1, both {1, 2, 3}, zoo:cifar10-2": "+2 DBN (KL, T = 4)",
    "control of two: seeds 0 and 1": "+2 control (KL, T = 4)",
    "+2 DBN (KL, DE-5), T = 4 {1, 2, 3} and T = 2 {1, 4, 5}": "+2 DBN (KL, T = 4 and 2, DE-5)",
    "+2 DBN (KL, DE-5), both T = 2": "+2 DBN (KL, DE-5)",
    "ED (DE-3)": "ED",
    "EnD² (DE-3)": "EnD²",
    "+2 BN small (DE-3)": "+2 BN small",
    "+4 BN small (DE-5)": "+4 BN small",
    "+2 BN medium (DE-3)": "+2 BN medium",
}


def table() -> dict[str, list[str]]:
    """The first table's cells by our names; “control of it” is that of the row above."""
    lines = [line for line in PAGE.split("**What holds.**")[0].splitlines() if line.startswith("| ")]
    found: dict[str, list[str]] = {}
    above = ""
    for line in lines[1:]:
        first, *cells = [cell.strip() for cell in re.sub(r"[*`]", "", line).strip("| ").split(" | ")]
        name = above.replace("+1 DBN", "control") if first == "control of it" else NAMES.get(first, "")
        if name:
            above, found[name] = name, cells
    return found


def value(row: dict, name: str, digits: int) -> str:
    """A score as the table has it: the mean, where there are several seeds its spread and each of them."""
    score = row[name]
    mean = f"{score['mean']:.{digits}f}"
    if row["model"].startswith("DE-") or len(row["seeds"]) == 1 or score["sd"] is None:
        return mean
    return f"{mean} ± {score['sd']:.{digits}f}"


def test_every_row_of_the_table_is_found() -> None:
    assert {*table()} == {*NAMES.values(), "control (KL, T = 4)", "control (KL)"}


@pytest.mark.parametrize("name", table())
def test_a_row_of_the_table_is_what_was_measured(name: str) -> None:
    row, (macs, params, acc, nll, cnll, ece, dee, *_) = ROWS[name], table()[name]
    assert (macs, params) == (f"{row['macs_ratio']:.3f}", f"{row['params_ratio']:.3f}")
    assert acc.partition(" (")[0] == value(row, "acc", 2)
    assert (nll, cnll) == (value(row, "nll", 4), value(row, "cnll", 4))
    assert ece == f"{row['ece']['mean']:.3f}"
    if "(" in acc:
        assert acc.partition(" (")[2] == ", ".join(f"{each:.2f}" for each in row["acc"]["each"]) + ")"
    if name.startswith("DE-"):
        assert dee == name.removeprefix("DE-")
    elif dee == "> 5":
        assert max(row["nll"]["each"]) < ROWS["DE-5"]["nll"]["mean"]
    else:
        assert dee.partition(" (")[0] == value(row, "dee", 2)


@pytest.mark.parametrize("name", SECOND)
def test_a_row_of_the_second_set_is_what_was_measured(name: str) -> None:
    section = PAGE.split("## A second set of members")[1].split("\n## ")[0]
    macs, acc, nll, ece, cnll, dee, _, owed, _ = cells_of(section, name)
    row = SECOND[name]
    assert (macs, acc, nll) == (f"{row['macs_ratio']:.3f}", mean(row, "acc", 2), mean(row, "nll", 4))
    assert (ece, cnll) == (mean(row, "ece", 3), mean(row, "cnll", 4))
    assert (dee, owed) == beside_three(row)


@pytest.mark.parametrize("row", HUNDRED["rows"], ids=lambda row: row["model"])
def test_a_row_of_cifar100_is_what_was_measured(row: dict) -> None:
    name, *found = row["model"], *cells_of(HUNDRED_PAGE.split("**What holds.**")[0], row["model"])
    digits = {"acc": 2, "nll": 4, "brier": 4, "ece": 3, "cnll": 4}
    (val,) = [each for each in HUNDRED["validation"] if each["model"] == name]
    (paper,) = [each for each in HUNDRED["paper"] if each["model"] == name] or [None]
    assert found == [
        f"{row['macs_ratio']:.3f}",
        f"{row['params_ratio']:.3f}",
        *(mean(row, key, places) for key, places in digits.items()),
        *beside_three(row),
        f"{mean(val, 'acc', 2)} / {mean(val, 'nll', 4)}",
        f"{paper['acc']:.2f} / {paper['nll']:.4f} / {paper['dee']:.4g}" if paper else "",
    ]


def test_what_is_owed_to_the_ensemble_on_cifar100_is_what_was_measured() -> None:
    names = {
        "+1 DBN": "the paper's loss, T = 2",
        "+1 DBN (KL, T = 3)": "KL, T = 3",
        "two bridges": "both averaged",
    }
    for name, label in names.items():
        owed = HUNDRED["better than the control"][name]
        nlls = [
            f"{owed[part]['nll']:.4f} ± {owed[part]['error']:.4f}" for part in ("test", "validation", "both")
        ]
        points = f"{owed['both']['points']:.2f} ± {owed['both']['points error']:.2f}"
        assert cells_of(HUNDRED_PAGE.split("due to the ensemble?**")[1], label) == [*nlls, points]
    text = " ".join(HUNDRED_PAGE.split())
    for pair in HUNDRED["averaged"].values():
        figures = [f"{pair[part]['acc']:.2f} / {pair[part]['nll']:.4f}" for part in ("test", "validation")]
        assert re.search(rf"have {figures[0]} \((validation )?{figures[1]}\)", text), figures
    ece = {name: f"{value:.3f}" for name, value in HUNDRED["calibrated ece"].items()}
    kl, control, three, own = (
        ece[name] for name in ("+1 DBN (KL, T = 3)", "control (KL, T = 3)", "DE-3", "+1 DBN")
    )
    assert f"brings KL's and its control's to {kl} and {control}, where DE-3 has {three}, " in text
    assert f"that of the paper's loss only to {own}." in text


def cells_of(section: str, name: str) -> list[str]:
    """The cells of the one line of a section's table with this name."""
    lines = [line for line in re.sub(r"[*`]", "", section).splitlines() if line.startswith(f"| {name} |")]
    assert len(lines) == 1, (name, lines)
    return [cell.strip() for cell in lines[0].removeprefix(f"| {name} ").split("|")[1:-1]]


def mean(row: dict, name: str, digits: int) -> str:
    return f"{row[name]['mean']:.{digits}f}"


def beside_three(row: dict) -> tuple[str, str]:
    """DEE and what is owed to the ensemble, of a row beside three members of one seed."""
    name, ((gain, error),) = row["model"], row["below its control's NLL"]
    exact = name.removeprefix("DE-") if name.startswith("DE-") else mean(row, "dee", 2)
    dee = "> 3" if row["beyond the largest ensemble"] == [True] else exact
    return dee, "" if gain is None else f"{gain:.4f} ± {error:.4f}".replace("-", "−")


def corrupted_table() -> dict[str, list[str]]:
    """The cells of the table under corruptions, by the names of the scores."""
    section = PAGE.split("## Under corruptions")[1].split("\n## ")[0]
    names = {
        "+2 DBN (KL, T = 4), zoo:cifar10-2": "+2 DBN (KL, T = 4)",
        "+2 DBN (KL, DE-5), T = 4 and T = 2": "+2 DBN (KL, T = 4 and 2, DE-5)",
        "+1 DBN (KL), T = 2": "+1 DBN (KL)",
        "+2 DBN (KL, DE-5), both T = 2": "+2 DBN (KL, DE-5)",
        "ED (DE-3)": "ED",
    }
    found: dict[str, list[str]] = {}
    above = ""
    for line in [line for line in section.splitlines() if line.startswith("| ") and "severity" not in line]:
        first, *cells = [cell.strip() for cell in re.sub(r"[*`]", "", line).strip("|").split("|")]
        own = names.get(first.strip(), first.strip())
        above = above.replace("+1 DBN", "control") if own == "control of it" else own
        found[above] = cells
    return found


def test_the_table_under_corruptions_is_what_was_measured() -> None:
    rows = {(row["model"], row["severity"]): row for row in SCORES["corrupted"]}
    table = corrupted_table()
    assert {*table} == {model for model, _ in rows}
    for model, (acc, nll, ece, cnll, _, *five, last) in table.items():
        first = rows[model, 1]
        assert [acc, nll, ece, cnll] == [
            f"{first['acc_19']:.2f}",
            f"{first['nll_19']:.4f}",
            f"{first['ece_19']:.3f}",
            f"{first['cnll_19']:.4f}",
        ], model
        means = {
            key: sum(rows[model, severity][f"{key}_19"] for severity in range(1, 6)) / 5
            for key in ("acc", "nll", "cnll")
        }
        assert five == [f"{means['acc']:.2f}", f"{means['nll']:.4f}", f"{means['cnll']:.4f}"], model
        assert last == f"{rows[model, 5]['nll_19']:.3f}", model


def test_the_readme_says_what_was_measured() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    main, control = ROWS["+1 DBN (KL, T = 4)"], ROWS["control (KL, T = 4)"]
    assert f"at ×{main['macs_ratio']:.3f} MACs has {value(main, 'acc', 2)} %" in text
    assert f"the NLL of {value(main, 'dee', 2)} members" in text
    assert f"without any ensemble has that of {value(control, 'dee', 2)}" in text
    other = {name: f"{dee['dee_on_paper_ensembles']:.2f}" for name, dee in SCORES[READINGS].items()}
    assert f"as the reference it is {other['bridge']}; " in text
    assert f"(on the paper's {other['control']})" in text
    assert f"over test images is ±{SCORES[READINGS]['bridge']['dee_se']:.2f}; " in text
    two = ROWS["+2 DBN (KL, T = 4)"]
    assert f"two bridges at ×{two['macs_ratio']:.3f}" in text
    assert f"have {two['acc']['mean']:.2f} % and an NLL below that of five members" in text
    assert two["nll"]["mean"] < ROWS["DE-5"]["nll"]["mean"]
    students = [f"{ROWS[name]['dee']['mean']:.2f}" for name in ("ED", "EnD²")]
    assert f"ED and EnD², have the NLL of {' and '.join(students)} members" in text
    medium = ROWS["+2 BN medium"]
    assert f"at ×{medium['macs_ratio']:.3f} that of {medium['dee']['mean']:.2f}" in text
    second, members = (
        f"{SECOND[name]['acc']['mean']:.2f} %, NLL {SECOND[name]['nll']['mean']:.3f}"
        for name in ("+1 DBN (KL, T = 4)", "DE-3")
    )
    assert f"({second} against {members.replace('NLL ', '')})" in text
    assert SECOND["control (KL, T = 4)"]["nll"]["mean"] < SECOND["DE-3"]["nll"]["mean"]


def test_the_readme_says_what_was_measured_on_cifar100() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = {row["model"]: row for row in HUNDRED["rows"]}
    own, kl = rows["+1 DBN"], rows["+1 DBN (KL, T = 3)"]
    assert f"at ×{own['macs_ratio']:.3f} MACs has {mean(own, 'acc', 2)} %" in text
    assert f"the NLL of {mean(own, 'dee', 2)} members (the paper: 76.02 % and 2.461)" in text
    assert f"its control that of {mean(rows['control'], 'dee', 2)}: " in text
    owed = HUNDRED["better than the control"]["+1 DBN"]["test"]
    assert f"{owed['nll']:.3f} of NLL (standard error over images {owed['error']:.3f})" in text
    assert f"at T = 3 it has {mean(kl, 'acc', 2)} % and an NLL below that of the three members" in text
    nlls = [mean(rows[name], "nll", 3) for name in (kl["model"], "DE-3", "control (KL, T = 3)")]
    assert "({} against {}; control {})".format(*nlls) in text
