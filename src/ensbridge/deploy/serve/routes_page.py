"""The page at `/`, its style, script and example images; nothing of it comes from elsewhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal, get_args

from fastapi import APIRouter, Response

router = APIRouter(include_in_schema=False)
Example = Literal["ship", "aeroplane", "car", "frog", "blend", "noise"]
TYPES = {"page.css": "text/css", "page.js": "text/javascript"}
_CACHE = {"Cache-Control": "no-cache"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def _content(name: str) -> bytes:
    return files("ensbridge.deploy.serve").joinpath(f"page/{name}").read_bytes()


@router.get("/")
async def page() -> Response:
    """The page."""
    return Response(
        _content("index.html"), media_type="text/html", headers={**_CACHE, "Content-Security-Policy": _POLICY}
    )


@router.get("/page/{name}")
async def asset(name: Literal["page.css", "page.js"]) -> Response:
    """What the page is made of."""
    return Response(_content(name), media_type=TYPES[name], headers=_CACHE)


@router.get("/examples/")
async def examples() -> list[str]:
    """The names of the example images."""
    return list(get_args(Example))


@router.get("/examples/{name}.png")
async def example(name: Example) -> Response:
    """An example image."""
    return Response(_content(f"example-{name}.png"), media_type="image/png", headers=_CACHE)
