"""Models on the Hugging Face hub: the same three files as in a folder, with the same checks.

From the hub come files, never code: what is downloaded is loaded as any stranger's folder is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ensbridge.deploy.saving.description import LARGEST_CONFIG, is_ours, read_description
from ensbridge.deploy.saving.folder import CARD, CARD_FOLDER, CONFIG, HUB, WEIGHTS, save
from ensbridge.deploy.saving.weights import LARGEST_WEIGHTS, digest
from ensbridge.models.fast_ensemble import FastEnsemble
from ensbridge.utils.files import read_json
from ensbridge.utils.text import one_line

# The hub's own rule, so that a wrong name is refused before anything is sent.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.))(?!.*\.git$)(?=.{{1,96}}$){_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,199}", re.ASCII)
_LOG_IN = "log in with `hf auth login`, or pass token="
# Bytes of the files that make a model; no others are ever downloaded.
LIMITS = {CONFIG: LARGEST_CONFIG, CARD: LARGEST_CONFIG, WEIGHTS: LARGEST_WEIGHTS}


def push(
    model: FastEnsemble | Path | str, name: str, *, private: bool = True, token: str | None = None
) -> str:
    """Put a saved model on the Hugging Face hub as `name`, such as "user/digits", and return its address.

    `model` is a folder that `FastEnsemble.save` wrote, or a model, which is then saved without options. The
    three files arrive together in one commit, or not at all. A repository that is not there yet is made, for
    your own eyes unless `private=False`; one that holds another kind of model is left alone. The address
    names the commit: `ensbridge.load` loads exactly this version from it, and the newest without the `@…`.

    >>> push("model", "digits")
    Traceback (most recent call last):
    ValueError: 'digits' is no name on the hub; give one such as 'user/name', of letters, digits, '-', '_'
    """
    _check_name(name)
    if isinstance(model, FastEnsemble):
        with TemporaryDirectory() as folder:
            save(model, folder)
            return push(folder, name, private=private, token=token)
    files = _whole_model(Path(model), name)
    hub = _library()
    api = hub.HfApi(token=token, **_who())
    with _in_words(name, "write to"):
        api.create_repo(name, private=private, exist_ok=True)
        others = _holds_another_model(api, name)
    if others:
        raise ValueError(f"{name} on the hub holds a model that is not ensbridge's; choose another name")
    additions = [hub.CommitOperationAdd(path, content) for path, content in files.items()]
    with _in_words(name, "write to"):
        done = api.create_commit(name, additions, commit_message="A fast ensemble, saved by ensbridge")
    return f"{HUB}{name}@{done.oid}"


def fetch(address: str) -> Path:
    """Bring the model at "hf:user/name", or "hf:user/name@version", into the hub's cache; its folder there.

    A version is a branch, a tag or a commit, the main branch unless given. What is in the cache already is
    not downloaded again, and is there without a connection too.
    """
    name, version = _parse(address)
    api = _library().HfApi(**_who())
    try:
        with _in_words(name, "read", version):
            commit, sizes = _listed(api, name, version)
    except ValueError:
        with suppress(ValueError):  # what is not in the cache either is not there for the first reason
            return _download(name, version, LIMITS, local_files_only=True)
        raise
    _check_sizes(name, sizes)
    # Its description first: another kind of model may have gigabytes of weights.
    path = _download(name, version, [CONFIG])
    if not (path / CONFIG).is_file():
        raise ValueError(f"{name} on the hub holds no {CONFIG}; give a repository that ensbridge.push wrote")
    read_description(path / CONFIG)
    # The folder has the commit's name: the rest is of the same version, whatever is pushed meanwhile.
    if path.name != commit:
        with _in_words(name, "read", version):
            sizes = _listed(api, name, path.name)[1]
        _check_sizes(name, sizes)
    return _download(name, path.name, LIMITS)


def download_files(address: str, patterns: Iterable[str]) -> Path:
    """Bring files of a repository, "user/name" or "user/name@version", into the hub's cache; their folder."""
    name, version = _parse(address)
    try:
        return _download(name, version, patterns)
    except ValueError:
        with suppress(ValueError):  # what is not in the cache either is not there for the first reason
            return _download(name, version, patterns, local_files_only=True)
        raise


def _download(name: str, version: str, patterns: Iterable[str], **options: Any) -> Path:
    hub = _library()
    with _in_words(name, "read", version):
        folder = hub.snapshot_download(
            name, revision=version or None, allow_patterns=list(patterns), **_who(), **options
        )
    return Path(folder)


def _parse(address: str) -> tuple[str, str]:
    name, at, version = address.removeprefix(HUB).partition("@")
    _check_name(name)
    if at and not _REVISION.fullmatch(version):
        raise ValueError(f"{address!r} names no version; give a branch, a tag or a commit behind the '@'")
    return name, version


def _listed(api: Any, name: str, version: str) -> tuple[str, dict[str, int | None]]:
    """A version's commit, and the sizes of its files as the hub says them."""
    info = api.model_info(name, revision=version or None, files_metadata=True)
    return info.sha, {file.rfilename: file.size for file in info.siblings or ()}


def _check_sizes(name: str, sizes: Mapping[str, int | None]) -> None:
    """Refuse, before anything is downloaded, a file that is larger than any model's."""
    for file, limit in LIMITS.items():
        size = sizes.get(file, 0)
        if size is None or size > limit:
            has = "no size" if size is None else f"{size:,} bytes"
            raise ValueError(
                f"{file} of {name} on the hub has {has}, a model's has at most {limit:,} bytes; give a "
                "repository that ensbridge.push wrote"
            )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name on the hub; give one such as 'user/name', of letters, digits, '-', '_'"
        )


def _library() -> Any:
    """huggingface_hub, of which ensbridge needs nothing for folders."""
    try:
        import_module("huggingface_hub.errors")
        return import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"huggingface_hub cannot be imported ({error}); pip install 'ensbridge[hub]'"
        ) from error


def _who() -> dict[str, str]:
    from ensbridge import __version__

    return {"library_name": "ensbridge", "library_version": __version__}


def _whole_model(folder: Path, name: str) -> dict[str, bytes | str]:
    """What is uploaded under each file's name; a folder that could not be loaded again is refused."""
    for file in (CONFIG, WEIGHTS, CARD):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} holds no {file}; give a folder that FastEnsemble.save wrote")
    description = read_description(folder / CONFIG)
    card = (folder / CARD).read_text(encoding="utf-8", errors="replace")
    if digest(folder / WEIGHTS) != description.sha256 or description.sha256 not in card:
        raise ValueError(
            f"the {WEIGHTS}, {CONFIG} and {CARD} in {folder} do not belong together; save the model again"
        )
    # There the folder is the repository.
    card = card.replace(CARD_FOLDER, f'"{HUB}{name}"')
    # Weights may be large: the hub's library reads them from the disk, piece by piece.
    return {WEIGHTS: str(folder / WEIGHTS), CONFIG: (folder / CONFIG).read_bytes(), CARD: card.encode()}


def _holds_another_model(api: Any, name: str) -> bool:
    """Whether a repository has a model that is not ours: whoever loads that would find it gone."""
    sizes = _listed(api, name, "")[1]
    if CONFIG not in sizes:
        return WEIGHTS in sizes
    if (sizes[CONFIG] or 0) > LIMITS[CONFIG]:
        return True
    try:
        return not is_ours(read_json(Path(api.hf_hub_download(name, CONFIG))))
    except ValueError:  # no JSON
        return True


@contextmanager
def _in_words(name: str, what: str, version: str = "") -> Iterator[None]:
    """Whatever goes wrong between here and the hub, as one sentence."""
    try:
        yield
    except Exception as error:  # of three HTTP libraries, depending on huggingface_hub's version
        raise ValueError(_sentence(error, name, what, version)) from error


def _sentence(error: Exception, name: str, what: str, version: str) -> str:
    errors = import_module("huggingface_hub.errors")
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it was not in the cache either; what matters is why it was not downloaded
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return f"{name} is shown by the hub to those alone who asked; ask on its page, then {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name} on the hub has no version {version!r}; give a branch, a tag or a commit of it"
    if isinstance(error, errors.RepositoryNotFoundError) and what == "read":
        return f"{name} is not on the hub, or is private; check the name, or {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError | errors.LocalTokenNotFoundError) or status in (
        401,
        403,
    ):
        return f"the hub does not let you {what} {name}; {_LOG_IN}"
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return f"{name} is not in the cache and the hub is switched off; unset HF_HUB_OFFLINE"
    text = one_line(error)
    if isinstance(error, ValueError):
        return f"the hub refuses {name} ({text}); correct that and try again"
    if status is not None:
        return f"the hub answered {status} for {name} ({text}); try again later"
    return f"the hub cannot be reached for {name} ({text}); check the connection and try again"
