"""The house's order: imports go down only, what needs no torch starts without it, names are explained."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import ensbridge

PACKAGE = Path(ensbridge.__file__).parent

# From the top down: a package imports itself and those below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("experiments", "report"),
    ("_compress", "deploy"),
    ("evaluation",),
    ("training",),
    ("methods",),
    ("models",),
    ("bridge", "data", "metrics"),
    ("utils", "_aliases"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
# What a model's own methods, `fidelity` and `save`, import when they are called, and for its types.
WHEN_CALLED = {("models", "deploy"), ("models", "evaluation"), ("models", "data")}
REPORT = ("ensbridge.report", "ensbridge.evaluation.scores", "ensbridge.utils")  # all that a report imports


class Import(NamedTuple):
    where: str  # "training/fit.py:12"
    package: str  # that imports
    module: str  # that is imported, "ensbridge.models.ensemble"

    @property
    def target(self) -> str:
        return self.module.split(".")[1]


def homes(package: Path) -> dict[str, str]:
    """The module of each public name that `from ensbridge import name` may bring."""
    tree = ast.parse((package / "__init__.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ensbridge."):
            found |= {f"ensbridge.{alias.name}": node.module for alias in node.names}
    return found


def imports(package: Path) -> Iterator[Import]:
    """Every import of the package by itself, inside functions too, but for those of its root."""
    public = homes(package)
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if relative == Path("__init__.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported_names(node):
                module = public.get(name, name)
                if not module.startswith("ensbridge.__"):  # __version__
                    yield Import(
                        f"{relative}:{getattr(node, 'lineno', 0)}",
                        relative.parts[0].removesuffix(".py"),
                        module,
                    )


def imported_names(node: ast.AST) -> Iterator[str]:
    """The dotted names under `ensbridge` that a node imports."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports hide where a name comes from"
        base = node.module or ""
        names = [f"ensbridge.{alias.name}" for alias in node.names] if base == "ensbridge" else [base]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        names = [
            arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return (name for name in names if name.startswith("ensbridge."))


def problems(package: Path) -> list[str]:
    """Imports that are against the order."""
    found = []
    for each in imports(package):
        if each.package == "report" and not each.module.startswith(REPORT):
            found.append(f"{each.where}: report imports {each.module}")
        if each.package == each.target or (each.package, each.target) in WHEN_CALLED:
            continue
        if LAYER[each.target] <= LAYER[each.package]:
            found.append(f"{each.where}: {each.package} imports {each.module}")
    return found


# ------------------------------------------------------------------------------ the order


def test_every_package_has_a_layer() -> None:
    entries = {entry.stem for entry in PACKAGE.iterdir() if entry.suffix == ".py" or any(entry.rglob("*.py"))}
    assert entries - {"__init__"} == set(LAYER)


def test_imports_go_down_only() -> None:
    assert problems(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "allowed"),
    [
        ("bridge/schedule.py", "from ensbridge.models import ResNet", False),
        ("methods/base.py", "from ensbridge import fit", False),
        ("methods/base.py", "def f():\n    from ensbridge.cli import main", False),
        ("methods/base.py", 'importlib.import_module("ensbridge.training")', False),
        ("metrics/cost.py", "from ensbridge.data.loader import ImageSet", False),
        ("report/page.py", "from ensbridge.evaluation.evaluate import evaluate", False),
        ("report/page.py", "from ensbridge.evaluation.scores import Scores", True),
        ("training/fit.py", "from ensbridge.models.fast_ensemble import FastEnsemble", True),
        ("cli/runs.py", "def f():\n    from ensbridge import experiments", True),
    ],
)
def test_an_import_against_the_order_is_seen(file: str, line: str, allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text((PACKAGE / "__init__.py").read_text())
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(line + "\n")
    assert (problems(tmp_path) == []) == allowed


# ------------------------------------------------------------------------------ what is loaded


def fresh(code: str) -> str:
    """What a new process prints."""
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_reports_and_the_command_line_start_without_torch() -> None:
    code = "import ensbridge, ensbridge.cli, ensbridge.report, ensbridge.evaluation.scores; "
    code += "print([name for name in ('torch', 'numpy', 'sklearn', 'scipy') if name in sys.modules])"
    assert fresh(code) == "[]"


def loaded_by(code: str, *packages: str) -> list[str]:
    """The modules of these packages that a new process has loaded after some code."""
    starts = tuple(f"ensbridge.{name}" for name in packages)
    return ast.literal_eval(
        fresh(f"{code}; print([name for name in sys.modules if name.startswith({starts})])")
    )


def test_loading_a_model_loads_neither_training_nor_experiments() -> None:
    code = "import ensbridge as eb; eb.load('zoo:cifar10')"
    assert loaded_by(code, "training", "experiments", "methods", "evaluation.evaluate", "data.") == []
    assert loaded_by(code, "models")  # which it must


def test_methods_and_their_models_load_neither_training_nor_files() -> None:
    assert loaded_by("import ensbridge.methods", "training", "deploy", "evaluation") == []


def test_loading_a_public_name_draws_no_random_number() -> None:
    code = "import random, ensbridge as eb; before = random.getstate(); "
    code += "[getattr(eb, name) for name in dir(eb)]; print(random.getstate() == before)"
    assert fresh(code) == "True"


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    code = "import ensbridge, ensbridge.experiments, ensbridge.training.fit, ensbridge.evaluation.evaluate; "
    code += (
        "print(*(type(getattr(ensbridge, name)).__name__ for name in ('evaluate', 'fit', 'distill_steps')))"
    )
    assert fresh(code) == "function function function"


# ------------------------------------------------------------------------------ public names


def public_names() -> list[str]:
    """What the root of the package offers to a type checker, which is also what it must load."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checking = [node for node in tree.body if isinstance(node, ast.If)]
    imported = [
        alias.name for block in checking for each in block.body for alias in getattr(each, "names", [])
    ]
    return [*imported, "nets"]


def test_the_root_offers_what_its_types_promise() -> None:
    assert set(dir(ensbridge)) - {"__version__"} == set(public_names())
    assert {"fit", "evaluate", "Ensemble", "FastEnsemble", "methods"} <= set(public_names())
    for name in public_names():
        value = getattr(ensbridge, name)
        own = value.__name__ if isinstance(value, ModuleType) else value.__module__
        known = {"nets": "ensbridge.models", "cost": "ensbridge.metrics.cost"} | homes(PACKAGE)
        assert own.startswith(known.get(f"ensbridge.{name}", known.get(name, f"ensbridge.{name}"))), name


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'fitt'"):
        _ = ensbridge.fitt  # type: ignore[attr-defined]


def explained() -> Iterator[tuple[str, object]]:
    """The functions and classes that must show how they are used."""
    for name in public_names():
        if not isinstance(value := getattr(ensbridge, name), ModuleType):
            yield name, value
    for module in ("metrics", "cost"):
        home = getattr(ensbridge, module)
        for name, value in vars(home).items():
            public = inspect.isfunction(value) or inspect.isclass(value)
            if public and not name.startswith("_") and value.__module__.startswith(home.__name__):
                yield f"{module}.{name}", value
    for place in ("nets.ResNet", "nets.ScoreNet", "methods.DiffusionBridge", "methods.DeepEnsemble"):
        module, name = place.split(".")
        yield place, getattr(getattr(ensbridge, module), name)


def test_the_public_names_are_found() -> None:
    names = dict(explained())
    assert {"fit", "evaluate", "metrics.nll", "metrics.MetricStream", "cost.count_macs", "nets.ResNet"} <= {
        *names
    }


@pytest.mark.parametrize(("name", "value"), [pytest.param(*each, id=each[0]) for each in explained()])
def test_a_public_name_has_a_sentence_and_an_example(name: str, value: object) -> None:
    text = inspect.getdoc(value) or ""
    first = text.split("\n\n")[0]
    assert first.endswith((".", ":", "…")), f"{name} does not begin with a sentence: {first!r}"
    assert ">>> " in text, f"{name} has no example in its docstring"
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} inherits its docstring"
