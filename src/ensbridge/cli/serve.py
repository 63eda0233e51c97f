"""Saved models behind HTTP: serve."""

from __future__ import annotations

import os
from typing import Annotated

from ensbridge.cli.base import app, tell
from ensbridge.cli.options import Allow, Device, ImageShape, allowed, argument, numbers, option
from ensbridge.utils.extras import need


@app.command()
def serve(
    models: Annotated[
        list[str],
        argument(
            "MODEL…",
            "Models, each a folder that FastEnsemble.save wrote, zoo:cifar10 or hf:user/name; "
            "name=MODEL serves it under that name, by default the folder's.",
        ),
    ],
    host: Annotated[str, option("ADDRESS", "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, option("NUMBER", "Port to listen on; 0 for any free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None,
        option(
            "TOKEN",
            "Bearer token that every request must send. Better set the variable: other users of the "
            "machine can see the command line.",
            envvar="ENSBRIDGE_TOKEN",
            show_envvar=True,
        ),
    ] = None,
    backend: Annotated[str, option("NAME", "eager, compiled, cuda-graph or onnxruntime.")] = "eager",
    device: Device = "cpu",
    threads: Annotated[
        int | None, option("COUNT", "Threads per model; by default all cores but one.", min=1)
    ] = None,
    members: Annotated[
        list[str] | None,
        option(
            "[NAME=]MEMBER",
            "A member of the real ensemble, to show beside the model: timm:NAME@FILE and the like, as "
            "for compress, a file of weights for the source's architecture, or a saved model, of which the "
            "source is taken. May be repeated.",
        ),
    ] = None,
    batch: Annotated[int, option("N", "Most images per batch.", "--batch-size", "--batch")] = 16,
    wait_ms: Annotated[
        float, option("MS", "Longest time a request waits for others to share its batch.")
    ] = 2.0,
    queue: Annotated[
        int, option("N", "Most images waiting; more are refused with a 429.", "--queue-size", "--queue")
    ] = 512,
    seconds: Annotated[
        float, option("SECONDS", "Longest time for one request, below 9.", "--timeout", "--seconds")
    ] = 8.0,
    image_shape: ImageShape = None,
    mean: Annotated[str | None, option("NUMBERS", "Normalisation of image files, as for predict.")] = None,
    std: Annotated[str | None, option("NUMBERS", "The same.")] = None,
    allow: Allow = None,
) -> None:
    """Serve models over HTTP.

    It speaks the Open Inference Protocol v2 of Triton and KServe clients, and has POST /v1/predict for image
    files, /metrics for Prometheus and a page at /. Requests that arrive within milliseconds share a batch.
    SIGHUP reloads all models; SIGTERM finishes what was accepted and exits within 10 seconds.

    Example: ensbridge serve zoo:cifar10 --port 8000
    """
    need("serve")
    import torch

    from ensbridge.deploy.export import parse_shape
    from ensbridge.deploy.serve.backends import check_backend
    from ensbridge.deploy.serve.limits import Limits
    from ensbridge.deploy.serve.run import address, bind
    from ensbridge.deploy.serve.run import serve as run
    from ensbridge.deploy.serve.served import Registry, Settings, parse_specs
    from ensbridge.utils.devices import find_device

    if token is None:
        token = os.environ.get("ENSBRIDGE_TOKEN")  # set but empty, which the option takes for not set
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ValueError(
            "the token (--token or ENSBRIDGE_TOKEN) is empty or has characters that a header cannot hold; "
            "give letters and digits, or unset it to serve without"
        )
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() - 1)  # one core is left for the requests themselves
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = find_device(device)
    check_backend(backend, chosen)
    settings = Settings(
        backend=backend,  # type: ignore[arg-type]
        device=chosen,
        limits=Limits(batch=batch, wait_ms=wait_ms, queue=queue, seconds=seconds),
        image_shape=None if image_shape is None else parse_shape(image_shape),
        mean=numbers("mean", mean),
        std=numbers("std", std),
        allow=allowed(allow),
    )
    specs = parse_specs(models, members or ())
    taken = bind(host, port)
    registry = Registry(specs, settings)
    if token is None and not taken.getsockname()[0].startswith(("127.", "::1")):
        tell("anyone who reaches this address can use it; set ENSBRIDGE_TOKEN to ask for a token")
    line = f"serving {', '.join(registry.models)} on {address(taken)} (backend {backend})"
    run(registry, taken, token, ready=lambda: print(line, flush=True))
