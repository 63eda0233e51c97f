"""From matplotlib's SVG to one that a page can hold: its colours, its ids, its text alternative."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from ensbridge.report.style import FRAME, PAPER, variables

_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_LONG = re.compile(r"-?\d+\.\d{3,}")
_INSIDE = re.compile(r"url\(#([^)]+)\)")


@dataclass(frozen=True)
class AltText:
    """What a drawing says to a reader who does not see it, and on hovering over a mark."""

    title: str
    description: str
    hover: dict[str, str]  # by the mark's id


def for_page(svg: str, name: str, words: AltText) -> str:
    """Return the drawing for the page: colours as its variables, ids that begin with `name`, no size."""
    names = {colour: f"var(--{variable})" for variable, colour in variables(dark=False).items()}
    root = _clean(svg, name, words, names, font=None)
    del root.attrib["width"], root.attrib["height"]
    root.set("class", "figure")
    return _text(root)


def for_file(svg: str, name: str, words: AltText) -> str:
    """Return the drawing as a file of its own, in the light colours."""
    root = _clean(svg, name, words, {}, font=_FONTS)
    width, height = (float(size) + 2 * FRAME for size in root.attrib["viewBox"].split()[2:])
    root.set("viewBox", f"{-FRAME} {-FRAME} {width:g} {height:g}")
    root.attrib |= {"width": f"{width:g}", "height": f"{height:g}", "style": f"background: {PAPER}"}
    return '<?xml version="1.0" encoding="utf-8"?>\n' + _text(root) + "\n"


def _clean(svg: str, name: str, words: AltText, colours: dict[str, str], font: str | None) -> Element:
    root = ElementTree.fromstring(svg)  # drops comments and the document type
    for child in [node for node in root if node.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}defs")]:
        # A style for "*" would reach the whole page; the page says the same for figures alone.
        if child.tag.endswith("metadata") or child.find(f"{{{_SVG}}}style") is not None:
            root.remove(child)
    for node in root.iter():
        hover = words.hover.get(node.attrib.get("id", ""))
        for key, value in list(node.attrib.items()):
            if key == "id":
                node.set(key, f"{name}-{value}")
            elif key == _HREF:
                del node.attrib[key]
                node.set("href", f"#{name}-{value[1:]}" if value.startswith("#") else value)
            else:
                value = _INSIDE.sub(rf"url(#{name}-\1)", value)
                value = _LONG.sub(lambda number: f"{float(number[0]):.2f}", value)
                node.set(key, _style(value, colours, font) if key == "style" else value)
        if hover is not None:
            node.insert(0, _element("title", hover))
    root.attrib.pop("version", None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    root.insert(0, _element("desc", words.description, f"{name}-desc"))
    root.insert(0, _element("title", words.title, f"{name}-title"))
    return root


def _style(style: str, colours: dict[str, str], font: str | None) -> str:
    """Rewrite a style: colours by `colours`, the font by `font` or, without one, left to the page."""
    kept = []
    for part in style.split(";"):
        key, _, value = (text.strip() for text in part.partition(":"))
        if key == "font-family":
            if font is not None:
                kept.append(f"font-family: {font}")
        elif key == "font":  # the shorthand: "600 13px 'DejaVu Sans', …"
            font_match = re.search(r"(?:(\w+) )?([\d.]+px)", value)
            assert font_match is not None, value
            kept.append(f"font-size: {font_match[2]}")
            kept += [f"font-weight: {font_match[1]}"] if font_match[1] else []
            kept += [f"font-family: {font}"] if font is not None else []
        elif key:
            kept.append(f"{key}: {colours.get(value, value)}")
    return "; ".join(kept)


def _element(tag: str, text: str, identifier: str | None = None) -> Element:
    node = Element(f"{{{_SVG}}}{tag}", {"id": identifier} if identifier else {})
    node.text = text
    return node


def _text(root: Element) -> str:
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")
