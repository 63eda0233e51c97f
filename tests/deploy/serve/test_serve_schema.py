"""The OpenAPI description is right: requests made from it never fail the server, answers are as it says."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks

import _serving
from _saving import small
from ensbridge.deploy.serve.app import create_app
from ensbridge.deploy.serve.limits import Limits
from ensbridge.methods import BridgeConfig

load_all_checks()
# No schema can say that bytes must be an image, or that a list must be as long as a shape says.
UNSAID = ("positive_data_acceptance",)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> schemathesis.schemas.BaseSchema:
    folder = tmp_path_factory.mktemp("schema") / "model"
    small(BridgeConfig()).save(folder, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    app = create_app(_serving.registry(folder, limits=Limits(wait_ms=0)))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


OPERATIONS = (
    ("/v2", "GET"),
    ("/v2/health/live", "GET"),
    ("/v2/health/ready", "GET"),
    ("/v2/models/{name}", "GET"),
    ("/v2/models/{name}/ready", "GET"),
    ("/v2/models/{name}/infer", "POST"),
    ("/v2/models/{name}/versions/{version}", "GET"),
    ("/v2/models/{name}/versions/{version}/ready", "GET"),
    ("/v2/models/{name}/versions/{version}/infer", "POST"),
    ("/v2/repository/index", "POST"),
    ("/v2/repository/models/{name}/load", "POST"),
    ("/v1/predict", "POST"),
    ("/v1/model", "GET"),
    ("/healthz", "GET"),
    ("/metrics", "GET"),
)


def test_every_operation_is_tried(schema: schemathesis.schemas.BaseSchema) -> None:
    described = {(result.ok().path, result.ok().method.upper()) for result in schema.get_all_operations()}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_requests_made_from_the_description_are_answered_as_it_says(
    schema: schemathesis.schemas.BaseSchema, path: str, method: str
) -> None:
    excluded = [CHECKS.get_one(name) for name in UNSAID]
    operation = schema[path][method]

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        if "name" in case.path_parameters and len(case.path_parameters["name"]) % 2:
            case.path_parameters["name"] = "model"  # so that some come further
            if "version" in case.path_parameters:
                case.path_parameters["version"] = "1"
        response = case.call()
        assert response.status_code < 500
        case.validate_response(response, excluded_checks=excluded)

    check()
