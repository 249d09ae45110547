"""The table of policies: each is one line, a choice of the five parts."""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.core.parts.batch import Chunked, WholePrefill
from services.scheduler.core.parts.memory import PeakEstimate, Reserve, Watermark
from services.scheduler.core.parts.order import ClassThenArrival, FirstCome
from services.scheduler.core.parts.relief import LeastLost, Newest
from services.scheduler.core.parts.tokens import Fixed, Unlimited
from services.scheduler.core.policy import Policy

# fmt: off
#                          order               memory          tokens       batch           relief
PRESETS: dict[str, Callable[[], Policy]] = {
    "orca":    lambda: Policy("orca",    FirstCome(),        Reserve(),      Unlimited(), WholePrefill(), Newest()),
    "sarathi": lambda: Policy("sarathi", FirstCome(),        Watermark(),    Fixed(512),  Chunked(),      Newest()),
    "orcinus": lambda: Policy("orcinus", ClassThenArrival(), PeakEstimate(), Fixed(2048), Chunked(),      LeastLost()),
}
# fmt: on


def preset(name: str) -> Policy:
    """A fresh policy of that name (parts may learn, so no two cores share one). Raises ValueError for another name."""
    try:
        return PRESETS[name]()
    except KeyError:
        raise ValueError(f"no policy {name!r}; there are {', '.join(sorted(PRESETS))}") from None
