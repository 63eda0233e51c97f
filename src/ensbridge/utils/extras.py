"""What `pip install 'ensbridge[…]'` adds: checked before any work that needs it. No torch here."""

from __future__ import annotations

import sys
from importlib.util import find_spec

# The packages of each extra, as they are imported.
EXTRAS: dict[str, tuple[str, ...]] = {
    "digits": ("sklearn",),
    "report": ("jinja2", "matplotlib"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "corruptions": ("scipy",),
    "timm": ("timm",),
    "torchvision": ("torchvision",),
    "transformers": ("transformers",),
    "datasets": ("datasets",),
    "parquet": ("pyarrow",),
    "hub": ("huggingface_hub",),
    "ray": ("ray",),
    "serve": ("fastapi", "uvicorn", "prometheus_client", "python_multipart"),
}
DISTRIBUTIONS = {  # whose name is not that of the import
    "sklearn": "scikit-learn",
    "PIL": "Pillow",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
}


def missing(*extras: str) -> str:
    """What of the extras is not installed and how to install it, in words; nothing where all is there.

    >>> missing(), missing("report")
    ('', '')
    """
    lacking = [extra for extra in extras if not all(map(is_installed, EXTRAS[extra]))]
    packages = dict.fromkeys(name for extra in lacking for name in EXTRAS[extra] if not is_installed(name))
    if not lacking:
        return ""
    names = ", ".join(DISTRIBUTIONS.get(name, name) for name in packages)
    return f"{names} {'is' if len(packages) == 1 else 'are'} not installed; {remedy(*lacking)}"


def need(*extras: str) -> None:
    """ValueError that names what of the extras is not installed, and the command that installs it."""
    if sentence := missing(*extras):
        raise ValueError(sentence)


def remedy(*extras: str) -> str:
    """The command that installs extras, or without any the package itself.

    >>> print(remedy("digits", "report"), "or", remedy())
    pip install 'ensbridge[digits,report]' or pip install ensbridge
    """
    return f"pip install 'ensbridge[{','.join(extras)}]'" if extras else "pip install ensbridge"


def extras_of(package: str) -> list[str]:
    """The extras that bring a package, by the name of its import.

    >>> extras_of("matplotlib.pyplot"), extras_of("torch")
    (['report'], [])
    """
    return [extra for extra, names in EXTRAS.items() if package.split(".")[0] in names]


def is_installed(name: str) -> bool:
    """Whether a package can be imported; one that was put out of use (None in sys.modules) cannot."""
    return sys.modules.get(name, name) is not None and find_spec(name) is not None
