"""Commands in forks of a process that has imported torch, which alone takes seconds.

`pytest` forks that process once, before it has any thread (conftest.py). `start` and `run` ask it
for a command, which gets what subprocess would give it: a process, a folder, streams and an
environment of its own. If the command starts Python, as distributed.py does, that is a fork, too.

What tests how Python starts takes subprocess: imports, signals meanwhile, encodings. macOS cannot
safely fork once torch is loaded, and Windows cannot fork at all: there, all is subprocess.
"""

import atexit
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from select import select
from types import ModuleType
from typing import Self

from command.cli import SCRIPTS, die_quietly
from tests.watch import PATIENCE

ROOT = Path(__file__).parent.parent
PLACE = "NANO_SARATHI_WARM"  # an environment variable: the socket of the process that forks
DEADLY = [signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
LOCAL = (getattr(socket, "AF_UNIX", 0), socket.SOCK_SEQPACKET)  # whole messages
CAPTURED: dict[int, int] = {}  # descriptors of pytest's own stdout and stderr, for 1 and 2
USED = ("matplotlib.pyplot", "generate", "distributed", "serve", "experiments.lib.common")


def start(
    *arguments: object, cwd: Path = ROOT, start_new_session: bool = False, fork: bool = True,
    **environment: str
) -> "Command | subprocess.Popen":  # fmt: skip
    """`python ARGUMENTS`, with pipes of text. environment: is added to this process's.

    fork: False for what is no program of ours, and may not bear it, such as torchrun; and where
    an interrupt may come while a command starts another: a fork may lose it.
    """
    command = [sys.executable, *(os.fsdecode(os.fspath(each)) for each in arguments)]
    env = os.environ | environment
    if fork and PLACE in os.environ:
        return Command(command, cwd=str(cwd), env=env, start_new_session=start_new_session)
    return subprocess.Popen(
        command, cwd=cwd, env=env, start_new_session=start_new_session, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess:
    """The same, to its end."""
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fresh(
    *arguments: object, check: bool = False, **options: object
) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` in a new interpreter, to its end. options: of subprocess.run.

    It inherits stdin, and may print what is no UTF-8.
    """
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    usual |= {"errors": "replace", "timeout": PATIENCE}
    command = [sys.executable, *map(os.fspath, arguments)]
    return subprocess.run(command, check=check, **usual | options)


class Command:
    """What tests use of subprocess.Popen, for a process that `serve` has forked."""

    def __init__(self, args: list[str], **options: object) -> None:
        """options: what subprocess.Popen takes: cwd, env, start_new_session."""
        self.args, self.returncode = args, None
        ignored = [sign for sign in DEADLY if signal.getsignal(sign) == signal.SIG_IGN]
        self.server = socket.socket(*LOCAL)
        self.server.connect(os.environ[PLACE])
        ours, theirs = zip(*(os.pipe() for _ in range(2)), strict=True)
        self.stdout, self.stderr = (open(each, encoding="utf-8", errors="replace") for each in ours)  # noqa: SIM115
        asked = json.dumps([args, options, ignored]).encode()
        socket.send_fds(self.server, [asked], theirs)
        for pipe in theirs:
            os.close(pipe)
        self.pid = int(self.server.recv(100))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select([self.server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self.server.recv(100))
            self.server.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """As Popen's, but what is left after the timeout is killed. Another may hold the pipes."""
        said: dict[int, str] = {}
        streams = enumerate((self.stdout, self.stderr))
        readers = [
            threading.Thread(target=lambda n, s: said.update({n: s.read()}), args=each, daemon=True)
            for each in streams
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for reader in readers:
            reader.join(timeout)
        if len(said) < len(readers):
            raise subprocess.TimeoutExpired(self.args, timeout)
        return said[0], said[1]

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


# ------------------------------------------------------------------------- the process that forks


def begin() -> Callable[[], None]:
    """Fork it from this process, which has one thread. Returns what ends it.

    If this process is killed, it ends, too.
    """
    if sys.platform != "linux":
        return lambda: None
    place = tempfile.mkdtemp(prefix="nano-sarathi-warm-")
    listener = socket.socket(*LOCAL)
    try:
        listener.bind(f"{place}/socket")
    except OSError:  # the folder's name is too long for a socket
        shutil.rmtree(place)
        return lambda: None
    os.environ[PLACE] = f"{place}/socket"
    listener.listen(100)
    here, there = os.pipe()  # `here` is at its end when `there` is closed
    for stream in (sys.__stdout__, sys.__stderr__):
        stream.flush()
    with suppress(OSError):  # pytest -s, or --capture sys
        CAPTURED.update({sys.stdout.fileno(): 1, sys.stderr.fileno(): 2})
    if (pid := os.fork()) == 0:
        try:
            os.setsid()  # a Ctrl-C is not for it
            os.close(there)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            serve(listener, here)
        finally:
            shutil.rmtree(place, ignore_errors=True)
            os._exit(0)
    os.close(here)
    listener.close()

    def end() -> None:
        os.close(there)
        os.waitpid(pid, 0)

    return end


def serve(listener: socket.socket, end: int) -> None:
    used, children = iter(USED), set()
    while end not in select([listener, end], [], [])[0]:
        for name in used:
            with suppress(Exception):  # the command itself will say it
                importlib.import_module(name)
        connection, _ = listener.accept()
        if (pid := os.fork()) == 0:
            try:
                answer(connection)
            finally:
                os._exit(0)
        connection.close()
        children.add(pid)
        children -= {each for each in children if os.waitpid(each, os.WNOHANG)[0]}
    for pid in children:  # what a test has left running
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def answer(connection: socket.socket) -> None:
    """Start one command, and say its process id and its exit status."""
    asked, streams, *_ = socket.recv_fds(connection, 1 << 20, 2)
    args, options, ignored = json.loads(asked)
    for sign in ignored:
        signal.signal(sign, signal.SIG_IGN)
    pipes = dict(zip(("stdout", "stderr"), streams, strict=True))
    process = Forked(args, **options, **pipes, stdin=subprocess.DEVNULL)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    connection.send(str(process.pid).encode())
    connection.send(str(process.wait()).encode())


class Forked(subprocess.Popen):
    """Python with a file, -c or -m is a fork of this process. All else is started as usual."""

    def __init__(self, args: Sequence[str], *positional: object, **options: object) -> None:
        python = list(args[:1]) == [sys.executable] and threading.active_count() == 1
        if python and (args[1] in ("-c", "-m") or not args[1].startswith("-")):
            options["preexec_fn"] = partial(become, list(args[1:]), options.get("env"))
        super().__init__(args, *positional, **options)


def become(arguments: list[str], environment: Mapping[str, str] | None) -> None:
    """Be `python ARGUMENTS`, in a process that has just been forked for it, and never return."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the list's own
                os.close(int(name))
    for captured, own in CAPTURED.items():  # a logger of torch's holds what stderr was then
        os.dup2(own, captured)
    gc.enable()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # asks the environment again
    for sign in DEADLY:
        if signal.getsignal(sign) != signal.SIG_IGN:
            usual = signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL
            signal.signal(sign, usual)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    subprocess.Popen = Forked
    status = outcome(partial(execute, arguments))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def execute(arguments: list[str]) -> None:
    """Run a program as __main__: a file, -c CODE or -m MODULE."""
    first, *rest = arguments
    if first == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")  # to the end: a thread may ask
    if first == "-c":
        sys.argv[:], place, source = ["-c", *rest[1:]], "", rest[0]
    else:
        sys.argv[:], place, module.__file__ = arguments, Path(first).resolve().parent, first
        source = Path(first).read_bytes()
        if place in SCRIPTS:  # as its first import does, which is there already
            die_quietly()
    sys.path.insert(0, str(place))
    exec(compile(source, first, "exec"), module.__dict__)  # noqa: S102


def outcome(act: Callable[[], None]) -> int:
    """Act, and end as Python would. Returns the exit status, or minus a signal's number.

    Only for a process that was forked: what the one before it would do at its end is forgotten.
    """
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)
    try:
        act()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (as the interpreter does)
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    with suppress(AttributeError, ValueError):  # there may be no stdout
        try:
            sys.stdout.flush()
        except OSError as error:  # what the interpreter says, and how it ends then
            os.write(2, f"Exception ignored while flushing sys.stdout: {error}\n".encode())
            status = 120
    return status
