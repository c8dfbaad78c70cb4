"""Starts a process for each stage on one machine, as torchrun does, and leaves none behind."""

import os
import signal
import socket
import subprocess
import sys
import time

import torch

from configs import UserError

LAUNCHED = "PIPELINE_LAUNCHED"  # an environment variable: `launch` has started this process


def launch(stages: int, port: int | None) -> None:
    """Start a process for each stage on this machine, as torchrun does, and wait for all of them.

    If one fails, all others are ended.
    """
    with socket.socket() as probe:
        # as torch does: so a port that was just closed counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--port {port} cannot be used ({error}): give another, or none"
            ) from None
        port = probe.getsockname()[1]
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that `finally` below ends the processes
    group = {
        "WORLD_SIZE": stages,
        "LOCAL_WORLD_SIZE": stages,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        LAUNCHED: 1,
    }
    children: list[subprocess.Popen] = []
    try:
        for stage in range(stages):
            environment = group | {"RANK": stage, "LOCAL_RANK": stage}
            environment = os.environ | {name: str(value) for name, value in environment.items()}
            children.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
        while not (
            failed := {
                stage: child.returncode for stage, child in enumerate(children) if child.poll()
            }
        ):
            if all(child.poll() == 0 for child in children):
                return
            time.sleep(0.02)
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
        for child in children:
            child.wait()
    for stage, status in failed.items():
        if status < 0:  # killed by a signal: it could not print anything
            raise UserError(
                f"stage {stage} was ended by {signal.Signals(-status).name}; the others are stopped"
            )
    raise SystemExit(next(iter(failed.values())))


def end_with(parent: int) -> None:
    """End this process when its launcher is gone, even if the launcher was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def take_cores(local: int, processes: int) -> None:
    """Divide this machine's cores among its processes, each with as many threads as cores.

    Each process is pinned to its cores, if the system can do that. Else, when a message wakes a
    process, the system may put it on the sender's core. Then two processes share one core, and
    another core is idle.
    """
    cores = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    share = len(cores) // processes
    torch.set_num_threads(max(1, share))
    if share > 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[local * share : (local + 1) * share])
