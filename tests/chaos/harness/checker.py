"""Judge a chaos run: pure functions over what was written down (history.py). Nothing lost, nothing twice.

Every request ends exactly once; the tokens of a choice are contiguous; what is told equals the undisturbed run; the
record in Redis says the same; epochs never fall; at rest the stack holds what it held before.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.harness.history import CUT, DONE, LATER, LEFT, REFUSED, SLOW, Event, History, Outcome, Rest

VIOLATIONS = ("lost", "doubled", "diverged", "leaked", "fenced", "crashed")
FINISHES = {"1": "stop", "2": "length", "3": "cancelled", "4": "deadline", "5": "error"}
"""Numbers of protos/queue.proto's Finish in a record."""

RETRIED = {"handed_over", "taken_over", "redis_unavailable", "redis_refused", "redis_memory", "no_scheduler"}
RETRIED |= {"shutting_down", CUT, LATER, LEFT, REFUSED}
"""Ends of a connection behind which the client goes on at the next one."""

ENDS: Mapping[str, set[str]] = {
    "stay": {DONE},
    "return": {DONE},
    "leave": {DONE, LEFT, "cancelled"},
    "cancel": {DONE, "cancelled"},
    "slow": {DONE, SLOW, "cancelled"},
    "background": {DONE},
}
"""How the last connection of each plan may end. One cut for slowness that returns sees `cancelled`."""

LASTING = ("requests:", "queue", "epoch", "batches:epoch", "keys:salt", "events", "dead")
"""Keys that may stay for ever (docs/redis.md), behind the prefix."""

MAX_SLIPPED, EVIDENCE = 64, 8
"""Tokens that may be told again or left out at once, and those behind them that have to be right again."""

MORE_FDS = 24
"""Connections of pools and keep-alive that a process at rest may hold beyond its first rest."""

MORE_RSS, MORE_RSS_MIB = 1.25, 64.0
"""A process at rest may have grown by this factor and so much beside: allocators keep what a burst took."""


@dataclass(frozen=True, slots=True)
class Violation:
    """kind: one of VIOLATIONS."""

    kind: str
    where: str
    text: str


def check(histories: Iterable[History], undisturbed: Mapping[str, Outcome]) -> list[Violation]:
    """Everything that is wrong with what clients were told."""
    known = list(histories)
    told = [violation for history in known for violation in check_told(history, undisturbed[history.template])]
    return [*told, *check_names(known)]


def check_names(histories: Iterable[History]) -> list[Violation]:
    """No two requests have one id."""
    owners: dict[str, int] = {}
    return [
        _say(history, "doubled", f"has the id of request {owners[history.request]}")
        for history in histories
        if history.request and owners.setdefault(history.request, history.number) != history.number
    ]


def agrees(history: History) -> bool:
    """Does the record say what the client was told? It may do so a little later: a stop string shortens it."""
    told = _Told(history)
    told.read()
    return not _record(history, told)


def check_rest(before: Rest, after: Rest) -> list[Violation]:
    """Everything that did not come back to what it was before the faults."""
    found = [Violation("leaked", name, f"{count} at rest") for name, count in after.sequences.items() if count]
    if after.blocks_free != after.blocks_total:
        found.append(Violation("leaked", "blocks", f"{after.blocks_free} of {after.blocks_total} are free"))
    for what, counts in (("queue", after.queue), ("entries", after.entries), ("pending", after.pending)):
        found += [Violation("leaked", f"{what} {name}", f"{count} at rest") for name, count in counts.items() if count]
    for key in after.lasting_keys:
        if not key.partition("}:")[2].startswith(LASTING):
            found.append(Violation("leaked", key, "has no TTL"))
    for name, fds in after.fds.items():
        if fds > before.fds.get(name, fds) + MORE_FDS:
            found.append(Violation("leaked", name, f"{fds} open files, before {before.fds[name]}"))
    for name, rss in after.rss_mib.items():
        if rss > before.rss_mib.get(name, rss) * MORE_RSS + MORE_RSS_MIB:
            found.append(Violation("leaked", name, f"{rss:.0f} MiB resident, before {before.rss_mib[name]:.0f}"))
    return found


def check_epochs(witness: str, epochs: Sequence[int]) -> list[Violation]:
    """Epochs in the order in which their steps were run, or their writes taken: an older scheduler is refused."""
    falls = [(led, late) for led, late in pairwise(epochs) if late < led]
    return [Violation("fenced", witness, f"epoch {late} after epoch {led}") for led, late in falls]


def check_exits(exits: Mapping[str, Sequence[int]], said: Mapping[str, int]) -> list[Violation]:
    """Processes that ended by themselves and never said why. exits: their statuses, of all ends; said: how often each
    wrote that it would."""
    found = []
    for name, statuses in exits.items():
        own = [status for status in statuses if status not in (0, -signal.SIGKILL)]
        if len(own) > said.get(name, 0):
            found.append(Violation("crashed", name, f"ended with {own}, and said {said.get(name, 0)} times why"))
    return found


def _say(history: History, kind: str, text: str) -> Violation:
    return Violation(kind, f"request {history.number} ({history.template}, {history.plan}, {history.request})", text)


def check_told(history: History, expected: Outcome | None) -> list[Violation]:
    """Everything that is wrong with what one client was told, and with the record of it.

    expected: None where the stack may draw other tokens after a fault; each is still told once, in its place.
    """
    if not history.accepted:
        fine = history.end == REFUSED
        return [] if fine else [_say(history, "lost", f"was never taken up and ended with {history.end or 'nothing'}")]
    told = _Told(history)
    problems = told.read()
    problems += _counted(history, told) if expected is None else _compare(history, told, expected)
    return [*_ends(history), *problems, *_record(history, told)]


def check_tokens(history: History, expected: Outcome) -> list[Violation]:
    """Everything that is wrong with the tokens alone: where Redis lost data, ends and records may differ."""
    told = _Told(history)
    return [*told.read(), *_compare(history, told, expected)]


def _ends(history: History) -> list[Violation]:
    found = []
    *earlier, last = history.connections
    if last.end not in ENDS[history.plan]:
        text = f"ended with {last.end or 'nothing'} {last.text}".strip()
        found.append(_say(history, "lost", f"{text} after {len(earlier)} other connections"))
    for connection in earlier:
        if connection.end == DONE:
            found.append(_say(history, "doubled", "was told to its end twice"))
        elif connection.end not in RETRIED:
            found.append(_say(history, "lost", f"went on after {connection.end} {connection.text}"))
    return found


class _Told:
    """What one client has, over all its connections, event by event."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.tokens: list[list[int]] = [[] for _ in range(history.choices)]
        self.texts = [""] * history.choices
        self.finishes = [""] * history.choices
        self.usages: list[dict[str, int]] = []
        self._last = [-2] * history.choices

    def read(self) -> list[Violation]:
        found: list[Violation] = []
        for connection in self._history.connections:
            if connection.usage is not None:
                self.usages.append(connection.usage)
            problems = [self._take(event) for event in connection.events]
            found += [_say(self._history, *problem) for problem in problems if problem]
        return found

    def _take(self, event: Event) -> tuple[str, str] | None:
        choice = event.choice
        if self.finishes[choice]:
            return "doubled", f"choice {choice} went on behind its end ({self.finishes[choice]})"
        problem = None if event.position is None else self._place(event)
        self.tokens[choice] += event.token_ids
        self.texts[choice] += event.text
        self.finishes[choice] = event.finish
        return problem

    def _place(self, event: Event) -> tuple[str, str] | None:
        """An event's id says how many tokens its client has with it; see docs/api.md, Streams."""
        position = [int(part) for part in (event.position or "").removesuffix("+").split(".")]
        choice = event.choice
        before, self._last = self._last, position
        moved = [number for number, (old, new) in enumerate(zip(before, position, strict=True)) if old != new]
        if moved != [choice] or position[choice] < before[choice]:
            return "doubled", f"event {event.position} of choice {choice} came behind {'.'.join(map(str, before))}"
        have, at = len(self.tokens[choice]) + len(event.token_ids), position[choice]
        # Text that only the end released counts as one token more; where that is not so, the finish will tell.
        least, most = (at - 1, at - 1) if event.finish else (at, at + 1)
        if have > most:
            return "doubled", f"{have - most} tokens of choice {choice} too many at event {event.position}"
        if have < least:
            return "lost", f"{least - have} tokens of choice {choice} missing at event {event.position}"
        return None


def _compare(history: History, told: _Told, expected: Outcome) -> list[Violation]:
    whole = history.end == DONE
    found = []
    for choice in range(history.choices):
        tokens, right = told.tokens[choice], expected.tokens[choice]
        if tokens != right[: len(tokens)]:
            at = next((i for i, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]), len(right))
            found.append(_say(history, _slip(tokens, right, at), f"token {at} of choice {choice} is another"))
        elif not expected.texts[choice].startswith(told.texts[choice]):
            found.append(_say(history, "diverged", f"the text of choice {choice} is another"))
        elif whole and len(tokens) < len(right):
            found.append(_say(history, "lost", f"choice {choice} ended with {len(tokens)} of {len(right)} tokens"))
        elif whole and (told.texts[choice], told.finishes[choice]) != (
            expected.texts[choice],
            expected.finishes[choice],
        ):
            found.append(_say(history, "diverged", f"choice {choice} ended as {told.finishes[choice]!r} or shorter"))
    if whole and told.usages != [expected.usage]:
        kind = "doubled" if len(told.usages) > 1 else "diverged"
        found.append(_say(history, kind, f"usage {told.usages}, undisturbed {expected.usage}"))
    return found


def _counted(history: History, told: _Told) -> list[Violation]:
    """Check the usage that was told against the tokens that were."""
    counts = [usage["completion_tokens"] for usage in told.usages]
    if history.end != DONE or counts == [sum(map(len, told.tokens))]:
        return []
    kind = "doubled" if len(counts) > 1 else "lost"
    return [_say(history, kind, f"usage counts {counts}, told are {sum(map(len, told.tokens))} tokens")]


def _slip(tokens: list[int], right: list[int], at: int) -> str:
    """What explains another token at this place: some that were there already, some left out, or neither."""
    for kind, told, rest in (("doubled", tokens, right[at:]), ("lost", right, tokens[at:])):
        for begin in range(at + 1, at + 1 + MAX_SLIPPED):
            evidence = min(len(told) - begin, len(rest), EVIDENCE)
            if evidence > 1 and told[begin : begin + evidence] == rest[:evidence]:
                return kind
    return "diverged"


def _record(history: History, told: _Told) -> list[Violation]:
    """Check that the record in Redis ends as the client was told. A client that cancels or is slow may get it all."""
    record = history.record
    if record.get("state") != "finished":
        return [_say(history, "lost", f"its record is {record.get('state', 'gone')} after the end")]
    finishes = [FINISHES.get(number, number) for number in record.get("finish", "").split(",")]
    allowed = {"stop", "length"} | ({"cancelled"} if "cancelled" in ENDS[history.plan] else set())
    if set(finishes) - allowed:
        return [_say(history, "lost", f"its record ends as {finishes}")]
    if history.end == "cancelled" and "cancelled" not in finishes:
        return [_say(history, "diverged", f"the record ends as {finishes}, the client was told that it is cancelled")]
    if history.end != DONE or "cancelled" in finishes:
        return []
    if finishes != told.finishes:
        return [_say(history, "diverged", f"the record ends as {finishes}, the client was told {told.finishes}")]
    recorded, count = record.get("output_tokens"), sum(map(len, told.tokens))
    if recorded != str(count):
        return [_say(history, "diverged", f"the record has {recorded} tokens, the client {count}")]
    return []
