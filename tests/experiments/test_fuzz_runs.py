"""Files of a run with whatever a stranger may put into them: one sentence, or a result, and nothing else.

ENSBRIDGE_FUZZ is how many examples each test tries, 40 unless it is set; set, they are new ones each time.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

import _report  # noqa: E402
import _runs  # noqa: E402
from ensbridge.evaluation.scores import read_scores, summarise  # noqa: E402
from ensbridge.experiments import Plan, check_runs  # noqa: E402
from ensbridge.report import headline, rich_table, write_report  # noqa: E402
from ensbridge.report.figures import PLOTS  # noqa: E402
from ensbridge.training import fit  # noqa: E402
from ensbridge.training.checkpoint import RunFolder, load_checkpoint, save_checkpoint  # noqa: E402

ASKED = os.environ.get("ENSBRIDGE_FUZZ")
EXAMPLES = int(ASKED or 40)


def fuzz(examples: int = EXAMPLES) -> Callable[[Any], Any]:
    """Settings of every test here: no limits of time, nothing kept, failures shown as they were drawn."""
    return hypothesis.settings(
        max_examples=max(1, examples),
        phases=[hypothesis.Phase.generate],
        deadline=None,
        database=None,
        derandomize=ASKED is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# ------------------------------------------------------------------------------ what strangers write

NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.sampled_from([10**6, 2**31, 2**63, 10**30, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e300]),
    st.floats(),
)
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", "\x1b[31m", "\u202e", "\ud800", "a\nb", ">5", "../..", "<b>", "nan", "x" * 5000]),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
BYTES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [b"\xff", b"[" * 3000, b"{" * 50, b'"a":1,"a":2,', b"1" * 5000, b"\0", b"NaN", b"\x1b[2J"]
    ),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside a document, with a key or index of it."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            found += [(value, key), *places(value[key])]
    return found


def changed(draw: Any, document: Any) -> bytes:
    """The text of a document after a few changes to its values, its keys and its bytes."""
    whole = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(0, 3))):
        found = places(whole)
        if not found:
            break
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        how = draw(st.sampled_from(["replace", "replace", "replace", "delete", "double", "more"]))
        if how == "delete":
            holder.pop(key)
        elif how == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "more" and isinstance(holder, dict):
            holder[draw(TEXTS)] = draw(VALUES)
        else:
            holder[key] = draw(VALUES)
    content = json.dumps(whole[0] if whole else None).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(BYTES) + content[at + draw(st.integers(0, 3)) :]
    return content


def sentence(error: ValueError, path: Path | None = None) -> None:
    """Check that an error is one that a user may meet, and that it names its file where that is known."""
    assert type(error) is ValueError, repr(error)
    assert len(str(error)) < 3000
    if path is not None:
        assert str(path) in str(error)


@cache
def folder(name: str) -> Path:
    """A folder that the tests of this process share, and that the last of them need not clear away."""
    made = Path(mkdtemp(prefix=f"ensbridge-{name}-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


# ------------------------------------------------------------------------------ scores.json


@hypothesis.given(data=st.data())
@fuzz()
def test_any_scores_are_read_or_refused(data: Any) -> None:
    path = folder("scores") / "scores.json"
    path.write_bytes(changed(data.draw, _report.make_document()))
    try:
        scores = read_scores(path)
    except ValueError as error:
        sentence(error, path)
        return
    summary = summarise([scores])
    assert summary.table()
    assert headline(summary)
    assert rich_table(summary)
    for plot in PLOTS:
        try:
            plot.data(summary)
        except ValueError as error:
            sentence(error)


@hypothesis.given(data=st.data())
@fuzz(EXAMPLES // 20)
def test_any_scores_that_can_be_read_can_be_reported(data: Any) -> None:
    path = folder("report") / "scores.json"
    path.write_bytes(changed(data.draw, _report.make_document()))
    try:
        write_report(summarise([read_scores(path)]), path.parent)
    except ValueError as error:
        sentence(error)


# ------------------------------------------------------------------------------ config.json

FIELDS = [
    *("members", "target", "figure_members", "members_together", "kl_temperature", "feature", "end2_predict"),
    *("bridge.num_steps", "bridge.beta", "bridge.ema", "bridge.temperature.base", "bridge.z_input"),
    *(
        "member_fit.epochs",
        "bridge_fit.batch_size",
        "kl_fit.lr",
        "ed_fit.augment.crop",
        "bn_fit.warmup_steps",
    ),
    *("distill_fit.log_every", "curve_fit.optimizer", "end2_fit.precision", "name", "load", "seed", "", "."),
]
CHANGES = st.builds(
    lambda field, equals, value: f"{field}{equals}{value}",
    st.sampled_from(FIELDS),
    st.sampled_from(["=", "=", "=", "", "=="]),
    st.one_of(TEXTS, NUMBERS.map(repr)),
)


@hypothesis.given(data=st.data())
@fuzz()
def test_any_configuration_of_a_run_is_read_or_refused(data: Any) -> None:
    path = folder("config") / "config.json"
    changes = tuple(data.draw(st.lists(CHANGES, max_size=3)))
    plan = Plan("digits", changes=changes).to_json()
    path.write_bytes(changed(data.draw, {"plan": plan, "recipe": {"members": 5}, "seed": 0}))
    content = path.read_bytes()
    for look in (
        lambda: check_runs([path.parent]),
        lambda: RunFolder(path.parent, {"plan": plan, "seed": 0}),
    ):
        try:
            look()
        except ValueError as error:
            sentence(error)
        assert path.read_bytes() == content


# ------------------------------------------------------------------------------ log.jsonl


@hypothesis.given(data=st.data())
@fuzz()
def test_any_log_is_rewound_or_refused_as_it_is(data: Any) -> None:
    run = RunFolder(folder("log"), {})
    log = run.path / "log.jsonl"
    lines = [{"step": step, "images": 4 * step, "loss": 1 / step} for step in (3, 6, 9)]
    number = data.draw(st.integers(0, 2))
    texts = [json.dumps(line).encode() for line in lines]
    texts[number] = changed(data.draw, lines[number])
    log.write_bytes(b"\n".join(texts) + data.draw(st.sampled_from([b"\n", b"", b"\n{", b"\n\xff"])))
    content = log.read_bytes()
    try:
        run.rewind_log(data.draw(st.integers(0, 12)))
    except ValueError as error:
        sentence(error, log)
        assert log.read_bytes() == content
    else:
        assert set(log.read_bytes().splitlines()) <= set(content.splitlines())
        assert log.read_bytes()[-1:] in (b"", b"\n")


# ------------------------------------------------------------------------------ checkpoints


@cache
def begun() -> Path:
    """A run that stopped after 9 of its steps, with checkpoints at 4 and 8."""
    _runs.begin("bridge", folder("begun"))
    return folder("begun")


def forge(draw: Any, path: Path) -> None:
    """Change a checkpoint's metadata, tensors or bytes; without the last its checksum is right."""
    tensors, metadata = load_checkpoint(path)
    counts = {"more": 1} | {key: json.loads(text) for key, text in sorted(metadata.items())}
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(tensors)))
        how = draw(st.sampled_from(["metadata", "delete", "rename", "shape", "type", "value"]))
        if how == "metadata":
            key = draw(st.sampled_from(list(counts)))
            metadata[key] = changed(draw, counts[key]).decode(errors="replace")
        elif how == "delete":
            del tensors[name]
        elif how == "rename":
            old = draw(st.sampled_from(["student", "average", "optimizer", "0", "/"]))
            new = name.replace(old, draw(st.sampled_from(["", "oven", "99", "-1", "//", "🙂"])))
            tensors[new or "x"] = tensors.pop(name)
        elif how == "shape":
            tensors[name] = tensors[name].reshape(-1)[: draw(st.integers(0, 2))]
        elif how == "type":
            kinds = [torch.int64, torch.bool, torch.float16, torch.float64, torch.uint8, torch.bfloat16]
            tensors[name] = tensors[name].to(draw(st.sampled_from(kinds)))
        else:
            number = draw(st.sampled_from([0.0, -1.0, 1e30, float("nan"), float("inf")]))
            tensors[name] = torch.full_like(tensors[name], number if tensors[name].is_floating_point() else 7)
    save_checkpoint(path, tensors, metadata)
    if draw(st.integers(0, 4)) == 0:
        content = path.read_bytes()
        at = draw(st.integers(0, min(len(content), 3000)))
        path.write_bytes(content[:at] + draw(BYTES) + content[at:])


@hypothesis.given(data=st.data())
@fuzz()
def test_any_checkpoint_is_gone_on_from_or_refused(data: Any) -> None:
    place = folder("checkpoint") / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(begun(), place)
    newest = _runs.checkpoints(place)[-1]
    forge(data.draw, newest)
    before = _runs.contents(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged one is left aside with a warning
        try:
            fit(_runs.method("bridge"), _runs.data(), _runs.config("bridge"), place, _runs.stop_at(10))
        except ValueError as error:
            sentence(error, newest)
            assert _runs.contents(place) == before
        except FloatingPointError:  # numbers that are none, after which a loss is none
            pass
        except _runs.Stopped:
            pass
