"""Starts a process for each stage on one machine, as torchrun does, and leaves none behind.

The stages meet at one address. `launch` names the loopback address, which no other machine can
reach. There the stages listen, and nowhere else. Other launchers, such as torchrun, have a store of
their own, which listens on every interface: see docs/pipelines.md.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from command.checks import Range, UserError
from command.cli import interrupts_held
from loading.device import choose_device
from loading.files import first_line

LAUNCHED = "PIPELINE_LAUNCHED"  # an environment variable: the process id of `launch`
LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(minutes=10)  # how long stages wait for each other


def launch(stages: int, port: int | None, hide_gpus: bool = False) -> None:
    """Start a process for each stage on this machine, as torchrun does, and wait for all of them.

    If one fails, all others are ended. hide_gpus: from the stages, which then need not look again.
    """
    with socket.socket() as probe:
        # as torch does: so a port that was just closed counts as free
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port or 0))
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
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        LAUNCHED: os.getpid(),
    }
    group |= {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    # Where a stage has ended, PyTorch's warnings in the others hide the one line that says so.
    ours = loopback_interface() | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    children: list[subprocess.Popen] = []
    try:
        with interrupts_held():
            for stage in range(stages):
                environment = group | {"RANK": stage, "LOCAL_RANK": stage}
                environment = {name: str(value) for name, value in environment.items()}
                environment = ours | os.environ | environment
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


def loopback_interface() -> dict[str, str]:
    """What keeps gloo and NCCL on the loopback, unless the user's environment says otherwise.

    Else gloo listens at the address of this machine's name, and NCCL on the first interface that
    leads to a network.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return dict.fromkeys(variables, names[0]) if names else {}


@dataclass(frozen=True)
class Place:
    """Which stage this process is, and where the stages meet: what torchrun's variables say."""

    stage: int
    stages: int
    local: int  # number among the stages of this machine
    local_stages: int
    address: str
    port: int
    launcher: int | None  # process id of `launch`; None: it has not started us


def read_place(environment: Mapping[str, str]) -> Place:
    """This process's place, or a UserError that names the variable that is wrong."""

    def whole(name: str, least: int, most: int, default: str | None = None) -> int:
        text, allowed = environment.get(name, default), Range(least, most)
        value = allowed.read(text or "")
        if value not in allowed:
            given = "missing" if text is None else repr(text[:40])
            raise UserError(
                f"the environment variable {name} is {given}; where RANK is set, as torchrun does,"
                f" it must be {allowed}"
            )
        return value

    many = 2**31 - 1
    stages = whole("WORLD_SIZE", 1, many)
    local_stages = whole("LOCAL_WORLD_SIZE", 1, stages, "1")
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise UserError(
            "the environment variable MASTER_ADDR is missing; where RANK is set, as torchrun does,"
            " it must name the machine of stage 0"
        )
    return Place(
        whole("RANK", 0, stages - 1),
        stages,
        whole("LOCAL_RANK", 0, local_stages - 1, "0"),
        local_stages,
        address,
        whole("MASTER_PORT", 1, 2**16 - 1),
        whole(LAUNCHED, 1, many) if LAUNCHED in environment else None,
    )


class NotMet(UserError):
    """This stage cannot meet the others. Unlike a mistake, the others do not find this."""


def stage_device(name: str, local: int, local_stages: int) -> torch.device:
    """The device of a stage: of the stages of one machine, each takes a GPU of its own, in order.

    name: as for `choose_device`. "auto" is the CPU where there are fewer GPUs than stages; the
    first stage says so. Raises UserError if there are too few GPUs for "cuda", or if one is named
    for several stages.
    """
    device = choose_device(name)
    if device.type == "cpu":
        return device
    if local_stages == 1 and device.index is not None:
        return device
    many = f"{local_stages} stages on this machine take a GPU each"
    if device.index is not None:
        raise UserError(f"--device is {name}, but {many}, from cuda:0 on: give cuda, cpu or auto")
    gpus = torch.cuda.device_count()
    if gpus >= local_stages:
        return torch.device("cuda", local)
    if name == "auto":
        if local == 0:
            print(f"the device is the CPU: {many}, and PyTorch sees {gpus}", file=sys.stderr)
        return torch.device("cpu")
    raise UserError(
        f"--device is {name}, but {many}, and PyTorch sees {gpus}: choose fewer stages, cpu or auto"
    )


def meet(place: Place, device: torch.device) -> None:
    """Join the group of all stages, by NCCL between GPUs, else by gloo.

    Raises NotMet if they cannot meet.
    """
    on_gpu = device.type == "cuda"
    try:
        if place.stage == 0:  # it listens there: PyTorch would look for the name for ten minutes
            socket.getaddrinfo(place.address, place.port)
        # Another launcher has a store of its own, or expects PyTorch's.
        ours = place.launcher is not None
        store = dist.PrefixStore("default_pg", make_store(place)) if ours else None
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=place.stage, world_size=place.stages,
            timeout=PATIENCE, device_id=device if on_gpu else None,
        )  # fmt: skip
    except (dist.DistError, OSError, ValueError, MemoryError) as error:
        raise NotMet(
            f"stage {place.stage} cannot meet the others at {place.address}:{place.port}"
            f" ({reason(error)})"
        ) from None


def make_store(place: Place) -> dist.TCPStore:
    """Where the stages of `launch` find each other's addresses.

    Stage 0 keeps it. PyTorch's own listens on every interface. So stage 0 brings a socket that is
    bound to the address that was named.
    """
    meeting = {"world_size": place.stages, "timeout": PATIENCE}
    if place.stage > 0:
        return dist.TCPStore(place.address, place.port, is_master=False, **meeting)
    found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    family, *_, where = found[0]
    listening = socket.create_server(where[:2], family=family)
    return dist.TCPStore(
        place.address, place.port, is_master=True, master_listen_fd=listening.detach(), **meeting
    )


def reason(error: Exception) -> str:
    """The first sentence of what a C++ library says, without the place in its source."""
    return re.sub(r"^\[\S+\] *", "", first_line(error)).split(". ")[0]


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
