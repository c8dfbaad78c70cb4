"""Runs a command, and ends it with all that it has started once nobody waits for it any more.

`library.run_compiler` starts this file as a program that leads a process group, and holds the other
end of its standard input. However that process ends, its end of the pipe is closed.
"""

import os
import signal
import subprocess
import sys
import threading


def watch(command: subprocess.Popen) -> None:
    os.read(0, 1)  # nothing comes: it returns when the pipe is closed
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)  # of this process, too
    command.kill()  # Windows has no groups


def main() -> None:
    try:
        command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.exit(f"error: {error}")
    threading.Thread(target=watch, args=(command,), daemon=True).start()
    os._exit(command.wait() & 255)


if __name__ == "__main__":
    main()
