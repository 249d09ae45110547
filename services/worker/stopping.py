"""SIGTERM and SIGINT of a worker: one that loads ends at once, one that serves is asked to end.

Python runs the handler of a signal when its main thread comes back from C, and while a worker loads that may take
minutes: a read, a large batch, a wait for other ranks. So a thread hears of the signal as well, from a socket to which
the interpreter writes at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger("orcinus.worker")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS_S = 1.0


class Stopping:
    """Made in the main thread, first of all; `serving` when there is something that has to be drained."""

    def __init__(self) -> None:
        self.grace_s = 0.0
        """What a rank that loads gives rank 0, which is told to end in the same moment, to do so first."""
        self._told: Callable[[], None] | None = None
        self._early = False  # a signal came while loading: the thread ends the process
        self._lock = threading.Lock()
        self._hears, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        for number in SIGNALS:
            signal.signal(number, self._heard)
        signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._loop, name="stopping", daemon=True).start()

    def serving(self, told: Callable[[], None]) -> None:
        """From now on `told` is called for each signal, in the main thread, from which this is called too."""
        with self._lock:
            self._told = told
            if self._early:
                self._told = None
        while self._early:
            time.sleep(LAST_WORDS_S)
        signal.set_wakeup_fd(-1)

    def _heard(self, *_: object) -> None:
        if self._told is not None:
            self._told()
        else:
            self._early = True

    def _loop(self) -> None:
        while heard := self._hears.recv(1):
            if heard[0] in SIGNALS:
                with self._lock:
                    if self._told is None:
                        self._end(heard[0])

    def _end(self, number: int) -> None:
        """Nobody knows of this worker yet. The kernel ends the ranks that it started."""
        time.sleep(self.grace_s)
        name = signal.Signals(number).name
        # A full pipe must not keep the process alive.
        speaker = threading.Thread(target=log.info, args=("%s while loading: stopping", name), daemon=True)
        speaker.start()
        speaker.join(LAST_WORDS_S)
        os._exit(0)
