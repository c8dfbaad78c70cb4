"""A process for each stage: started here, or joined where torchrun has started them.

On one machine, `launch` starts the processes, and leaves none behind. They find each other through
a file, and listen on the loopback interface alone. torchrun's store listens on every interface: see
docs/pipelines.md.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from command.checks import UserError
from command.cli import interrupts_held
from more.loading.device import choose_device
from more.loading.files import first_line

# environment variables of what `launch` starts
LAUNCHER = "PIPELINE_LAUNCHER"  # its process id
MEETING = "PIPELINE_MEETING"  # the file through which the stages find each other
PATIENCE = timedelta(minutes=10)  # how long stages wait for each other
GRACE = 5.0  # s: most mistakes are found by all stages, and stage 0 prints first


def launch(stages: int, hide_gpus: bool = False) -> None:
    """Run this command once for each stage, on this machine, and wait for all of them.

    If one fails, all others are ended. hide_gpus: from the stages, which then need not look again.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the processes
    children: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        group = {"WORLD_SIZE": stages, "LOCAL_WORLD_SIZE": stages, LAUNCHER: os.getpid()}
        group |= {MEETING: os.path.join(folder, "meeting")}
        group |= {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
        # Where a stage has ended, PyTorch's warnings in the others hide the one line that says so.
        usual = loopback_interface() | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
        try:
            with interrupts_held():
                for stage in range(stages):
                    own = group | {"RANK": stage, "LOCAL_RANK": stage}
                    environment = usual | {name: str(value) for name, value in own.items()}
                    children.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
            while (found := [child.poll() for child in children]) != [0] * stages:
                if any(found):
                    break
                time.sleep(0.02)
        finally:
            for child in children:
                child.kill()  # does nothing to one that has ended
            for child in children:
                child.wait()
    stage, status = next(((i, status) for i, status in enumerate(found) if status), (0, 0))
    if status < 0:  # killed by a signal: it could not print anything
        name = signal.Signals(-status).name
        raise UserError(f"stage {stage} was ended by {name}; the others are stopped")
    if status:
        raise SystemExit(status)


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
    """Which stage this process is, as torchrun's variables say."""

    stage: int
    stages: int
    local: int  # number among the stages of this machine
    local_stages: int

    @staticmethod
    def here() -> "Place | None":
        """None where this process is no stage. Raises UserError where a variable is no number."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return None
        names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
        try:
            return Place(*(int(os.environ[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"where WORLD_SIZE is set, as torchrun does, {', '.join(names)} must be numbers"
                f" ({error})"
            ) from None


def stage_device(name: str, local: int, local_stages: int) -> torch.device:
    """The device of a stage: of the stages of one machine, each takes a GPU of its own, in order.

    name: as for `choose_device`. "auto" is the CPU where there are fewer GPUs than stages; the
    first stage says so. Raises UserError if there are too few GPUs for "cuda", or if one is named
    for several stages.
    """
    device = choose_device(name)
    if device.type == "cpu" or (local_stages == 1 and device.index is not None):
        return device
    many = f"{local_stages} stages on this machine take a GPU each"
    if device.index is not None:
        raise UserError(f"--device is {name}, but {many}, from cuda:0 on: give cuda, cpu or auto")
    gpus = torch.cuda.device_count()
    if gpus >= local_stages:
        return torch.device("cuda", local)
    if name != "auto":
        raise UserError(
            f"--device is {name}, but {many}, and PyTorch sees {gpus}: choose fewer stages, cpu or"
            " auto"
        )
    if local == 0:
        print(f"the device is the CPU: {many}, and PyTorch sees {gpus}", file=sys.stderr)
    return torch.device("cpu")


def end_with(parent: int) -> None:
    """End this process as soon as its launcher is gone, even if killed. For a thread.

    parent: the launcher's process id, as it has told us: it may end before we could ask.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def joined(place: Place, name: str) -> Iterator[torch.device]:
    """The group of all stages, while this process is one of them. Yields its device.

    name: of the device, as for `stage_device`. GPUs talk by NCCL, CPUs by gloo. Raises UserError if
    the stages cannot meet, or if another one has ended.
    """
    if LAUNCHER in os.environ:
        parent = [int(os.environ[LAUNCHER])]
        threading.Thread(target=end_with, args=parent, daemon=True).start()
    try:
        device = stage_device(name, place.local, place.local_stages)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            take_cores(place.local, place.local_stages)
        meet(place, device)
        yield device
        dist.barrier()
        dist.destroy_process_group()
    except UserError as error:
        if place.stage == 0:
            raise
        time.sleep(GRACE)  # stage 0 has probably found the same mistake, and its launcher ends us
        raise UserError(f"stage {place.stage}: {error}") from None
    except RuntimeError as error:  # torch.distributed's and gloo's errors are plain ones, too
        if not re.search("gloo|nccl|connection", str(error), re.IGNORECASE):
            raise
        time.sleep(GRACE)  # the launcher, or the other stage, says why it has ended
        why = re.sub(r"^\[\S+\] *", "", first_line(error)).split(". ")[0]
        raise UserError(f"stage {place.stage} has lost another stage ({why})") from None


def meet(place: Place, device: torch.device) -> None:
    """Join the group of all stages, through the launcher's file, or as torchrun says."""
    on_gpu, file = device.type == "cuda", os.environ.get(MEETING)
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{file}" if file else "env://",
            rank=place.stage, world_size=place.stages, timeout=PATIENCE,
            device_id=device if on_gpu else None,
        )  # fmt: skip
    except (dist.DistError, OSError, ValueError) as error:
        raise UserError(f"it cannot meet the others ({first_line(error)})") from None


def take_cores(local: int, processes: int) -> None:
    """Divide this machine's cores among its processes, each with as many threads as cores.

    Each process is pinned to its cores, if the system can do that. Else, when a message wakes a
    process, the system may put it on the sender's core. Then two processes share one core, and
    another core is idle.
    """
    can_pin = hasattr(os, "sched_setaffinity")
    cores = sorted(os.sched_getaffinity(0)) if can_pin else range(os.cpu_count() or 1)
    share = len(cores) // processes
    torch.set_num_threads(max(1, share))
    if share > 0 and can_pin:
        os.sched_setaffinity(0, cores[local * share : (local + 1) * share])
