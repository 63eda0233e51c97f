"""The application: routes, refusals in one sentence, and the OpenAPI description."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ensbridge import __version__
from ensbridge.deploy.serve import routes_page, routes_v1, routes_v2
from ensbridge.deploy.serve.guard import OPEN, OPEN_FOLDERS, Guard
from ensbridge.deploy.serve.limits import Refused
from ensbridge.deploy.serve.metrics import Metrics
from ensbridge.deploy.serve.protocol import InferRequest
from ensbridge.deploy.serve.served import Registry
from ensbridge.utils.progress import say
from ensbridge.utils.text import one_line, visible

DECODERS = 2  # threads: so many large images are in memory at once


def create_app(models: Registry, token: str | None = None) -> Guard:
    """The ASGI application that serves models; with a token only to those who send it."""
    metrics = Metrics()
    models.observe, models.reloaded = metrics.batch, metrics.reloaded
    for name in models.models:
        metrics.queues.labels(name).set_function(lambda name=name: models.models[name].waiting)
    tasks: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that no client can cancel; a task that nobody holds may be collected."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def reload(name: str) -> None:
        """Load a model again; a client that does not wait for it does not stop it."""
        await asyncio.shield(start(models.reload(name)))

    async def reload_all() -> None:
        for name in list(models.models):
            try:
                await reload(name)
                say(f"{name} was loaded again")
            except Exception as error:
                say(f"{name} was not loaded again, the old one stays: {one_line(error)}")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Tensors and answers have a thread of their own, so that they do not wait for large images.
        decoders, converter = ThreadPoolExecutor(DECODERS, "decode"), ThreadPoolExecutor(1, "convert")
        loop = asyncio.get_running_loop()
        app.state.decode = partial(loop.run_in_executor, decoders)
        app.state.convert = partial(loop.run_in_executor, converter)
        if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGHUP, lambda: start(reload_all()))
        yield
        await models.drain()
        for threads in (decoders, converter):
            threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="ensbridge",
        version=__version__,
        description="Models that stand for a deep ensemble, at about the cost of one network.",
        docs_url=None,  # they would load from outside
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.registry, app.state.metrics, app.state.has_token = models, metrics, token is not None
    app.state.reload = reload
    for router in (routes_v2.router, routes_v1.router, routes_page.router):
        app.include_router(router)
    _answer_errors(app)
    app.openapi = lambda: _describe(app, token is not None)  # type: ignore[method-assign]
    return Guard(app, models.limits, metrics, token)


def _answer_errors(app: FastAPI) -> None:
    """Every refusal is JSON with one sentence; none shows a trace."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"error": error.sentence}, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return JSONResponse({"error": visible(f"{where}: {first['msg']}")[:300]}, 422)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        sentence = str(error.detail)
        if error.status_code == 404:
            sentence = "there is no such page; /openapi.json lists what there is"
        elif error.status_code == 405:
            sentence = f"{request.method} cannot be used here"
        return JSONResponse({"error": visible(sentence)[:300]}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed on this request; its log says why"}, 500)


def _describe(app: FastAPI, has_token: bool) -> dict[str, Any]:
    """The OpenAPI description, with what FastAPI cannot know."""
    if app.openapi_schema is None:
        schema = FastAPI.openapi(app)
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        # What the handler reads by itself.
        inference = InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(inference.pop("$defs"))
        components["InferRequest"] = inference
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                if has_token and path not in OPEN and not path.startswith(OPEN_FOLDERS):
                    operation["security"] = [{"bearer": []}]
        if has_token:
            schema["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema
