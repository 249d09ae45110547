"""Starts one service so that it cannot outlive its launcher. Run as a file, before anything else is imported:

    python -I -S child.py LAUNCHER_PID [--guard] COMMAND ...

On Linux the kernel kills the service when the launcher dies (PR_SET_PDEATHSIG survives exec, so the service keeps
this pid). Elsewhere this process stays as a guard that watches its parent and forwards signals.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH_S = 0.2


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    guarded = command[0] == "--guard"
    # A launcher started with `&` from a script ignores SIGINT, and Python ignores SIGPIPE; exec would pass that on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if guarded or not sys.platform.startswith("linux"):
        guard(launcher, command[1:] if guarded else command)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        guard(launcher, command)
    if os.getppid() != launcher:
        sys.exit(1)  # it died before the kernel knew that we care
    execute(command)


def execute(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def guard(launcher: int, command: list[str]) -> None:
    child = os.fork()
    if child == 0:
        execute(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, _frame: os.kill(child, signum))
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            sys.exit(code if code >= 0 else 128 - code)
        if os.getppid() != launcher:
            os.kill(child, signal.SIGKILL)
        time.sleep(WATCH_S)


if __name__ == "__main__":
    main()
