"""The chaos checker: a run without fault is green, and each kind of planted bug turns it red."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.harness.checker import MORE_FDS, check, check_epochs, check_exits, check_rest, check_told
from tests.chaos.harness.history import Connection, Event, History, Outcome, Rest

TOKENS = [[5, 6, 7, 8, 9], [11, 12, 13]]
EXPECTED = {"two": Outcome(TOKENS, ["abcde", "xyz"], ["length", "stop"], {"completion_tokens": 8})}
RECORD = {"state": "finished", "finish": "2,1", "output_tokens": "8"}


def event(choice: int, ids: list[int], text: str, position: str, finish: str = "", at_s: float = 0.0) -> Event:
    return Event(at_s, choice, ids, text, finish, position)


def good() -> History:
    """Two choices over three connections: the first is cut, the second handed over, the third told to the end."""
    first = [event(0, [5, 6], "ab", "1.-2", at_s=1.0), event(1, [11], "", "1.0", at_s=1.1)]
    second = [event(0, [7], "c", "2.0", at_s=4.0)]
    third = [
        event(1, [12, 13], "xy", "2.2", at_s=4.1),
        event(1, [], "z", "2.3", at_s=4.2),  # text that the end released
        event(1, [], "", "2.4", "stop", at_s=4.2),
        event(0, [8], "d", "3.4", at_s=4.3),
        event(0, [9], "e", "5.4", at_s=4.4),
        event(0, [], "", "6.4", "length", at_s=4.4),
    ]
    connections = [
        Connection(0, 0.0, "", first, None, "cut"),
        Connection(1, 2.0, "r:1.0", second, None, "handed_over"),
        Connection(0, 3.0, "r:2.0", third, {"completion_tokens": 8}, "done"),
    ]
    return History(7, "two", 2, True, "stay", "", "r", connections, dict(RECORD))


def cancelled() -> History:
    history = good()
    del history.connections[1:]
    history.plan, history.connections[0].end = "cancel", "cancelled"
    history.record = {"state": "finished", "finish": "3,3", "output_tokens": "4"}
    return history


def refused() -> History:
    return History(8, "two", 2, True, "stay", connections=[Connection(0, 0.0, end="refused")])


def kinds(*histories: History) -> set[str]:
    return {violation.kind for violation in check(histories, EXPECTED)}


@pytest.mark.parametrize("make", [good, cancelled, refused])
def test_a_run_without_fault_is_green(make: Callable[[], History]) -> None:
    assert check([make()], EXPECTED) == []


PLANTED: dict[str, tuple[str, Callable[[History], Any]]] = {
    "no token": ("lost", lambda it: it.connections[1].events.clear()),
    "no last token": ("lost", lambda it: it.connections[2].events[4].token_ids.clear()),
    "no end": ("lost", lambda it: setattr(it.connections[2], "end", "gave_up")),
    "no record": ("lost", lambda it: it.record.clear()),
    "no acknowledgement": ("lost", lambda it: it.record.update(state="running")),
    "a failure": ("lost", lambda it: setattr(it.connections[2], "end", "generation_failed")),
    "a cancel without a wish": ("lost", lambda it: setattr(it.connections[2], "end", "cancelled")),
    "a token twice": ("doubled", lambda it: it.connections[1].events[0].token_ids.append(7)),
    "an event twice": ("doubled", lambda it: it.connections[2].events.insert(0, it.connections[1].events[0])),
    "the end twice": ("doubled", lambda it: it.connections.append(copy.deepcopy(it.connections[2]))),
    "the finish twice": ("doubled", lambda it: it.connections[2].events.append(it.connections[2].events[-1])),
    "the usage twice": ("doubled", lambda it: setattr(it.connections[1], "usage", {"completion_tokens": 8})),
    "another token": ("diverged", lambda it: it.connections[2].events[0].token_ids.__setitem__(1, 99)),
    "another text": ("diverged", lambda it: setattr(it.connections[2].events[3], "text", "D")),
    "another finish": ("diverged", lambda it: setattr(it.connections[2].events[-1], "finish", "stop")),
    "another usage": ("diverged", lambda it: setattr(it.connections[2], "usage", {"completion_tokens": 9})),
    "another recorded finish": ("diverged", lambda it: it.record.update(finish="2,2")),
    "another recorded length": ("diverged", lambda it: it.record.update(output_tokens="9")),
}


@pytest.mark.parametrize(("kind", "plant"), PLANTED.values(), ids=PLANTED)
def test_a_planted_bug_is_found(kind: str, plant: Callable[[History], Any]) -> None:
    history = good()
    plant(history)
    assert kind in kinds(history)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("another token", set()),
        ("no token", {"lost", "doubled", "diverged"}),
        ("no end", {"lost"}),
        ("another usage", {"lost"}),
    ],
)
def test_tokens_are_counted_where_none_are_expected(name: str, found: set[str]) -> None:
    history = good()
    PLANTED[name][1](history)
    assert {violation.kind for violation in check_told(history, None)} == found
    assert check_told(history, EXPECTED["two"])


def test_request_without_a_connection_is_lost_and_an_id_twice_is_doubled() -> None:
    history, other = refused(), good()
    history.connections.clear()
    assert kinds(history) == {"lost"}
    other.number = 9
    assert kinds(good(), other) == {"doubled"}


@pytest.mark.parametrize(
    ("make", "plan", "end", "finish", "found"),
    [
        (refused, "stay", "internal_error", "", {"lost"}),  # it was never taken up, and not refused
        (cancelled, "cancel", "record_lost", "3,3", {"lost"}),
        (cancelled, "cancel", "cancelled", "3,5", {"lost"}),
        (good, "cancel", "done", "2,3", set()),  # the whole answer came before the cancel
        (good, "stay", "done", "2,3", {"lost"}),
        (cancelled, "slow", "slow_client", "3,3", set()),
        (cancelled, "stay", "slow_client", "3,3", {"lost"}),
        (good, "background", "done", "2,1", set()),
        (good, "background", "cancelled", "2,1", {"lost", "diverged"}),
    ],
)
def test_end_is_lost_unless_plan_of_the_client_explains_it(
    make: Callable[[], History], plan: str, end: str, finish: str, found: set[str]
) -> None:
    history = make()
    history.plan, history.connections[-1].end = plan, end
    if finish:
        history.record["finish"] = finish
    assert kinds(history) == found


def rest() -> Rest:
    return Rest(
        blocks_free=64, blocks_total=64, sequences={"running": 0, "parked": 0}, queue={"tokens": 0},
        entries={"normal": 0}, pending={"normal": 0}, lasting_keys=["orcinus:{m}:queue", "orcinus:{m}:requests:low"],
        fds={"worker": 20}, rss_mib={"worker": 300.0},
    )  # fmt: skip


def test_stack_at_rest_is_green_also_where_process_is_new() -> None:
    after = rest()
    after.fds["gateway-1"], after.rss_mib["gateway-1"] = 999, 9999.0
    assert check_rest(rest(), after) == []


@pytest.mark.parametrize(
    ("where", "leak"),
    [
        ("blocks", {"blocks_free": 63}), ("running", {"sequences": {"running": 1}}),
        ("parked", {"sequences": {"parked": 1}}), ("queue tokens", {"queue": {"tokens": -4}}),
        ("entries normal", {"entries": {"normal": 1}}), ("pending normal", {"pending": {"normal": 1}}),
        ("orcinus:{m}:out:r:0", {"lasting_keys": ["orcinus:{m}:out:r:0"]}),
        ("worker", {"fds": {"worker": 21 + MORE_FDS}}), ("worker", {"rss_mib": {"worker": 600.0}}),
    ],
)  # fmt: skip
def test_a_leak_is_found(where: str, leak: dict[str, Any]) -> None:
    assert [(found.kind, found.where) for found in check_rest(rest(), replace(rest(), **leak))] == [("leaked", where)]


def test_an_older_epoch_behind_a_newer_one_is_found() -> None:
    assert check_epochs("steps", [3, 3, 4, 4, 9]) == []
    assert [found.kind for found in check_epochs("steps", [3, 4, 3, 4])] == ["fenced"]


def test_a_process_that_ends_without_a_word_is_found() -> None:
    exits = {"worker": [-9, 0, 1], "scheduler-0": [1], "gateway-0": [0, -9]}
    assert check_exits(exits, {"worker": 1, "scheduler-0": 1}) == []
    found = check_exits({**exits, "scheduler-0": [1, 1], "redis": [-11]}, {"worker": 1, "scheduler-0": 1})
    assert [(violation.kind, violation.where) for violation in found] == [
        ("crashed", "scheduler-0"),
        ("crashed", "redis"),
    ]


def told(tokens: list[int]) -> set[str]:
    """Kinds of what is wrong with a stream of one choice that should have said 0 to 29, one token an event."""
    events = [event(0, [token], "", str(place)) for place, token in enumerate(tokens)]
    usage = {"completion_tokens": 30}
    connection = Connection(0, 0.0, "", [*events, event(0, [], "", str(len(tokens) + 1), "length")], usage, "done")
    history = History(1, "one", 1, True, "stay", "", "r", [connection])
    history.record = {"state": "finished", "finish": "2", "output_tokens": str(len(tokens))}
    return {found.kind for found in check([history], {"one": Outcome([list(range(30))], [""], ["length"], usage)})}


def test_slipped_tokens_are_doubled_or_lost_despite_ordered_ids() -> None:
    right = list(range(30))
    assert told(right) == set()
    assert told([*right[:12], *right[9:]]) == {"doubled"}
    assert "lost" in told([*right[:12], *right[15:]])
    assert told([*right[:12], 99, *right[13:]]) == {"diverged"}
