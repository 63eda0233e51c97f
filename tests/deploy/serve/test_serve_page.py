"""The page in a real browser: every way to give it an image, what it shows, and what it never asks for."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import _serving
from _saving import small
from _serving import pixels, png, send, serving, upload
from ensbridge.methods import BridgeConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page") / "model"
    small(BridgeConfig(), BridgeConfig()).save(place, image_shape=(3, 8, 8), class_names=_serving.NAMES)
    other = small(BridgeConfig())
    for weight in other.parameters():
        weight.data *= 1.1
    other.save(place.with_name("other"), image_shape=(3, 8, 8))
    return place


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    with serving(
        _serving.registry(folder, f"second={folder}", members=(str(folder.with_name("other")),))
    ) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=options)


@pytest.fixture
def page(browser: Browser, base: str) -> Iterator[Page]:
    """The page, which must ask nobody else for anything and log no error."""
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    page = context.new_page()
    hosts: set[str] = set()
    errors: list[str] = []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(base)
    yield page
    context.close()
    assert hosts <= {urlsplit(base).netloc, ""}  # blobs have no host
    assert errors == []


def bars(page: Page) -> dict[str, list[str]]:
    """What stands beside each class."""
    return {
        row.locator(".name").inner_text(): row.locator(".number").all_inner_texts()
        for row in page.locator("#bars .class").all()
    }


def percent(p: float) -> str:
    return "> 99.9 %" if p >= 0.9995 else "< 0.1 %" if p < 0.0005 else f"{100 * p:.1f} %"


def expected(base: str, content: bytes) -> tuple[str, dict[str, list[str]]]:
    (answer,) = upload(base, ("a.png", content), query="?ensemble=true").json()["predictions"]
    opinions = (answer["source"], answer, answer["ensemble"])
    tables = [{entry["label"]: entry["probability"] for entry in each["probabilities"]} for each in opinions]
    words = answer["label"] + answer["uncertainty"]["words"].replace(" %", "\xa0%")
    return words, {label: [percent(table[label]) for table in tables] for label in tables[1]}


def shown(page: Page) -> tuple[str, dict[str, list[str]]]:
    expect(page.locator("#path svg")).to_be_visible()
    return page.locator("#words").inner_text().replace("\n", ""), bars(page)


def test_an_example_a_file_and_a_pasted_image_are_shown_as_the_server_answers(base: str, page: Page) -> None:
    expect(page.locator("#examples button")).to_have_count(6)
    page.locator("#examples button").first.focus()
    page.keyboard.press("Enter")  # no mouse is needed
    assert shown(page) == expected(base, send(base, "GET", "/examples/ship.png").body)
    assert page.locator("#legend li").count() == 3
    assert page.locator("#path polyline").count() == 3

    content = png(pixels(1))
    page.set_input_files("#file", {"name": "mine.png", "mimeType": "image/png", "buffer": content})
    expect(page.locator("#preview")).to_have_attribute("alt", "The chosen image, mine.png")
    words, numbers = expected(base, content)
    page.wait_for_function("words => document.getElementById('words').textContent === words", arg=words)
    assert bars(page) == numbers

    pasted = png(pixels(2))
    words, numbers = expected(base, pasted)
    page.evaluate(
        """text => {
            const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
            const data = new DataTransfer();
            data.items.add(new File([bytes], "pasted.png", { type: "image/png" }));
            document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
        }""",
        base64.b64encode(pasted).decode(),
    )
    page.wait_for_function("words => document.getElementById('words').textContent === words", arg=words)
    assert bars(page) == numbers


def test_another_model_can_be_chosen_and_has_no_ensemble(base: str, page: Page) -> None:
    page.select_option("#model", "second")
    expect(page.locator("#title")).to_have_text("second")
    page.locator("#examples button").nth(1).click()
    expect(page.locator("#bars .class").first).to_be_visible()
    assert page.locator("#legend li").count() == 2
    expect(page.locator("#no-ensemble")).to_be_visible()


def test_it_fits_a_phone_and_follows_the_colour_scheme(browser: Browser, base: str) -> None:
    grounds = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page = context.new_page()
        page.goto(base)
        page.locator("#examples button").nth(2).click()
        expect(page.locator("#path svg")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        context.close()
    assert grounds["light"] != grounds["dark"]


def test_what_is_no_image_and_a_missing_token_are_said(browser: Browser, folder: Path) -> None:
    with serving(_serving.registry(folder), "secret") as base:
        page = browser.new_page()
        page.goto(base)
        expect(page.locator("#token-form")).to_be_visible()
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text("token")
        page.fill("#token", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#token-form")).to_be_hidden()
        expect(page.locator("#title")).to_have_text("model")
        page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"nothing"})
        expect(page.locator("#status")).to_contain_text("a.png")
        page.close()
