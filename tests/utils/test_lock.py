"""The lock names every development dependency in one version, each file by its hash."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def locked() -> dict[str, tuple[Requirement, int]]:
    """Each requirement of the lock by its name, with the number of its hashes."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        requirement = Requirement(line.partition(" --hash=")[0])
        found[canonicalize_name(requirement.name)] = (
            requirement,
            len(re.findall(r"--hash=sha256:\w{64}\b", line)),
        )
    return found


def declared() -> list[Requirement]:
    """What pyproject.toml asks for in development, extras of its own followed."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = {
        name: re.findall(r'"([^"]+)"', items)
        for name, items in re.findall(r"^(\w+) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    }
    wanted, found = [*extras["dependencies"], *extras["dev"]], []
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name == "ensbridge":
            wanted += [each for extra in requirement.extras for each in extras[extra]]
        else:
            found.append(requirement)
    return found


def test_every_version_is_exact_and_has_hashes() -> None:
    for requirement, hashes in locked().values():
        assert [clause.operator for clause in requirement.specifier] == ["=="], requirement
        assert hashes > 0, requirement


def test_every_development_dependency_is_locked_in_a_version_that_it_allows() -> None:
    known = {name: requirement for name, (requirement, _) in locked().items()}
    torch = Requirement((ROOT / "requirements-torch.txt").read_text().splitlines()[-1])
    assert "torch" not in known
    known["torch"] = torch
    wanted = declared()
    assert {"torch", "pytest", "pillow"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        (exact,) = known[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(exact.version), requirement
