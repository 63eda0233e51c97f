"""Requests that schemathesis makes of the server's own description: no 5xx, and answers as it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.schemas import BaseSchema

import _saving
import _serving
from ensbridge.deploy.serve.app import create_app
from ensbridge.deploy.serve.limits import Limits
from ensbridge.methods import BridgeConfig
from faults.processes import in_parallel

UNSAID = "positive_data_acceptance"  # no schema can say that bytes must be an image
Row = dict[str, Any]


def described_requests(examples: int, number: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """A row of counts for every operation, each tried so often at most."""
    model = folder / "model"
    _saving.small(BridgeConfig()).save(model, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    (operations,) = in_parallel([partial(_operations, model)], folder / "list")  # a server has threads
    say(f"{len(operations)} operations, {examples} requests of each at most")
    halves = [operations[lane::2] for lane in range(2)]
    lanes = [partial(_lane, half, model, examples, number) for half in halves]
    return sorted(
        (row for rows in in_parallel(lanes, folder / "lanes") for row in rows),
        key=lambda row: row["operation"],
    )


def _operations(model: Path) -> list[tuple[str, str]]:
    results: list[Any] = list(_schema(model).get_all_operations())
    return [(result.ok().path, result.ok().method) for result in results]


def _schema(model: Path) -> BaseSchema:
    app = create_app(_serving.registry(model, limits=Limits(wait_ms=0)))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def _lane(operations: list[tuple[str, str]], model: Path, examples: int, number: int) -> list[Row]:
    load_all_checks()
    schema = _schema(model)
    return [_try_operation(schema, path, method, examples, number) for path, method in operations]


def _try_operation(schema: BaseSchema, path: str, method: str, examples: int, number: int) -> Row:
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    excluded: list[Any] = [CHECKS.get_one(UNSAID)]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list[Any](HealthCheck),
    )
    @seed(number)
    @given(case=schema[path][method].as_strategy())
    def check(case: schemathesis.Case) -> None:
        if "name" in case.path_parameters and len(case.path_parameters["name"]) % 2:
            case.path_parameters["name"] = "model"  # so that some come further
            if "version" in case.path_parameters:
                case.path_parameters["version"] = "1"
        response = case.call()
        statuses[response.status_code] += 1
        try:
            case.validate_response(response, excluded_checks=excluded)
        except BaseException as error:  # a group of failures is no Exception
            wrong.append(f"{case.as_curl_command()[:300]}: {str(error)[:300]}")

    check()
    answered = {
        f"{hundred}xx": sum(n for s, n in statuses.items() if s // 100 == hundred) for hundred in (2, 4, 5)
    }
    name = f"{method.upper()} {path}"
    return {"operation": name, "requests": statuses.total(), **answered, "not_as_described": wrong}
