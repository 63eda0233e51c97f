"""A disk of one's own that can be full or read-only, for root and for anybody else.

It is a tmpfs in a mount namespace of a forked process, for whoever may make a user namespace.
Where that is not allowed, files may not grow beyond a few bytes (RLIMIT_FSIZE) in place of a full disk, and
permission bits stand in for a read-only file system, which root would not notice.
"""

from __future__ import annotations

import ctypes
import os
import resource
from abc import ABC, abstractmethod
from pathlib import Path

_NEW_NAMESPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER, CLONE_NEWNS
_REMOUNT, _READ_ONLY, _RECURSIVE, _PRIVATE = 32, 1, 16384, 1 << 18
ROOM = 256 * 2**20


class AbstractDisk(ABC):
    """A folder whose disk fails on demand."""

    way: str  # how that is done, in words

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def fill(self, room: int) -> None:
        """Leave so many bytes free."""

    @abstractmethod
    def make_read_only(self) -> None:
        """Let nothing be written."""

    @abstractmethod
    def mend(self) -> None:
        """Let everything be written again."""

    def enter(self) -> None:  # noqa: B027 - only one of the two has anything to do
        """What a process must do itself to meet the fault."""


class TmpfsDisk(AbstractDisk):
    """A real file system with a real end."""

    way = "tmpfs in a mount namespace"

    def __init__(self, folder: Path) -> None:
        """Mount it, in this process and its children alone."""
        super().__init__(folder)
        user, group = os.getuid(), os.getgid()
        _call("unshare", _NEW_NAMESPACES)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
        folder.mkdir(parents=True, exist_ok=True)
        self._mount(0, ROOM)

    def _mount(self, flags: int, size: int) -> None:
        _call("mount", b"none", str(self.folder).encode(), b"tmpfs", flags, f"size={size}".encode())

    def fill(self, room: int) -> None:
        """Shrink it to what it holds and so many bytes, in pages of 4 kB."""
        state = os.statvfs(self.folder)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        self._mount(_REMOUNT, used + max(4096, room // 4096 * 4096))

    def make_read_only(self) -> None:
        """Remount it."""
        self._mount(_REMOUNT | _READ_ONLY, ROOM)

    def mend(self) -> None:
        """Remount it with all its room."""
        self._mount(_REMOUNT, ROOM)


class LimitedFolder(AbstractDisk):
    """A folder in which files may not grow, or that permission bits close."""

    way = "a limit on the size of files, and permission bits"
    _limit: int | None = None

    def fill(self, room: int) -> None:
        """Limit the size of a file to half of what a full disk would leave for all of them."""
        self._limit = room // 2

    def make_read_only(self) -> None:
        """Take the right to write away from every folder."""
        if os.getuid() == 0:
            raise PermissionError("root writes into folders without permission, and no namespace may be made")
        for path in (*self.folder.rglob("*"), self.folder):
            if path.is_dir():
                path.chmod(0o555)

    def mend(self) -> None:
        """Give it back."""
        self._limit = None
        for path in (self.folder, *self.folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)

    def enter(self) -> None:
        """Set the limit for this process."""
        if self._limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._limit, self._limit))


def open_disk(folder: Path) -> AbstractDisk:
    """The best disk that this machine allows; it lasts as long as this process."""
    try:
        return TmpfsDisk(folder)
    except OSError:
        folder.mkdir(parents=True, exist_ok=True)
        return LimitedFolder(folder)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
