"""Disks that are full or read-only, without touching the machine's: a mount that one process sees.

Needs root, or a Linux that lets users make namespaces. Where that fails, limits and modes of files
stand in for it.
"""

import ctypes
import os
import resource
import signal
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_PRIVATE, MS_REC = 1, 1 << 18, 1 << 14
SMALL = 32 << 10  # bytes of a disk that is nearly full


def mount_private(folder: Path, options: str, read_only: bool = False) -> bool:
    """An empty disk in memory at `folder`, which only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        return False
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    flags = MS_RDONLY if read_only else 0
    return not libc.mount(b"none", bytes(folder), b"tmpfs", flags, options.encode())


def full_disk(folder: Path) -> None:
    """From now on, `folder` holds a few kilobytes."""
    folder.mkdir(exist_ok=True)
    if not mount_private(folder, f"size={SMALL}"):
        small_files()


def small_files() -> None:
    """From now on, this process can write no file beyond a few kilobytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))


def read_only_disk(folder: Path) -> None:
    """From now on, nothing can be written into `folder`."""
    folder.mkdir(exist_ok=True)
    if not mount_private(folder, "", read_only=True):
        os.chmod(folder, 0o555)
