"""A model goes to the hub and comes back as it was, and whatever is wrong is one sentence."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ensbridge as eb
from _hub import Hub, serving
from _saving import FILES, assert_same, change, contents, foreign, model, put
from ensbridge.deploy.saving import hub as saving_hub
from ensbridge.deploy.saving.hub import fetch, push

NAME = "someone/digits"


def at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub be there; HF_ENDPOINT is read once only, when its library is imported."""
    constants = sys.modules["huggingface_hub.constants"]
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of this machine's own, and an empty cache."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving() as running:
        at(running.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(
            constants, "HF_HUB_DISABLE_XET", True, raising=False
        )  # a second server of the hub's
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        monkeypatch.setattr(time, "sleep", lambda _: None)  # before the library tries again
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model."""
    model(temperature=1.3).save(tmp_path / "model", image_shape=(3, 8, 8))
    return tmp_path / "model"


def refusal(*arguments: object, **options: object) -> str:
    """The sentence with which `push`, or with one argument `fetch`, refuses."""
    with pytest.raises(ValueError) as refused:
        (fetch if len(arguments) == 1 else push)(*arguments, **options)  # type: ignore[operator]
    assert str(refused.value).isprintable()
    return str(refused.value)


# ------------------------------------------------------------------------------ there and back


def test_a_model_comes_back_as_it_was(hub: Hub, folder: Path) -> None:
    address = push(folder, NAME)
    ((sha, there),) = hub.repos[NAME]
    assert address == f"hf:{NAME}@{sha}"
    assert sorted(there) == FILES
    for name in ("model.safetensors", "config.json"):
        assert there[name] == (folder / name).read_bytes()
    place = fetch(address)
    assert sorted(each.name for each in place.iterdir()) == FILES
    assert_same(eb.load(place), eb.load(folder))


def test_the_cache_has_the_hubs_layout_and_serves_without_the_hub(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    sha = push(folder, NAME).partition("@")[2]
    fetch(f"hf:{NAME}")
    repo = tmp_path / "cache" / "models--someone--digits"
    assert (repo / "refs" / "main").read_text() == sha
    kept = repo / "snapshots" / sha
    assert all((kept / name).is_symlink() for name in FILES)
    assert {(kept / name).resolve().parent for name in FILES} == {(repo / "blobs").resolve()}
    hub.refuse["/"] = (503, "")
    assert fetch(f"hf:{NAME}") == kept
    assert_same(eb.load(fetch(f"hf:{NAME}")), eb.load(folder))


def test_a_model_itself_can_be_pushed(hub: Hub) -> None:
    fast = model()
    assert_same(eb.load(push(fast, NAME)), fast)


def test_a_source_of_the_users_own_is_passed_as_for_a_folder(hub: Hub) -> None:
    fast = foreign(3)
    push(fast, NAME)
    with pytest.raises(ValueError, match="pass an instance of it"):
        eb.load(fetch(f"hf:{NAME}"))
    assert_same(eb.load(fetch(f"hf:{NAME}"), source=foreign(1).source), fast)


def test_a_version_stays_what_it_was(hub: Hub, folder: Path, tmp_path: Path) -> None:
    first = push(folder, NAME)
    newer = model(temperature=2.0)
    newer.save(tmp_path / "newer")
    second = push(tmp_path / "newer", NAME)
    assert first != second
    assert_same(eb.load(fetch(first)), eb.load(folder))
    for address in (second, f"hf:{NAME}", f"hf:{NAME}@main"):
        assert_same(eb.load(fetch(address)), newer)


def test_only_a_models_files_travel(hub: Hub, folder: Path) -> None:
    (folder / "secrets.txt").write_text("mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text("{}")
    push(folder, NAME)
    assert sorted(hub.repos[NAME][-1][1]) == FILES
    hub.commit(
        NAME, {"evil.pkl": b"cos\nsystem\n", "modeling.py": b"raise SystemExit", "sub/config.json": b"{}"}
    )
    place = fetch(f"hf:{NAME}")
    assert sorted(str(each.relative_to(place)) for each in place.rglob("*")) == FILES
    assert not any("evil" in each or "modeling" in each for each in hub.asked)


def test_a_repository_is_private_unless_it_is_asked_otherwise(hub: Hub, folder: Path) -> None:
    push(folder, NAME)
    push(folder, "someone/open", private=False)
    assert hub.private == {NAME: True, "someone/open": False}


def test_the_card_says_how_it_is_loaded_from_there(hub: Hub, folder: Path) -> None:
    assert 'eb.load("path/to/this/folder")' in (folder / "README.md").read_text()
    push(folder, NAME)
    card = hub.repos[NAME][-1][1]["README.md"].decode()
    assert f'model = eb.load("hf:{NAME}")' in card
    assert "path/to" not in card
    assert card.startswith("---\nlibrary_name: ensbridge\n")


# ------------------------------------------------------------------------------ what is refused


def test_another_kind_of_model_is_neither_overwritten_nor_downloaded(hub: Hub, folder: Path) -> None:
    theirs = {"config.json": b'{"model_type": "vit"}', "model.safetensors": b"gigabytes"}
    for number, files in enumerate((theirs, {"model.safetensors": b""}, {"config.json": b"no JSON"})):
        name = f"someone/else{number}"
        hub.commit(name, files)
        assert re.match(rf"{name} .*not ensbridge's", refusal(folder, name))
        assert len(hub.repos[name]) == 1
    assert "no FastEnsemble" in refusal("hf:someone/else0")
    assert re.match(r"someone/else1 .*config\.json", refusal("hf:someone/else1"))
    assert not any("resolve" in each and "safetensors" in each for each in hub.asked)
    hub.commit(
        "someone/fresh", {"README.md": b"# hello", ".gitattributes": b""}
    )  # as the hub's page makes it
    push(folder, "someone/fresh")


def test_what_was_changed_on_the_hub_is_not_loaded(hub: Hub, folder: Path) -> None:
    push(folder, NAME)
    weights = bytearray(hub.repos[NAME][-1][1]["model.safetensors"])
    weights[-1] ^= 1
    hub.commit(NAME, {"model.safetensors": bytes(weights)})
    with pytest.raises(ValueError, match=r"model\.safetensors.*config\.json"):
        eb.load(fetch(f"hf:{NAME}"))


@pytest.mark.parametrize(
    ("file", "size"),
    [("model.safetensors", 2**37), ("config.json", 2**21), ("README.md", 2**21), ("model.safetensors", None)],
)
def test_files_of_a_size_that_no_model_has_are_not_downloaded(
    file: str, size: int | None, hub: Hub, folder: Path
) -> None:
    push(folder, NAME)
    hub.sizes[file] = size
    words = refusal(f"hf:{NAME}")
    assert file in words
    assert "no size" in words if size is None else f"{size:,} bytes" in words
    assert not any("resolve" in each for each in hub.asked)
    hub.sizes = {"notes.bin": 2**50}  # which is not downloaded
    hub.commit(NAME, {"notes.bin": b""})
    fetch(f"hf:{NAME}")


def test_a_version_that_came_between_is_looked_at_as_well(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(folder, NAME)
    real = saving_hub._listed

    def pushed_meanwhile(*arguments: Any) -> Any:
        found = real(*arguments)
        if len(hub.repos[NAME]) == 1:
            hub.commit(NAME, {"more.txt": b""})
            hub.sizes["model.safetensors"] = 2**37
        return found

    monkeypatch.setattr(saving_hub, "_listed", pushed_meanwhile)
    assert "bytes" in refusal(f"hf:{NAME}")
    assert not any("resolve" in each and "safetensors" in each for each in hub.asked)


def test_a_description_too_large_for_ours_is_another_models(hub: Hub, folder: Path) -> None:
    push(folder, NAME)
    hub.asked.clear()
    hub.sizes["config.json"] = 2**40
    assert "not ensbridge's" in refusal(folder, NAME)
    assert not any("resolve" in each for each in hub.asked)


@pytest.mark.parametrize("missing", FILES)
def test_a_folder_that_is_not_whole_is_not_pushed(missing: str, hub: Hub, folder: Path) -> None:
    (folder / missing).unlink()
    assert refusal(folder, NAME).startswith(f"{folder} holds no {missing}")
    assert hub.asked == []


def test_files_of_different_models_are_not_pushed(hub: Hub, folder: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        other = model()
        next(other.parameters()).add_(1)
    other.save(tmp_path / "other")
    for name in ("model.safetensors", "README.md"):
        before = contents(folder)
        (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
        assert f"{folder} do not belong together" in refusal(folder, NAME)
        (folder / name).write_bytes(before[name])
    change(folder, put("temperature", "hot"))
    assert "temperature" in refusal(folder, NAME)
    assert hub.asked == []


WRONG = ["digits", "", "a/b/c", "a/", "/b", "a b/c", "a/b--c", "a/b..c", "a/-b", "a/b.", "a/b.git", "ä/b"]


@pytest.mark.parametrize("name", [*WRONG, "a/" + 99 * "b", "../up", "a/b\n"])
def test_a_wrong_name_is_refused_before_anything_is_sent(name: str, hub: Hub, folder: Path) -> None:
    for said in (refusal(folder, name), refusal(f"hf:{name}")):
        assert said.startswith(f"{name!r} is no name")
    assert hub.asked == []


@pytest.mark.parametrize("version", ["", "a b", "../../up", "-x", "a..b", "a@b", "a\n"])
def test_a_wrong_version_is_refused_before_anything_is_sent(version: str, hub: Hub) -> None:
    address = f"hf:{NAME}@{version}"
    assert refusal(address).startswith(f"{address!r} names no version")
    assert hub.asked == []


def test_what_is_not_there_is_said(hub: Hub, folder: Path) -> None:
    log_in = "log in with `hf auth login`, or pass token="
    assert refusal(f"hf:{NAME}") == f"{NAME} is not on the hub, or is private; check the name, or {log_in}"
    push(folder, NAME)
    assert re.match(f"{NAME} .*no version 'v9'", refusal(f"hf:{NAME}@v9"))


def test_whom_the_hub_does_not_know_it_sends_away(hub: Hub, folder: Path) -> None:
    for status, code in ((401, ""), (403, ""), (404, "RepoNotFound")):
        hub.refuse["/"] = (status, code)
        assert refusal(folder, NAME).startswith(f"the hub does not let you write to {NAME}; ")
    hub.refuse["/"] = (403, "")
    assert refusal(f"hf:{NAME}").startswith(f"the hub does not let you read {NAME}; ")
    hub.refuse["/"] = (403, "GatedRepo")
    assert refusal(f"hf:{NAME}").startswith(f"{NAME} is shown by the hub to those alone who asked")
    del hub.refuse["/"]
    push(folder, NAME)
    hub.refuse["/commit/"] = (403, "")  # may read, may not write
    assert refusal(folder, NAME).startswith(f"the hub does not let you write to {NAME}; ")
    assert len(hub.repos[NAME]) == 1


def test_a_hub_that_is_ill_or_away_is_said(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refuse["/"] = (500, "")
    for said in (refusal(folder, NAME), refusal(f"hf:{NAME}")):
        assert re.search(f"500.*{NAME}", said)
    at("http://127.0.0.1:9", monkeypatch)  # where nobody listens
    for said in (refusal(folder, NAME), refusal(f"hf:{NAME}")):
        assert re.search(f"cannot be reached.*{NAME}", said)


def test_without_the_library_the_remedy_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("huggingface_hub", "huggingface_hub.errors"):
        monkeypatch.setitem(sys.modules, module, None)
    for said in (refusal(folder, NAME), refusal(f"hf:{NAME}")):
        assert re.fullmatch(r"huggingface_hub .*'ensbridge\[hub\]'", said)
