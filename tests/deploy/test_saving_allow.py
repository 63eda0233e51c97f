"""What `allow` lets a saved model build: exact paths as they are named, packages for their classes alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import _tiny
import ensbridge as eb
from _saving import assert_same, bridge, change, foreign, put
from ensbridge.cli.options import allowed
from ensbridge.deploy.saving import architecture
from ensbridge.models.fast_ensemble import FastEnsemble

# ------------------------------------------------------------------------------ recipes of the user's own

PACKAGE = """
import subprocess
from os import system
from torch import fx, jit, load, nn
from torch.nn import Linear
import _tiny
from ensbridge import load as load_model
from ensbridge.models.stored_network import StoredNetwork

touched = []

def make_net(seed: int, classes=3) -> nn.Module:
    return _tiny.batch_norm_member(seed, classes)

def unmarked(seed):
    return _tiny.batch_norm_member(seed)

def wipe(path="/"):
    touched.append(path)

def nothing(seed) -> nn.Module:
    return seed

def measuring(seed) -> nn.Module:
    return nn.Linear(2, int(nn.Linear(1, 1).weight.abs() + 1))

class Net(nn.Sequential):
    def __init__(self, seed: int) -> None:
        super().__init__(*_tiny.batch_norm_member(seed))
    class Inner(nn.Linear):
        pass

class _Private(nn.Linear):
    pass

class Graph(fx.GraphModule):
    def __new__(cls, path):
        touched.append(path)

class Script(jit.ScriptModule):
    def __init__(self, path):
        touched.append(path)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with networks in a module, and with what is none."""
    name = f"theirs_{tmp_path.name}".replace("-", "_")
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("")
    (tmp_path / "site" / name / "models.py").write_text(PACKAGE)
    (tmp_path / "site" / name / "__main__.py").write_text("raise SystemExit('the program ran')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return name


def test_a_function_is_called_where_its_exact_path_is_allowed(package: str, tmp_path: Path) -> None:
    fast, place = foreign(4), tmp_path / "model"
    build = f"{package}.models:make_net"
    fast.save(place, build=build, arguments={"seed": 1})
    assert f'allow=["{build}"]' in (place / "README.md").read_text()
    assert_same(eb.load(place, allow=[build]), fast)
    assert_same(eb.load(place, allow=build), fast)
    assert_same(eb.load(place, source=_tiny.batch_norm_member()), fast)  # needs no leave: nothing is imported
    for broader in (package, f"{package}.models"):
        with pytest.raises(ValueError, match=rf"function.* allow=\['{build}'\]"):
            eb.load(place, allow=[broader])


@pytest.mark.parametrize("allow", ["{}", "{}.models", "{}.models:Net"])
def test_a_class_is_built_where_its_package_or_path_is_allowed(
    allow: str, package: str, tmp_path: Path
) -> None:
    net = _tiny.batch_norm_member(2)
    place = tmp_path / "model"
    kind = importlib.import_module(f"{package}.models").Net
    fast = FastEnsemble(kind(2), [bridge()], "0").eval()
    fast.save(place, build=f"{package}.models:Net", arguments={"seed": 2})
    assert_same(eb.load(place, allow=[allow.format(package)]), fast)
    assert _tiny.same(net.state_dict(), fast.source.state_dict())


@pytest.mark.parametrize(
    "allow", [(), ["theirs"], ["torch", "ensbridge", ""], ["heirs"], ["."], [":make_net"]]
)
def test_nothing_is_imported_without_leave(
    allow: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    foreign().save(place, build=f"{package}.models:make_net", arguments={"seed": 1})
    monkeypatch.setattr(architecture, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    with pytest.raises(ValueError, match=r"config\.json: source .*make_net.*not allowed"):
        eb.load(place, allow=allow)


FUNCTION = "is a function"


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("models:system", {"command": "true"}, "no network and no function"),
        ("models:subprocess", {}, "no network and no function"),
        ("models:touched", {}, "no network and no function"),
        ("models:load", {"f": "x.pkl"}, FUNCTION),
        ("models:wipe", {}, FUNCTION),
        ("models:make_net", {"seed": 1}, FUNCTION),
        ("models:unmarked", {"seed": 1}, FUNCTION),
        ("models:load_model", {"folder": "x", "allow": ["os"]}, "no part of ensbridge"),
        ("models:StoredNetwork", {"path": "x", "build": 1}, "no part of ensbridge"),
        ("models:Linear", {"in_features": 1, "out_features": 1}, "not of an allowed package"),
        ("models:Graph", {"path": "x"}, "may run code"),
        ("models:Script", {"path": "x"}, "may run code"),
        ("models:_Private", {"in_features": 1, "out_features": 1}, "private"),
        ("__main__:Net", {}, "private"),
        ("models:absent", {}, "cannot be imported"),
        ("absent:net", {}, "cannot be imported"),
        ("models:Net", {"seeds": 1}, "unexpected keyword argument"),
        ("models:Net", {"seed": "one"}, "cannot be built"),
        ("models:Net.Inner", {}, "expected such as"),
        ("models:Net:Inner", {}, "expected such as"),
        ("models", {}, "expected such as"),
        ("models:", {}, "expected such as"),
        ("models/../models:make_net", {"seed": 1}, "expected such as"),
        (".models:make_net", {"seed": 1}, "expected such as"),
        ("models:make_net\n", {"seed": 1}, "expected one line of text"),
        ("mödels:make_net", {"seed": 1}, "expected such as"),
    ],
)
def test_an_allowed_package_does_not_open_everything_in_it(
    name: str, arguments: dict[str, Any], named: str, package: str, tmp_path: Path
) -> None:
    place = tmp_path / "model"
    foreign().save(place, build=f"{package}.models:make_net", arguments={"seed": 1})
    change(place, lambda config: config["source"].update(build=f"{package}.{name}", arguments=arguments))
    with pytest.raises(ValueError, match=named) as caught:
        eb.load(place, allow=[package])
    assert "\n" not in str(caught.value)
    assert importlib.import_module(f"{package}.models").touched == []


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("nothing", {"seed": 1}, "a int where"),
        ("make_net", {"seeds": 1}, "unexpected keyword argument"),
        ("make_net", {"seed": "one"}, "cannot be built"),
        ("make_net", {"seed": 1, "classes": 10**13}, "shape"),
        ("make_net", {"seed": 1, "classes": 7}, r"\(3, 8\).*\(7, 8\)"),
    ],
)
def test_an_allowed_function_must_make_the_saved_network(
    name: str, arguments: dict[str, Any], named: str, package: str, tmp_path: Path
) -> None:
    place, build = tmp_path / "model", f"{package}.models:{name}"
    foreign().save(place, build=f"{package}.models:make_net", arguments={"seed": 1})
    change(place, lambda config: config["source"].update(build=build, arguments=arguments))
    with pytest.raises(ValueError, match=named):
        eb.load(place, allow=[build])


# ------------------------------------------------------------------------------ torch and ensbridge


def asking(place: Path, build: str, arguments: dict[str, Any]) -> Path:
    """A saved model whose description asks for something else as its source."""
    foreign().save(place, build="_tiny:batch_norm_member")
    change(place, lambda config: config["source"].update(build=build, arguments=arguments))
    return place


def test_code_in_the_arguments_of_a_torch_function_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code = {
        "import_block": f"import os; os.mkdir({str(mark)!r})\n",
        "body": {"_code": "def forward(self): 1"},
    }
    place = asking(tmp_path / "model", "torch.fx.graph_module:reduce_graph_module", code)
    with pytest.raises(ValueError, match="reduce_graph_module"):
        eb.load(place, allow=["torch"])
    assert not mark.exists()


@pytest.mark.parametrize(
    "build",
    [
        "torch.fx:GraphModule",
        "torch.fx.graph_module:_CodeOnlyModule",
        "torch.jit:ScriptModule",
        "torch.jit:load",
        "torch.hub:load",
        "torch:load",
        "torch.export.unflatten:InterpreterModule",
        "torch.distributed.nn.api.remote_module:RemoteModule",
        "torch.ao.quantization.stubs:QuantWrapper",
        "torch.nn.parallel:DataParallel",
        "torch.optim.swa_utils:AveragedModel",
        "torch.testing._internal.common_nn:nn",
    ],
)
@pytest.mark.parametrize("allow", ["torch", "{}", "nothing else"])
def test_of_torch_a_package_allows_plain_layers_alone(build: str, allow: str, tmp_path: Path) -> None:
    place = asking(tmp_path, build, {})
    with pytest.raises(ValueError, match=f"{build}, .*allow="):
        eb.load(place, allow=[allow.format(build.partition(":")[0])])


@pytest.mark.parametrize("build", ["torch.nn:Linear", "torch.nn.modules.linear:Linear"])
def test_a_layer_of_torch_is_allowed_with_it(build: str) -> None:
    plan = architecture.Architecture("Linear", build, {"in_features": 4, "out_features": 3})
    assert isinstance(plan.builder(["torch"], "the source")(), nn.Linear)


@pytest.mark.parametrize("more", [{"device": "cpu"}, {"bias": [{"deep": {"device": "cuda"}}]}])
def test_a_file_does_not_say_where_memory_is_taken(more: dict[str, Any], tmp_path: Path) -> None:
    # Built without memory at first, a layer whose device is given would take some all the same.
    place = asking(tmp_path, "torch.nn:Linear", {"in_features": 4, "out_features": 3, **more})
    for allow in ("torch", "torch.nn:Linear"):
        with pytest.raises(ValueError, match="arguments name a device"):
            eb.load(place, allow=[allow])


@pytest.mark.parametrize("allow", [["ensbridge"], ["ensbridge.deploy.saving.folder:load", "ensbridge:load"]])
@pytest.mark.parametrize("build", ["ensbridge.deploy.saving.folder:load", "ensbridge:load"])
def test_a_model_cannot_load_another_with_permissions_of_its_own(
    build: str, allow: list[str], package: str, tmp_path: Path
) -> None:
    inner = asking(tmp_path / "inner", f"{package}.models:wipe", {"path": "inner"})
    outer = asking(
        tmp_path / "outer", build, {"folder": str(inner), "allow": [package, f"{package}.models:wipe"]}
    )
    with pytest.raises(ValueError, match="no part of ensbridge"):
        eb.load(outer, allow=allow)
    assert importlib.import_module(f"{package}.models").touched == []


@pytest.mark.parametrize("name", ["load_model", "StoredNetwork"])
def test_nor_by_another_name_for_the_same(name: str, package: str, tmp_path: Path) -> None:
    build = f"{package}.models:{name}"
    place = asking(tmp_path / "model", build, {"folder": "x"})
    with pytest.raises(ValueError, match="no part of ensbridge"):
        eb.load(place, allow=[build])


# ------------------------------------------------------------------------------ limits of what is allowed


def test_what_is_allowed_is_the_source_alone(package: str, tmp_path: Path) -> None:
    place = tmp_path / "model"
    foreign().save(place, build=f"{package}.models:make_net", arguments={"seed": 1})
    recipe = {"name": "Net", "build": f"{package}.models:make_net", "arguments": {"seed": 1}}
    change(place, put("bridges.0.network", recipe))
    with pytest.raises(ValueError, match=r"bridges\[0\]\.network.*not allowed"):
        eb.load(place, allow=[package, recipe["build"]])


def test_a_recipe_is_tried_before_anything_is_written(package: str, tmp_path: Path) -> None:
    fast, place = foreign(), tmp_path / "model"
    recipe = f"{package}.models:make_net"
    for build, arguments, named in (
        (recipe, {"seed": 1, "classes": 4}, "does not make the source"),
        (recipe, {"seed": torch.ones(1)}, "JSON"),
        (recipe, {"seed": float("nan")}, "JSON"),
        (f"{package}.models:measuring", {"seed": 1}, "cannot be built"),
        (f"{package}.models", {}, "package.module:name"),
        ("__main__:make_net", {}, "no other program can import"),
        (nn.Linear, {}, "import path"),
        (None, {"seed": 1}, "arguments.*without build"),
    ):
        with pytest.raises(ValueError, match=named):
            fast.save(place, build=build, arguments=arguments)
    assert not place.exists()
    fast.save(place, build=f"{package}.models:unmarked", arguments={"seed": 1})
    assert_same(eb.load(place, allow=[f"{package}.models:unmarked"]), fast)


def test_a_file_in_the_working_folder_takes_no_installed_packages_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("site", "here"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "doubled_nets.py").write_text(f"WHERE = {place!r}")
    (tmp_path / "here" / "single_nets.py").write_text("WHERE = 'here'")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each] + [str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path / "here")
    assert allowed(None) == []
    assert "" not in sys.path
    assert allowed(["doubled_nets"]) == ["doubled_nets"]
    importlib.invalidate_caches()
    for name, place in (("doubled_nets", "site"), ("single_nets", "here")):
        assert place == importlib.import_module(name).WHERE
        del sys.modules[name]
