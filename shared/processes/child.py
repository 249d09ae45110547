"""Start one service so that it cannot outlive its supervisor. Run as a file, before anything else is imported:

    python -I -S child.py SUPERVISOR_PID [--guard] COMMAND ...

On Linux the kernel kills the service when the supervisor dies (PR_SET_PDEATHSIG survives exec, so the service keeps
this pid). Elsewhere this process stays as a guard that watches its parent and forwards signals.
"""

import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
WATCH_S = 0.2


def main() -> None:
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    is_guarded = command[0] == "--guard"
    # These two are passed on to services, some of which handle them; until then they must end none.
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # The terminal would stop a process in the background that reads from it or writes to it.
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # A supervisor started with `&` from a script ignores SIGINT, and Python ignores SIGPIPE; exec would pass that on.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if is_guarded or not sys.platform.startswith("linux"):
        guard(supervisor, command[1:] if is_guarded else command)
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        guard(supervisor, command)
    if os.getppid() != supervisor:
        sys.exit(1)  # it died before the kernel was told to watch it
    execute(command)


def execute(command: list[str]) -> None:
    """Become the command; exit with 2 where that cannot be started."""
    try:
        os.execvp(command[0], command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}; check that it is installed", file=sys.stderr)
        sys.exit(2)


def guard(supervisor: int, command: list[str]) -> None:
    """Run the command as a child, and end with it or with the supervisor."""
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
        if os.getppid() != supervisor:
            os.kill(child, signal.SIGKILL)
        time.sleep(WATCH_S)


if __name__ == "__main__":
    main()
