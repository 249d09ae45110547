"""Run `orcinus gateway --processes N`: a parent that serves nothing and keeps N gateways behind the same ports.

Each child is a gateway of its own, with its own id, heartbeat and connections to Redis, and listens by SO_REUSEPORT:
the kernel spreads connections over the listeners. The parent keeps the ports from other programs, passes signals on and
restarts what dies. It imports little and has one thread, so that it may fork.

The children find each other in a folder that only this user may enter. A parent that is killed cannot remove it, so the
next one does: a folder is in use while it is locked, and the kernel drops a lock when the last process with it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from services.gateway.http.listeners import reserve
from shared.errors import ConfigurationError
from shared.restarts import Backoff
from shared.settings import GatewaySettings
from shared.telemetry import logs

log = logging.getLogger("orcinus.gateway")

PREFIX = "orcinus-gateway-"
MOST_PATH_BYTES = 90
"""The address of a unix socket has 108."""


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """Return a new one that only this user may enter; removes those of the dead. Children that are forked hold it, too.

    Raise ConfigurationError where the system's temporary folder has too long a name for sockets.
    """
    with contextlib.ExitStack() as held:
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            held.callback(shutil.rmtree, path, ignore_errors=True)
            if len(os.fsencode(path)) > MOST_PATH_BYTES:
                raise ConfigurationError(f"{path}: path too long for a socket; set TMPDIR to a shorter one")
            if held.enter_context(_locked(path)):
                break  # else another one that starts took it for a dead one's, in the moment before the lock
        for other in path.parent.glob(f"{PREFIX}*"):
            with _locked(other) as dead:
                if dead:
                    shutil.rmtree(other, ignore_errors=True)
        yield path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a folder of this user within the block; yield whether that worked."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield _taken(folder) and _still(path, folder)
    finally:
        os.close(folder)


def _taken(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # in use, or on a file system without locks
        return False
    return True


def _still(path: Path, folder: int) -> bool:
    """It may have been removed between its opening and its lock."""
    found = os.fstat(folder)
    try:
        return found.st_uid == os.getuid() and os.path.samestat(found, os.lstat(path))
    except FileNotFoundError:
        return False


PR_SET_PDEATHSIG = 1
STOP = (signal.SIGTERM, signal.SIGINT)
PASSED_ON = (signal.SIGHUP, signal.SIGUSR1)
HANDLED = (*STOP, *PASSED_ON, signal.SIGCHLD)
RESTARTS = Backoff(factor=2.0, cap_s=5.0, settled_s=30.0)
HUNG_S = 30.0
"""A process that serves and is silent for so long is ended: the kernel would go on giving it connections."""
LAST_WORDS_S = 2.0
"""In which it writes where it hangs, and may still be heard."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a gateway knows of its being one of several."""

    number: int
    count: int
    folder: Path
    """Where each process listens on NUMBER.sock."""
    beats: int
    """A pipe to the parent, which wants a byte every second from when the gateway serves on."""


@dataclass(slots=True)
class Member:
    """One of the processes, as the parent sees it."""

    number: int
    pid: int = 0  # 0: none runs
    pipe: int = -1  # reading end of the one that Place names; -1: closed
    serves_since: float | None = None
    heard_at: float = 0.0  # or when it was started
    hung_at: float = 0.0  # when it was found silent; 0: it is not
    has_left: bool = False
    deaths: list[float] = field(default_factory=list)  # since the last process that served for long
    start_at: float = 0.0

    @property
    def serves(self) -> bool:
        return self.serves_since is not None

    def silent_s(self, now: float) -> float:
        """0 when none runs."""
        return now - self.heard_at if self.pid else 0.0


def run(settings: GatewaySettings, serve: Callable[[GatewaySettings, Place], int]) -> int:
    """Run the parent until all children have ended; block meanwhile.

    Each child calls `serve`, which imports what the parent must not. Return 0 after a clean stop or when all were
    drained, 1 when one could not be stopped cleanly or the first died before it served. Raise ConfigurationError for a
    port that is taken or a machine that cannot share one.
    """
    logs.setup("gateway", settings.log_level, settings.log_json)
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"ORCINUS_PROCESSES={settings.processes}: only Linux spreads a port; use 1")
    ports = [(settings.host, settings.port, "port"), (settings.ops_host, settings.ops_port, "ops port")]
    if settings.grpc_port:
        ports.append((settings.host, settings.grpc_port, "gRPC port"))
    with contextlib.ExitStack() as held, own_folder() as folder:
        sockets = [held.enter_context(contextlib.closing(reserve(*port))) for port in ports]
        return Processes(settings, sockets, folder, serve).run()


class Processes:
    """The parent's loop. It wakes for signals (a child's death is one), a child that serves, a restart that is due."""

    def __init__(
        self,
        settings: GatewaySettings,
        reserved: list[socket.socket],
        folder: Path,
        serve: Callable[[GatewaySettings, Place], int],
    ) -> None:
        self._settings = settings
        self._serve = serve
        self._reserved = reserved
        self._folder = folder
        self._members = [Member(number) for number in range(settings.processes)]
        self._stopping = False
        self._worst = 0

    def run(self) -> int:
        """Until all have ended."""
        self._wake, waker = socket.socketpair()
        self._waker = waker
        for end in (self._wake, waker):
            end.setblocking(False)
        for number in HANDLED:
            signal.signal(number, lambda *_: None)  # it only has to wake the loop, which reads which it was
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        code: int | None = None
        while code is None:
            now = time.monotonic()
            code = self._reap(now)
            if code is None:
                self._start_due(now)
                self._wait(now)
        signal.set_wakeup_fd(-1)
        return code

    def _reap(self, now: float) -> int | None:
        """Reap ended processes. Return the exit code once none is left, or the first could not serve."""
        for member in self._members:
            if not member.pid:
                continue
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if not pid:
                continue
            code = os.waitstatus_to_exitcode(status)
            member.pid = 0
            with contextlib.suppress(BlockingIOError):
                while member.pipe >= 0:
                    self._hear(member, now)  # to the end, which closes it
            if self._stopping:
                self._worst = max(self._worst, int(code not in (0, -signal.SIGTERM)))
            elif not (member.serves or any(other.serves or other.deaths for other in self._members)):
                return code if code > 0 else 1  # it has said why; nothing has been served yet
            elif code == 0:
                member.has_left = True
                log.info("process %d was drained and has ended; %d remain", member.number, self._running())
            else:
                self._died(member, f"exit code {code}" if code > 0 else f"signal {-code}", now)
        if not self._running() and (self._stopping or all(member.has_left for member in self._members)):
            log.info("all processes have ended")
            return self._worst
        return None

    @staticmethod
    def _died(member: Member, how: str, now: float) -> None:
        served_s = None if member.serves_since is None else now - member.serves_since
        member.deaths = RESTARTS.counted(member.deaths, now, served_s)
        member.serves_since, member.hung_at = None, 0.0
        delay_s = RESTARTS.delay_s(len(member.deaths))
        member.start_at = now + delay_s
        log.warning("process %d died (%s); restart in %.1f s", member.number, how, delay_s)

    @staticmethod
    def _hear(member: Member, now: float) -> None:
        """Once there is something to read, if only the end."""
        if os.read(member.pipe, 4096):
            member.heard_at, member.hung_at = now, 0.0
            if not member.serves:
                member.serves_since = now
        else:
            os.close(member.pipe)
            member.pipe = -1

    def _running(self) -> int:
        return sum(1 for member in self._members if member.pid)

    def _start_due(self, now: float) -> None:
        """Start what is due; the first process alone until it serves, so that wrong settings are reported once."""
        if self._stopping:
            return
        first = self._members[0]
        begun = first.serves or any(member.deaths for member in self._members) or first.has_left
        for member in self._members if begun else [first]:
            if not member.pid and not member.has_left and member.start_at <= now:
                try:
                    self._start(member)
                except OSError as error:  # no memory, no process left; the other children continue
                    self._died(member, f"cannot be started: {error}", now)

    def _start(self, member: Member) -> None:
        read, beats = os.pipe()
        for end in (read, beats):
            os.set_blocking(end, False)
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # else a signal to the child would wake the parent's loop
        try:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                os._exit(self._be(Place(member.number, len(self._members), self._folder, beats), parent))
            member.pid, member.pipe, member.heard_at = pid, read, time.monotonic()
        except OSError:
            os.close(read)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            os.close(beats)

    def _be(self, place: Place, parent: int) -> int:
        """In the child: a gateway until it ends. Return its exit code."""
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                return 1  # it died before the kernel knew that we care
            self._let_go()
            return self._serve(self._settings, place)
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BaseException:  # nothing of the parent's stack may run here
            traceback.print_exc()
            return 1
        finally:
            sys.stderr.flush()

    def _let_go(self) -> None:
        """Close what only the parent needs: its sockets, its signals, the other children's pipes."""
        signal.set_wakeup_fd(-1)
        # A terminal sends SIGINT to all, and only the parent acts on it. The gateway handles the rest once it runs.
        for number in HANDLED:
            known = number in (signal.SIGTERM, signal.SIGCHLD)
            signal.signal(number, signal.SIG_DFL if known else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        for end in (self._wake, self._waker, *self._reserved):
            end.close()
        for member in self._members:
            if member.pipe >= 0:
                os.close(member.pipe)

    def _wait(self, now: float) -> None:
        due = [each.start_at - now for each in self._members if each.deaths and not each.pid and not each.has_left]
        pipes = {member.pipe: member for member in self._members if member.pipe >= 0}
        ends: list[int] = [self._wake.fileno(), *pipes]
        readable, _, _ = select.select(ends, [], [], max(0.0, min([1.0, *due])))
        now = time.monotonic()
        for end in readable:
            if end == self._wake.fileno():
                for number in self._signals():
                    self._on_signal(number)
            else:
                self._hear(pipes[end], now)
        for member in self._members:
            if member.silent_s(now) > (HUNG_S if member.serves else self._settings.process_start_s):
                self._end_hung(member, now)

    @staticmethod
    def _end_hung(member: Member, now: float) -> None:
        """End a process that is still silent at a second look: on a machine that slept, the parent wakes first."""
        if not member.hung_at:
            member.hung_at = now
            what = "has been silent for" if member.serves else "does not serve after"
            log.error("process %d %s %.0f s; killing it", member.number, what, member.silent_s(now))
            os.kill(member.pid, signal.SIGUSR1)
        elif now - member.hung_at > LAST_WORDS_S:
            os.kill(member.pid, signal.SIGKILL)

    def _signals(self) -> Iterator[int]:
        with contextlib.suppress(BlockingIOError):
            while numbers := self._wake.recv(4096):
                yield from numbers

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if number in STOP:
            self._stopping = True
            number = signal.SIGTERM
        for member in self._members:
            if member.pid:
                os.kill(member.pid, number)
