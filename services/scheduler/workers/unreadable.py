"""Says in the log which decode worker can read the host tier of which prefill worker not: then nothing is handed over
between them, and half of the machines may do what the other half was meant for.

Called by the fleet about twice a second.
"""

from __future__ import annotations

import logging

from services.scheduler.core.core import Core
from services.scheduler.core.peers import unread
from services.scheduler.core.replica import Replica

log = logging.getLogger("orcinus.scheduler")


class Unread:
    """Warns of each pair once, as long as both are linked."""

    def __init__(self) -> None:
        self._said: list[tuple[Replica, Replica, str]] = []

    def look(self, core: Core, names: dict[int, str]) -> None:
        """names: the linked workers, by the number of their replica."""
        found = unread(core.alive)
        for pair in found:
            reader, owner, why = pair
            if pair not in self._said:
                log.warning(
                    "decode worker %s cannot read what prefill worker %s hands over: %s",
                    names.get(reader.number, "?"),
                    names.get(owner.number, "?"),
                    why,
                )
        self._said = found
