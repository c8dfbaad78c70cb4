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

from command.checks import Range, UserError, shown
from command.cli import interrupts_held
from more.loading.device import choose_device
from more.loading.files import first_line

# environment variables of what `launch` starts
LAUNCHER = "PIPELINE_LAUNCHER"  # its process id
MEETING = "PIPELINE_MEETING"  # the file through which the stages find each other
MEETING_TIME = timedelta(minutes=2)  # how long a stage looks for the others at MASTER_ADDR
PATIENCE = timedelta(minutes=10)  # how long stages wait for each other from then on
GRACE = 5.0  # s: most mistakes are found by all stages, and stage 0 prints first
PORTS = Range(1, 65535)


def launch(stages: int, hide_gpus: bool = False) -> None:
    """Run this command once for each stage, on this machine, and wait for all of them.

    If one fails, all others are ended. hide_gpus: from the stages, which then need not look again.
    """
    check_interface()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the processes
    children: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory() as folder:
        group = {"WORLD_SIZE": stages, "LOCAL_WORLD_SIZE": stages, LAUNCHER: os.getpid()}
        group |= {MEETING: os.path.join(folder, "meeting")}
        group |= {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
        usual = loopback_interface() | os.environ
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


def check_interface() -> None:
    """A UserError if gloo cannot listen where GLOO_SOCKET_IFNAME says."""
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    for name in given.split(",") if given else ():
        if not can_listen(name):
            right = [each for _, each in socket.if_nameindex() if can_listen(each)]
            raise UserError(
                f"GLOO_SOCKET_IFNAME is {shown(given)}, and {shown(name)} is no network interface"
                f" of this machine with an address: choose from {', '.join(right)}"
            )


def can_listen(interface: str) -> bool:
    try:
        dist.ProcessGroupGloo.create_device(interface=interface)
    except RuntimeError:
        return False
    return True


def check_address() -> None:
    """A UserError if nobody can meet at MASTER_ADDR and MASTER_PORT."""
    address, port = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        if not address or not port or int(port) not in PORTS:
            raise ValueError
    except ValueError:
        raise UserError(
            f"MASTER_ADDR is {shown(address)} and MASTER_PORT {shown(port)}: give the machine of"
            f" stage 0 and a port that is free there, {PORTS}"
        ) from None
    try:
        socket.getaddrinfo(address, port)
    except (OSError, UnicodeError):
        raise UserError(f"MASTER_ADDR is {shown(address)}, and no such machine is known") from None


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
            place = Place(*(int(os.environ[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"where WORLD_SIZE is set, as torchrun does, {', '.join(names)} must be numbers"
                f" ({error})"
            ) from None
        inside = 0 <= place.stage < place.stages and 0 <= place.local < place.local_stages
        if not inside or place.local_stages > place.stages:
            told = ", ".join(os.environ[name] for name in names)
            raise UserError(
                f"{', '.join(names)} are {told}: RANK must be from 0 to WORLD_SIZE - 1, LOCAL_RANK"
                " from 0 to LOCAL_WORLD_SIZE - 1, and LOCAL_WORLD_SIZE at most WORLD_SIZE"
            )
        return place


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
        # the launcher, or the other stage, says why it has ended; else stage 0 speaks for all
        time.sleep(GRACE if place.stage == 0 else 2 * GRACE)
        why = re.sub(r"^\[\S+\] *", "", first_line(error)).split(". ")[0]
        what = "has lost another stage" if dist.is_initialized() else "cannot meet the others"
        raise UserError(f"stage {place.stage} {what} ({why})") from None


def meet(place: Place, device: torch.device) -> None:
    """Join the group of all stages, through the launcher's file, or as torchrun says."""
    on_gpu = device.type == "cuda"
    file = os.environ.get(MEETING)
    check_interface()
    if not file:
        check_address()
    where = f"file://{file}" if file else "env://"
    try:
        store, *_ = next(dist.rendezvous(where, place.stage, place.stages, timeout=MEETING_TIME))
        store.set_timeout(PATIENCE)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=place.stage,
            world_size=place.stages,
            timeout=PATIENCE,
            device_id=device if on_gpu else None,
        )
    except (dist.DistError, OSError, ValueError) as error:
        names = "MASTER_ADDR", "MASTER_PORT"
        at = "" if file else " at " + ", port ".join(os.environ[name] for name in names)
        raise UserError(f"it cannot meet the others{at} ({first_line(error)})") from None


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
