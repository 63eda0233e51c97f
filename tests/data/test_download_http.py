"""Downloads: going on after a cut, starting over where that is wrong, ending where a server does not help."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import _sets
from _host import Host, serving
from ensbridge.data.download import http as downloads
from ensbridge.data.download.http import Unavailable, download

CONTENT = bytes(_sets.pixels(100_000))


@pytest.fixture
def host() -> Iterator[Host]:
    with serving(CONTENT) as made:
        yield made


def known(content: bytes) -> tuple[str, int]:
    """What a file is known by."""
    return hashlib.sha256(content).hexdigest(), len(content)


def test_a_file_comes_whole(host: Host, tmp_path: Path) -> None:
    for host.length in (True, False):
        part = tmp_path / f"part-{host.length}"
        download(host.url, part, *known(CONTENT))
        assert part.read_bytes() == CONTENT
    assert host.asked == [None, None]


def test_a_cut_download_goes_on_where_it_ended(host: Host, tmp_path: Path) -> None:
    host.cut, host.cuts = 30_000, 2
    download(host.url, tmp_path / "part", *known(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert host.asked == [None, "bytes=30000-", "bytes=60000-"]


def test_a_later_call_goes_on_and_a_whole_part_is_not_asked_for(host: Host, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(CONTENT[:70_000])
    download(host.url, part, *known(CONTENT))
    assert part.read_bytes() == CONTENT
    download(host.url, part, *known(CONTENT))
    assert host.asked == ["bytes=70000-"]


def test_a_server_without_ranges_starts_over(host: Host, tmp_path: Path) -> None:
    host.ranges = False
    (tmp_path / "part").write_bytes(CONTENT[:70_000])
    download(host.url, tmp_path / "part", *known(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT


@pytest.mark.parametrize("old", [b"x" * 500, b"x" * 100_000, b"x" * 200_000])
def test_a_part_of_another_file_is_fetched_anew(old: bytes, host: Host, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(old)
    download(host.url, tmp_path / "part", *known(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT
    assert host.asked == [f"bytes={len(old)}-", None]


def test_a_wrong_checksum_leaves_nothing(host: Host, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+.*checksum"):
        download(host.url, tmp_path / "part", *known(CONTENT[::-1]))
    assert list(tmp_path.iterdir()) == []
    assert host.asked == [None]


@pytest.mark.parametrize("status", [403, 404, 416, 503])
def test_a_server_that_refuses_is_quoted(status: int, host: Host, tmp_path: Path) -> None:
    host.status = status
    with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:\d+.* {status} \w+"):
        download(host.url, tmp_path / "part", *known(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_stops_for_good_is_left_with_its_part(host: Host, tmp_path: Path) -> None:
    host.cut, host.ranges = 30_000, False
    with pytest.raises(Unavailable, match=r"0\.0 MB.*connection ended"):
        download(host.url, tmp_path / "part", *known(CONTENT))
    assert (tmp_path / "part").read_bytes() == CONTENT[:30_000]
    assert len(host.asked) == 2


def test_a_server_that_falls_silent_is_not_waited_for(host: Host, tmp_path: Path) -> None:
    host.cut, host.stalls, host.ranges = 30_000, True, False
    with pytest.raises(Unavailable, match="stopped after"):
        download(host.url, tmp_path / "part", *known(CONTENT), timeout=0.2)
    assert CONTENT.startswith((tmp_path / "part").read_bytes())
    assert (tmp_path / "part").stat().st_size >= 30_000


def test_a_host_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*Connection refused"):
        download("http://127.0.0.1:1/x", tmp_path / "part", *known(b"x"))


def test_no_more_than_the_file_has_is_kept(host: Host, tmp_path: Path) -> None:
    host.length = False
    download(host.url, tmp_path / "part", *known(CONTENT[:50_000]))
    assert (tmp_path / "part").read_bytes() == CONTENT[:50_000]


@pytest.mark.parametrize("claims", [None, 10**15])
def test_a_file_of_another_length_is_not_begun(claims: int | None, host: Host, tmp_path: Path) -> None:
    host.claims = claims
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+.*[\d,]+ bytes.*50,000"):
        download(host.url, tmp_path / "part", *known(CONTENT[:50_000]))
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_a_link_is_not_written_through(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "part").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"part.*not a regular file"):
        download(host.url, tmp_path / "part", *known(CONTENT))
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_full_disk_is_not_the_servers_fault(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, _block: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ensbridge.data.download.http.open", lambda *_, **__: Full(), raising=False)
    with pytest.raises(OSError, match="No space left") as refused:
        download(host.url, tmp_path / "part", *known(CONTENT))
    assert refused.value.filename == str(tmp_path / "part")


@pytest.fixture
def tls(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate of this machine's own, which is trusted here."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [openssl, *words.split(), "-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "certificate.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return context


def test_no_redirection_leads_from_an_encrypted_address_to_another(
    tls: ssl.SSLContext, host: Host, tmp_path: Path
) -> None:
    with serving(CONTENT, tls) as safe:
        download(safe.url, tmp_path / "whole", *known(CONTENT))
        safe.moved = host.url
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:\d+.*'http://"):
            download(safe.url, tmp_path / "part", *known(CONTENT))
        assert host.asked == []
        host.moved = safe.url
        safe.moved = None
        download(host.url, tmp_path / "again", *known(CONTENT))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "whole"]


def test_progress_counts_what_was_there_and_ends_at_its_total(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_BLOCK", 10_000)
    (tmp_path / "part").write_bytes(CONTENT[:40_000])
    steps: list[int] = []
    stage = lambda _, total, unit: steps.append(-total) or steps.append  # noqa: E731
    download(host.url, tmp_path / "part", *known(CONTENT), stage)
    assert sum(steps) == 0
    assert steps[:2] == [-10, 4]
