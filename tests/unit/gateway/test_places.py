"""Retry-After of refused requests: behind those that were sent away before, and kept when they come back."""

from __future__ import annotations

import pytest

from services.gateway import admission
from services.gateway.admission import HORIZON_S, Places
from services.gateway.kserve.tensors import body_of
from services.gateway.request import content_of


def has_place(places: Places, content: int, now: float) -> bool:
    with places.claim(content, now) as found:
        return found


def test_first_refused_request_comes_when_there_is_room() -> None:
    assert Places().promise(1, "normal", 3.2, 0.5, 100.0) == 4
    assert Places().promise(1, "normal", 0.0, 0.5, 100.0) == 1


def test_refused_requests_come_one_behind_the_other() -> None:
    found = Places()
    assert [found.promise(number, "normal", 2.0, 1.5, 100.0) for number in range(4)] == [2, 4, 5, 7]
    assert found.promise(9, "normal", 2.0, 1.5, 106.0) == 2, "the work of four has drained"


def test_time_is_that_at_the_rate_which_admitted_requests_leave() -> None:
    found = Places()
    for _ in range(10):
        found.admitted("high", 0.5, 100.0)
    assert found.spare("normal", 100.0) == pytest.approx(0.5)
    assert found.promise(1, "normal", 3.0, 0.0, 100.0) == 6
    assert found.promise(2, "realtime", 3.0, 0.0, 100.0) == 3, "the others are behind it"
    assert found.promise(3, "normal", 3.0, 0.0, 200.0) == 3, "nothing came for long"
    found.admitted("low", 10.0, 200.0)
    assert found.promise(4, "low", 3.1, 0.0, 200.0) >= HORIZON_S, "a lasting overload"


def test_time_beyond_the_horizon_is_spread_and_promises_nothing() -> None:
    found = Places()
    after = {found.promise(number, "normal", HORIZON_S, 1.0, 100.0) for number in range(50)}
    assert min(after) >= HORIZON_S and max(after) <= 2 * HORIZON_S and len(after) > 10
    assert found.promise(99, "normal", 2.0, 1.0, 100.0) == 2
    assert not has_place(found, 0, 100.0 + HORIZON_S)


@pytest.mark.parametrize(("after_s", "kept"), [(1.9, False), (2.0, True), (3.0, True), (18.0, True), (18.1, False)])
def test_place_is_kept_from_shortly_before_its_time(after_s: float, kept: bool) -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert has_place(found, 1, 100.0 + after_s) is kept


def test_place_is_spent_once_by_the_same_request() -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert not has_place(found, 2, 103.0)
    assert not has_place(found, 1, 100.5), "too early, which does not lose it"
    with found.claim(1, 103.0) as first, found.claim(1, 103.0) as copy:
        assert (first, copy) == (True, False)
    assert has_place(found, 1, 103.0), "it was given back"
    found.spend(1)
    assert not has_place(found, 1, 103.0)


def test_refused_copy_leaves_the_place_that_another_one_is_about_to_claim() -> None:
    found = Places()
    found.promise(1, "normal", 3.0, 1.0, 100.0)
    assert has_place(found, 1, 103.2), "for its turn"
    assert found.promise(1, "normal", 3.0, 1.0, 103.3) == 3
    assert has_place(found, 1, 103.4), "and for the queue"
    found.spend(1)
    assert found.promise(1, "normal", 2.0, 1.0, 103.5) == 2, "a place of its own"


def test_place_is_of_one_tenant_and_body() -> None:
    found = {content_of(tenant, body) for tenant, body in (("a", b"{}"), ("a", b"{ }"), ("b", b"{}"), ("a", b"{}"))}
    assert len(found) == 3


def test_body_of_a_grpc_request_is_the_same_in_any_order_of_its_map() -> None:
    assert body_of({"prompt": "x", "seed": {"b": 1, "a": 2}}) == body_of({"seed": {"a": 2, "b": 1}, "prompt": "x"})


def test_request_that_comes_back_early_moves_no_other_back() -> None:
    found = Places()
    assert [found.promise(1, "normal", 1.0, 0.5, 100.0 + at / 10) for at in range(10)] == [1] * 10
    assert found.promise(2, "normal", 1.0, 0.5, 100.0) == 2


def test_places_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_PLACES", 2)
    found = Places()
    assert [found.promise(number, "normal", 1.0, 0.0, 100.0) for number in range(2)] == [1, 1]
    assert found.promise(3, "normal", 1.0, 0.0, 100.0) >= HORIZON_S
    assert not has_place(found, 3, 200.0)
    assert found.promise(3, "normal", 1.0, 0.0, 200.0) == 1
