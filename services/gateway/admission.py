"""Admit requests: decide whether there is room, begin, resume and adopt their delivery, word the refusals.

Class `low` is shed first: bounds of queue and wait are a share of the settings by class. `Turns` orders requests before
they are checked and turned into tokens, which costs most. `Admission` compares a request with the last look at Redis
before anything is written; enqueue.lua checks `Bounds`, since it alone sees every gateway.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from services.gateway.auth import Caller, Keyring
from services.gateway.cluster import MAX_MEMORY_SHARE, STALE_S, Cluster, Forecast, Snapshot
from services.gateway.delivery.background import BackgroundTasks
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.delivery.stream import Generation, Position, RequestStream
from services.gateway.errors import (
    RETRY,
    ApiError,
    invalid,
    memory_low,
    redis_silent,
    shutting_down,
    taken_over,
    unavailable,
)
from services.gateway.metrics import Metrics
from services.gateway.request import (
    ARRIVAL,
    BODY_BYTES_PER_TOKEN,
    CLASS_SHARES,
    PLACES_SHARE,
    Arrival,
    FullBacklog,
    GenerationSpec,
    Line,
    TenantThreads,
    WaitingRequest,
    backlog_full,
    deadline_error,
)
from services.gateway.text.tokenizer import ModelText
from services.gateway.tracing import Tracing
from shared.dead_letters import integer
from shared.keys import CLASSES
from shared.settings import GatewaySettings
from shared.text.logprobs import prompt_record_bytes

REDIS_SHARE = 0.5
"""Share of Redis's maxmemory that requests may hold, and what stays of them behind their ends, where
ORCINUS_MAX_QUEUED_BYTES is 0. The rest below MAX_MEMORY_SHARE is for tokens and what the allocator adds.
"""
CONNECTIONS_SHARE = 0.9
"""Share of ORCINUS_MAX_CONNECTIONS that requests may hold; the rest is for refusals and questions."""
PLACED = frozenset({"queue_full", "tenant_queue_full", "overloaded", "slo_unreachable", "deadline_unreachable"})
"""Refusals that name a place."""
HORIZON_S = 60.0
"""No place is promised beyond: the answer is a time between one and two horizons, so that not all come back at once."""
ADMITTED_S = 10.0
"""Over which the work of admitted requests is averaged."""
LEAST_SPARE = 0.05
IDLE_SPARE = 0.9
"""From here on all of the rate counts as left."""
EARLY_S = 1.0
LATE_S = 15.0
"""A place is kept from so much before its time to so much after."""
MAX_PLACES = 65_536
"""At a time; the rate of the workers allows fewer in a horizon, unless requests are tiny."""
DEADLINE_GRACE_S = 0.5
"""The scheduler ends a request at its deadline; after so much more the gateway does."""
REREAD_BYTES = 192 << 20
"""Of answers and conversations that are read again at a time, as they are stored; what is made of them takes up to
seven times as much. One tenant, where there are keys of others, may have half.
"""
CONVERSATION_BYTES = 256 << 20
"""Of conversations that requests hold until they are stored with the answers, as they are stored; a tenant may have
half, as above.
"""
BODIES = 64
"""Of the largest size, that may come in at a time; a tenant may send half, as above. Each counts once it is longer than
a piece of `BodyLimit`.
"""
TOKEN_BYTES = 4
MANY_REREADS = "too_many_answers"
MANY_BODIES = "too_many_bodies"
TURNS = 4
"""Requests that begin in one round of the event loop. In the same round it accepts connections, reads heads and bodies
and delivers tokens, so these wait for that many new requests, and not for a crowd of them.
"""
AGAIN_S = 1.0
"""For so long at most, and not beyond its Retry-After, a refusal of the queue holds for more requests of its tenant and
class: the forecasts behind it are as old.
"""
MAX_AGAIN = 4096
"""Refusals that are kept; less than 1 KiB each."""
RECENT = 65_536
UNSEEN_S = 0.5
"""Mean age of statistics when they are first seen: they are read once a second."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that enqueue.lua checks for one request, and the dispatcher's backlog before it. `late`: the refusal when
    its class waits too long, else None.
    """

    priority: str
    prompt_tokens: int
    class_tokens: int  # that may wait, of all classes together
    tenant_tokens: int  # of its tenant that may wait
    class_bytes: int  # of requests in Redis, of all classes together; 0 means no limit
    tenant_bytes: int  # of its tenant
    share: float  # of the backlog, for all classes together
    tenant_share: float  # of that, for its tenant
    deadline_ms: int  # that it sets; 0 means none
    late: ApiError | None

    @classmethod
    def of(
        cls,
        settings: GatewaySettings,
        spec: GenerationSpec,
        caller: Caller,
        forecast: Forecast | None,
        redis_bytes: int = 0,
        has_place: bool = False,
    ) -> Bounds:
        """Compute the bounds of a request. forecast: of its class, None when unknown. redis_bytes: Redis's maxmemory,
        0 when it has none. has_place: it was refused and told to come now.
        """
        class_share = CLASS_SHARES[spec.priority] * (1 + PLACES_SHARE if has_place else 1)
        class_tokens = int(class_share * settings.max_queued_tokens)
        most_bytes = settings.max_queued_bytes or REDIS_SHARE * redis_bytes
        class_bytes = math.ceil(class_share * most_bytes)
        share = settings.tenant_queue_share if caller.has_others else 1.0
        late = overload_error(forecast, spec, settings.max_wait_s) if forecast and not has_place else None
        return cls(
            spec.priority,
            spec.prompt_tokens,
            class_tokens,
            int(share * class_tokens),
            class_bytes,
            math.ceil(share * class_bytes),
            CLASS_SHARES[spec.priority],
            share,
            spec.deadline_ms,
            late,
        )

    @property
    def is_late(self) -> bool:
        return self.late is not None

    def refusal(self, answer: list[Any], wait_s: Callable[[float], float]) -> ApiError | None:
        """Return the error for the answer of enqueue.lua; None when the request was accepted. wait_s: maps
        waiting tokens to the seconds until they have run.
        """
        match answer[0]:
            case b"full":
                return self._full(answer[1], wait_s)
            case b"tenant":
                return self._tenant_full(answer[1], answer[2], wait_s)
            case b"bytes":
                held_bytes, size, expires_ms, waiting_tokens = answer[1:]
                prefix = f"queue full for class {self.priority}"
                return self._bytes_full(
                    "queue_full", prefix, held_bytes, size, self.class_bytes, expires_ms, waiting_tokens, wait_s
                )
            case b"tenant bytes":
                held_bytes, size, expires_ms, waiting_tokens, tenants = answer[1:]
                prefix = f"queue full for this tenant in class {self.priority}"
                return self._bytes_full(
                    "tenant_queue_full",
                    prefix,
                    held_bytes,
                    size,
                    self.tenant_bytes,
                    expires_ms,
                    tenants * waiting_tokens,
                    wait_s,
                )
            case b"late":
                return self.late
            case b"backlog":
                return backlog_full(self.priority, FullBacklog(*answer[1:]), "Redis")
            case b"expired":
                return deadline_error(self.deadline_ms)
            case b"memory":
                return memory_low(answer[1] / answer[2])
            case b"rate":
                text = f"rate limit: the key has used up its {answer[2].decode()}; {RETRY}"
                return ApiError(429, text, code="rate_limit_exceeded", retry_after_s=answer[1] / 1000)
        return None

    def _full(self, waiting_tokens: int, wait_s: Callable[[float], float]) -> ApiError:
        return ApiError(
            429,
            f"queue full for class {self.priority}: {waiting_tokens} of at most {self.class_tokens} prompt tokens are "
            f"waiting; {RETRY}",
            code="queue_full",
            retry_after_s=wait_s(self._excess(waiting_tokens, self.class_tokens)),
        )

    def _tenant_full(self, held_tokens: int, tenants: int, wait_s: Callable[[float], float]) -> ApiError:
        """Return the 429 for a tenant with too many waiting tokens. Waiting tenants share the workers, so its tokens
        drain slower.
        """
        return ApiError(
            429,
            f"queue full for this tenant in class {self.priority}: {held_tokens} of at most {self.tenant_tokens} "
            f"prompt tokens are waiting; {RETRY}, or send less at a time",
            code="tenant_queue_full",
            retry_after_s=wait_s(tenants * self._excess(held_tokens, self.tenant_tokens)),
        )

    def _bytes_full(
        self,
        code: str,
        where: str,
        held_bytes: int,
        size: int,
        max_bytes: int,
        expires_ms: int,
        waiting_tokens: int,
        wait_s: Callable[[float], float],
    ) -> ApiError:
        """Return the 429 for too many bytes in Redis. Bytes of requests leave as these do, so the wait is that of an
        equal share of the waiting tokens. Bytes that are kept behind the ends leave at a known time, which is no place.
        """
        share = min(1.0, (held_bytes + size - max_bytes) / held_bytes)
        text = (
            f"{where}: requests that have not ended, and what stays of those of the last five minutes, hold "
            f"{held_bytes} of at most {max_bytes} bytes in Redis; {RETRY}, or send smaller requests"
        )
        if expires_ms:
            return ApiError(429, text, code=code, headers={"Retry-After": str(math.ceil(expires_ms / 1000))})
        return ApiError(429, text, code=code, retry_after_s=wait_s(share * waiting_tokens))

    def _excess(self, waiting_tokens: int, max_tokens: int) -> int:
        """Return the waiting tokens that have to run before this request is accepted. A request with none before it
        always is.
        """
        return min(waiting_tokens, waiting_tokens + self.prompt_tokens - max_tokens)


def overload_error(forecast: Forecast, spec: GenerationSpec, max_wait_s: float) -> ApiError | None:
    """Return the 429 for a request of a class that waits longer than allowed. Return None when the wait is allowed,
    when the request sets its own limit, and for a background request. A model wakes for what waits, so the time until
    then does not count.
    """
    limit_ms = 1000 * max_wait_s * CLASS_SHARES[spec.priority]
    if not limit_ms or spec.ttft_slo_ms or spec.background or forecast.ttft_ms <= limit_ms:
        return None
    return ApiError(
        429,
        f"overloaded: the first token is predicted in {forecast.ttft_ms:.0f} ms, the limit of class {spec.priority} is "
        f"{limit_ms:.0f} ms ({forecast.reason}); {RETRY}, or set ttft_slo_ms",
        code="overloaded",
        retry_after_s=rest_s(forecast.ttft_ms, limit_ms),
    )


def refuse_late(forecast: Forecast, name: str, limit_ms: int, code: str, more_ms: float = 0.0) -> None:
    """Raise ApiError(429) when the first token would come after a limit that the request sets, on a model that is
    awake by then. more_ms: of the limit that are needed for something else, such as the tokens after the first, or have
    passed. For a model that stays asleep no time to come back is named: a refusal does not wake it.
    """
    ttft_ms = forecast.ttft_ms + forecast.wake_ms
    if not limit_ms or ttft_ms + more_ms <= limit_ms:
        return
    about_ms = 100 * round(more_ms / 100)
    more = f" and about {about_ms} ms more are needed" if about_ms else ""
    if forecast.stays_asleep:
        raise ApiError(
            429,
            f"{name}: the model sleeps, the first token is predicted in {ttft_ms:.0f} ms{more}, later than {limit_ms} "
            f"ms, and a request with this limit does not wake it; send a longer {name}, or none",
            param=name,
            code=code,
        )
    raise ApiError(
        429,
        f"{name}: the first token is predicted in {ttft_ms:.0f} ms{more}, later than {limit_ms} ms "
        f"({forecast.reason}); {RETRY}, or send a longer {name}",
        param=name,
        code=code,
        retry_after_s=rest_s(ttft_ms, limit_ms - more_ms),
    )


def refuse_limits(forecast: Forecast, request: GenerationSpec | Arrival, passed_s: float) -> None:
    """Raise ApiError(429) for a limit of a request that cannot be kept. passed_s: since its arrival."""
    passed_ms = 1000 * passed_s
    refuse_late(forecast, "ttft_slo_ms", request.ttft_slo_ms, "slo_unreachable", passed_ms)
    more_ms = passed_ms + forecast.token_ms * (request.least_tokens - 1)
    refuse_late(forecast, "deadline_ms", request.deadline_ms, "deadline_unreachable", more_ms)


def rest_s(ttft_ms: float, limit_ms: float) -> float:
    """Return the seconds after which the remaining wait is within the limit."""
    return min(HORIZON_S, (ttft_ms - limit_ms) / 1000)


class RecentAdmissions:
    """What this gateway has admitted and the statistics of the schedulers do not show yet: they are a second old, and
    in an overload a second brings more than a deadline allows.
    """

    def __init__(self) -> None:
        self._admissions: deque[tuple[float, int, int, int]] = deque()  # when, class, tokens, sequences
        self._tokens = [0] * len(CLASSES)
        self._sequences = [0] * len(CLASSES)

    def add(self, spec: GenerationSpec, now: float) -> None:
        number = CLASSES.index(spec.priority)
        self._admissions.append((now, number, spec.prompt_tokens, spec.choices))
        self._tokens[number] += spec.prompt_tokens
        self._sequences[number] += spec.choices
        if len(self._admissions) > RECENT:
            self._forget()

    def added_to(self, forecast: Forecast, priority: str, snapshot: Snapshot) -> Forecast:
        """Return the forecast of a class behind what was admitted of it and better ones since the schedulers wrote."""
        since = min(snapshot.renewal_times.values(), default=snapshot.at) - UNSEEN_S
        while self._admissions and self._admissions[0][0] < since:
            self._forget()
        upto = CLASSES.index(priority) + 1
        return forecast.behind_more(sum(self._tokens[:upto]), sum(self._sequences[:upto]))

    def _forget(self) -> None:
        _, number, tokens, sequences = self._admissions.popleft()
        self._tokens[number] -= tokens
        self._sequences[number] -= sequences


@dataclass(slots=True)
class PromisedWork:
    """Seconds of work that were promised and are to come, at a moment."""

    seconds: float = 0.0
    at: float = 0.0

    def remaining_s(self, now: float) -> float:
        return max(0.0, self.seconds - (now - self.at))


class Places:
    """The places that this gateway has promised: a Retry-After that counts the requests that were sent away before.

    A time until there is room is true for one client, and while no other comes. The work of all that were told to come
    back is therefore kept as a backlog that drains with time, each further one is told to come behind it, and the time
    is that at the rate which admitted requests leave: where they take all of it, as in a lasting overload, there is
    none. A request that comes back in time, known by its content, has a place: it may exceed the bounds that refused
    it, so that new ones do not take what was promised.
    """

    def __init__(self) -> None:
        self._promised_work = PromisedWork()
        self._due: dict[int, float] = {}  # oldest promise first
        self._claims: set[int] = set()
        self._admitted_s = [0.0] * len(CLASSES)  # seconds of work, which count less the older they are
        self._admitted_at = 0.0

    def count_admitted(self, priority: str, work_s: float, now: float) -> None:
        """Count the work of an admitted request."""
        faded = math.exp((self._admitted_at - now) / ADMITTED_S)
        self._admitted_s = [faded * seconds for seconds in self._admitted_s]
        self._admitted_at = now
        self._admitted_s[CLASSES.index(priority)] += work_s

    def spare(self, priority: str, now: float) -> float:
        """Return the share of the workers' rate that admitted requests of this class and better ones have left."""
        seconds = sum(self._admitted_s[: CLASSES.index(priority) + 1])
        left = 1 - seconds * math.exp((self._admitted_at - now) / ADMITTED_S) / ADMITTED_S
        return 1.0 if left >= IDLE_SPARE else max(LEAST_SPARE, left)

    def promise(self, content: int, priority: str, wait_s: float, work_s: float, now: float) -> int:
        """Return the seconds after which a refused request should come back, at least 1.

        wait_s: until there is room when nothing else comes. work_s: its own work at the rate of the workers.
        """
        due = self._due.get(content)
        if due is not None and now <= due + LATE_S:  # its work is counted; of copies, one may be on its way in
            return max(1, math.ceil(due - now if now < due else min(wait_s, HORIZON_S)))
        wait_s = (wait_s + self._promised_work.remaining_s(now)) / self.spare(priority, now)
        if wait_s >= HORIZON_S or len(self._due) >= MAX_PLACES:
            return math.ceil(random.uniform(HORIZON_S, 2 * HORIZON_S))  # noqa: S311 - spread, no secret
        self._promised_work = PromisedWork(self._promised_work.remaining_s(now) + work_s, now)
        self._due.pop(content, None)
        self._due[content] = now + wait_s
        return max(1, math.ceil(wait_s))

    @contextmanager
    def claim(self, content: int, now: float) -> Iterator[bool]:
        """Hold the place of a request: whether it has one now. Of several with one content only one has it at a time,
        and it has it again afterwards unless it spends it.
        """
        while self._due and now - (first := next(iter(self._due.items())))[1] > LATE_S:
            del self._due[first[0]]
        due = self._due.get(content)
        if due is None or not due - EARLY_S <= now <= due + LATE_S or content in self._claims:
            yield False
            return
        self._claims.add(content)
        try:
            yield True
        finally:
            self._claims.discard(content)

    def spend(self, content: int) -> None:
        """Give a claimed place up."""
        self._due.pop(content, None)


class Refusal(NamedTuple):
    """What is kept of a refusal. The error itself would keep its traceback, and so the request."""

    ends_at: float  # of time.monotonic()
    prompt_tokens: int
    message: str
    code: str | None
    retry_after_s: float


class Refusals:
    """The last refusal of the queue for each tenant and class: of a crowd that comes after it, Redis is not asked again
    for each request.
    """

    def __init__(self) -> None:
        self._last_refusals: dict[tuple[str, str], Refusal] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._last_refusals)

    def note(self, spec: GenerationSpec, tenant: str, answer: Sequence[Any], refusal: ApiError, now: float) -> None:
        """Keep a refusal for more requests, unless another request may have room. answer: of `Dispatcher.enqueue`."""
        is_of_requests = answer[0] == b"backlog" and answer[2] == "requests"
        if refusal.retry_after_s is None or not (answer[0] in (b"full", b"tenant", b"late") or is_of_requests):
            return
        while self._last_refusals and (
            next(iter(self._last_refusals.values())).ends_at <= now or len(self._last_refusals) >= MAX_AGAIN
        ):
            del self._last_refusals[next(iter(self._last_refusals))]
        ends_at = now + min(AGAIN_S, refusal.retry_after_s)
        self._last_refusals.pop((tenant, spec.priority), None)
        self._last_refusals[tenant, spec.priority] = Refusal(
            ends_at, spec.prompt_tokens, refusal.message, refusal.code, refusal.retry_after_s
        )

    def find_repeat(self, arrival: Arrival, now: float) -> ApiError | None:
        """Return the refusal of a request that seems no smaller than one that was refused just now; else None."""
        last = self._last_refusals.get((arrival.tenant, arrival.priority))
        if last is None or now >= last.ends_at or arrival.is_echo:
            return None
        if arrival.size_bytes < BODY_BYTES_PER_TOKEN * last.prompt_tokens:
            return None
        if last.code == "overloaded" and arrival.sets_its_wait:
            return None
        return ApiError(429, last.message, code=last.code, retry_after_s=last.retry_after_s)


class Turns:
    """The order in which the requests of this process begin: the better class first, tenants of a class in turn.

    A request is checked and turned into tokens in its turn. TURNS of them begin in a round of the event loop, so where
    more come than the process can begin, they wait here, and not in sockets and tasks, where no class counts.
    """

    def __init__(self, tenant_share: float, max_wait_s: float) -> None:
        """tenant_share, max_wait_s: as of Line."""
        self._line: Line[WaitingRequest] = Line(WaitingRequest, "their turn", TURNS, tenant_share, max_wait_s)
        self._begun_count = 0  # in this round
        self._is_counting = False
        self._round_at = 0.0

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._line)

    @property
    def are_taken(self) -> bool:
        """Whether a request that comes now has to wait."""
        return self._begun_count >= TURNS or bool(self._line)

    async def wait(self, arrival: Arrival) -> bool:
        """Return when the request may begin: whether it had to wait. Raise ApiError(429), as `Line.wait`."""
        if not self._is_counting:
            self._is_counting = True
            self._round_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._next_round)
        if not self.are_taken:
            self._begun_count += 1
            return False
        await self._line.wait(arrival)
        return True

    def _next_round(self) -> None:
        now = time.monotonic()
        batch, _ = self._line.take(now)
        for request in batch:
            request.answer.set_result(None)
        self._begun_count = len(batch)
        if not batch:
            self._is_counting = False
            return
        self._line.note_departures(len(batch), now - self._round_at)
        self._round_at = now
        asyncio.get_running_loop().call_soon(self._next_round)


class Connections:
    """Those of the public port of this process, of all models."""

    def __init__(self) -> None:
        self.busy: Callable[[], int] = lambda: 0
        """Returns how many there are, without those between two requests; the server sets it."""
        self.clients: Counter[str] = Counter()
        """Requests that clients wait for, by tenant."""


class HeldBytes:
    """Bytes that requests hold until they are answered, or drop them before: of this process, of all models.

    There are three kinds. Ended requests and stored responses are read again: what is made of them takes several times
    their bytes, and a client may ask as often as it likes. Conversations wait to be stored, as long as their requests.
    Bodies come in as slowly as their clients send them.
    """

    def __init__(self, kind: str, most_bytes: int, remedy: str = RETRY, code: str = MANY_REREADS) -> None:
        """kind, remedy, code: for the error."""
        self.most_bytes = most_bytes
        self._kind = kind
        self._remedy = remedy
        self._code = code
        self._bytes_of: Counter[str] = Counter()  # by tenant

    @property
    def held_bytes(self) -> int:
        return self._bytes_of.total()

    def hold(self, caller: Caller, size_bytes: int, of_request: int = 0) -> Callable[[], None]:
        """Count bytes of a request until what is returned is called. One request alone always has room.

        of_request: bytes that are held for the same request, which goes on within half of all. A new one of a tenant
        that holds some may bring it to half of what the other tenants leave: two hold three quarters, and a third has
        room. Raise ApiError(429, 503).
        """
        tenant, held_bytes, of_all = caller.tenant, self._bytes_of[caller.tenant], self.held_bytes
        of_others = 0 if of_request else of_all - held_bytes
        tenant_bytes = (self.most_bytes - of_others) // 2
        if caller.has_others and held_bytes > of_request and 0 <= tenant_bytes < held_bytes + size_bytes:
            text = f"{self._kind}: too many bytes of this tenant are held (limit {tenant_bytes})"
            raise ApiError(429, f"{text}; {self._remedy}", code=self._code, retry_after_s=1)
        if of_all > of_request and of_all + size_bytes > self.most_bytes:
            text = f"{self._kind}: too many bytes are held (limit {self.most_bytes})"
            raise unavailable(f"{text}; {self._remedy}", self._code)
        self._bytes_of[tenant] += size_bytes

        def release() -> None:
            self._bytes_of[tenant] -= size_bytes
            if not self._bytes_of[tenant]:
                del self._bytes_of[tenant]

        return release


def rereads() -> HeldBytes:
    return HeldBytes("answers and conversations that are read again", REREAD_BYTES)


def conversations() -> HeldBytes:
    return HeldBytes("conversations that wait to be stored", CONVERSATION_BYTES, f"{RETRY}, or with store false")


def bodies(max_body_bytes: int) -> HeldBytes:
    return HeldBytes("bodies that come in", BODIES * max_body_bytes, RETRY, MANY_BODIES)


Hold = Callable[[int], None]
"""Counts bytes of an answer until it is sent. Raises ApiError(429, 503)."""


def answer_bytes(spec: GenerationSpec, record: dict[bytes, bytes]) -> int:
    """Return the bytes of the answer in the record of a request. Raise ValueError for a broken one."""
    tokens = sum(integer(part) for part in record.get(b"lengths", b"").split(b",") if part)
    of_prompt = spec.prompt_tokens * prompt_record_bytes(spec.prompt_wanted)
    return tokens * (TOKEN_BYTES + spec.record_bytes) + of_prompt


class Admission:
    """Bring requests into this gateway: new ones, those of clients that return, and those of gateways that are gone."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: ModelText,
        keyring: Keyring,
        cluster: Cluster,
        dispatcher: Dispatcher,
        background: BackgroundTasks,
        metrics: Metrics,
        tracing: Tracing | None,
        connections: Connections,
    ) -> None:
        """tracing: None where no collector is set."""
        self._settings = settings
        self._model = model
        self._keyring = keyring
        self._cluster = cluster
        self._dispatcher = dispatcher
        self._background = background
        self._metrics = metrics
        self._tracing = tracing
        self._connections = connections
        self._recent = RecentAdmissions()
        self._places = Places()
        self._refusals = Refusals()
        model.threads = TenantThreads(settings.tenant_queue_share, settings.max_wait_s, self._placed_arrival)
        self.is_draining = False
        """Set once the process is to end: every request is refused."""

    async def wait_for_turn(self, turns: Turns, arrival: Arrival) -> bool:
        """Return when a request may begin: whether it had to wait. Refuse it before that for what is known already.

        Raise ApiError(429).
        """
        now = time.monotonic()
        forecast = None if arrival.is_echo or arrival.may_exist else self._forecast(arrival.priority)
        try:
            if forecast is not None:
                refuse_limits(forecast, arrival, now - arrival.arrived_at)
            with self._places.claim(arrival.content, now) as has_place:
                arrival = replace(arrival, has_place=has_place)
                ARRIVAL.set(arrival)
                is_new = not (has_place or arrival.may_exist)
                if is_new and turns.are_taken and (refusal := self._refusals.find_repeat(arrival, now)):
                    raise refusal
                return await turns.wait(arrival)
        except ApiError as error:
            raise self._placed_arrival(error, arrival) from None

    async def begin(
        self,
        spec: GenerationSpec,
        caller: Caller,
        arrived_at: float,
        last_event: str = "",
        refusal: ApiError | None = None,
        hold: Hold | None = None,
    ) -> Generation:
        """Admit and enqueue a request; continue one that an Idempotency-Key names and that was enqueued before.

        arrived_at: time.monotonic() at its arrival. last_event: the last event of it that the client has read. refusal:
        why a new request is refused; one that was enqueued goes on. hold: as `resume`. Raise ApiError; the Generation
        must be closed.
        """
        spec.priority = caller.priority(spec.priority)
        if last_event and spec.survives_client:  # the client has a part: a new beginning would repeat it
            return await self.resume(spec.id, caller.tenant, arrived_at, last_event, same_as=spec)
        with self._places.claim(spec.content, time.monotonic()) as has_place:
            return await self._begin(spec, caller, arrived_at, refusal, hold, has_place)

    async def _begin(
        self,
        spec: GenerationSpec,
        caller: Caller,
        arrived_at: float,
        refusal: ApiError | None,
        hold: Hold | None,
        has_place: bool,
    ) -> Generation:
        """Admit and enqueue a request, as `begin`. What its place let in, or what is refused in spite of it, has spent
        it.
        """
        tenant = caller.tenant
        forecast = self._forecast(spec.priority)
        try:
            if refusal is not None:
                raise refusal
            self.admit(spec, forecast, time.monotonic() - arrived_at)
            self._refuse_crowd(spec, caller, has_place)
        except ApiError as error:
            if not (spec.survives_client and await self._dispatcher.record(spec.id)):
                raise self._place_refusal(error, spec.content, spec, has_place) from None
            return await self.resume(spec.id, tenant, arrived_at, same_as=spec, hold=hold)  # it is no new work
        stream = self._open_stream(spec, "" if spec.background else tenant)
        generation = Generation(spec, self._model, stream, self._dispatcher, self._metrics, arrived_at)
        generation.span = self._tracing.begin(spec, arrived_at) if self._tracing is not None else None
        snapshot = self._cluster.snapshot
        redis_bytes = snapshot.memory_most if snapshot else 0
        bounds = Bounds.of(self._settings, spec, caller, forecast, redis_bytes, has_place)
        delivery = spec.to_delivery(self._model.text.tail)
        try:
            answer = await self._dispatcher.enqueue(spec, stream, caller, delivery, bounds, arrived_at)
            if refusal := bounds.refusal(answer, self._wait_s):
                self._refusals.note(spec, tenant, answer, refusal, time.monotonic())
                raise self._place_refusal(refusal, spec.content, spec, has_place)
        except ApiError:
            self._dispatcher.close(stream)
            raise
        except BaseException:
            generation.close()
            raise
        if answer[0] == b"duplicate" and spec.survives_client:
            self._dispatcher.close(stream)
            return await self.resume(spec.id, tenant, arrived_at, same_as=spec, hold=hold)
        if has_place:
            self._places.spend(spec.content)
        self._metrics.prompt_tokens.inc(spec.prompt_tokens)
        self._recent.add(spec, time.monotonic())
        self._places.count_admitted(spec.priority, self._wait_s(spec.prompt_tokens), time.monotonic())
        if spec.deadline_ms and not spec.survives_client:  # else the record has the end
            generation.end_at(arrived_at + spec.deadline_ms / 1000 + DEADLINE_GRACE_S)
        return generation

    async def begin_background(
        self, spec: GenerationSpec, caller: Caller, arrived_at: float, refusal: ApiError | None = None
    ) -> None:
        """Begin a request that runs without a client; spec.background is set. refusal: as `begin`. Raise ApiError."""
        self._background.keep(await self.begin(spec, caller, arrived_at, refusal=refusal))

    async def adopt(self, request_id: str, gateway: str) -> None:
        """Adopt a background request, if `gateway` was the last to read it. Raise ApiError."""
        record = await self._dispatcher.record(request_id)
        if record.get("gateway") == gateway:
            self._background.keep(
                await self.resume(request_id, record.get("tenant", ""), time.monotonic(), left_by=gateway)
            )

    async def resume(
        self,
        request_id: str,
        tenant: str,
        arrived_at: float,
        last_event: str = "",
        same_as: GenerationSpec | None = None,
        left_by: str = "",
        hold: Hold | None = None,
    ) -> Generation:
        """Deliver a request that exists, wherever it was delivered before, from `last_event` on.

        same_as: the request that the client sent again. left_by: read it in the background, if that gateway was the
        last to do so. hold: called with the bytes of an answer that is delivered whole, before they are read. Raise
        ApiError; the Generation must be closed.
        """
        record = await self._dispatcher.raw_record(request_id)
        if b"delivery" not in record or record.get(b"tenant", b"") != tenant.encode():
            raise unknown_request(request_id)
        spec = self._dispatcher.decode(
            request_id, record, partial(GenerationSpec.from_record, request_id, self._model.vocab_size)
        )
        if same_as is not None and spec.body_sha256 != same_as.body_sha256:
            raise ApiError(
                409, "this Idempotency-Key was used for another body; send a new key", code="idempotency_key_reused"
            )
        position = Position.parse(last_event, request_id, spec.choices) if last_event else None
        spec.stream = not left_by and (same_as is None or same_as.stream)
        if spec.stream and spec.keep:
            raise invalid(
                "request_id",
                "request_id: a request with best_of cannot be streamed; the best choice is known at its end",
            )
        if spec.stream and spec.pooling:
            raise invalid(
                "request_id",
                f"request_id: vectors and scores cannot be streamed; read the answer at /v1/requests/{request_id}",
            )
        if spec.stream and spec.prompt_wanted:
            raise invalid(
                "request_id",
                "request_id: a request with log-probabilities of its prompt cannot be streamed; "
                f"read its answer at /v1/requests/{request_id}",
            )
        if hold is not None and not spec.stream and record.get(b"state") == b"finished":
            hold(self._dispatcher.decode(request_id, record, partial(answer_bytes, spec)))
        stream = self._open_stream(spec, "" if left_by else tenant)
        on_leave = partial(self._background.readerless.add, request_id) if spec.background and not left_by else None
        generation = Generation(
            spec, self._model, stream, self._dispatcher, self._metrics, arrived_at, position, on_leave
        )
        if left_by and request_id in self._dispatcher.streams:
            raise taken_over()  # a client here has it, or is about to
        self._refuse_while_draining()  # here: from now on `drain` knows the stream
        try:
            is_adopted = await self._dispatcher.adopt(stream, tenant, left_by)
        except BaseException:
            self._dispatcher.close(stream)
            raise
        if not is_adopted:  # it expired just now
            self._dispatcher.close(stream)
            raise unknown_request(request_id)
        self._metrics.resumptions.inc()
        return generation

    def _place_refusal(
        self, refusal: ApiError, content: int, spec: GenerationSpec | Arrival, had_place: bool = False
    ) -> ApiError:
        """Return the refusal of a request with the time of its place. had_place: it was refused in spite of one."""
        if refusal.code in PLACED and refusal.retry_after_s is not None:
            if had_place:
                self._places.spend(content)
            work_s = self._wait_s(spec.prompt_tokens)
            place_s = self._places.promise(content, spec.priority, refusal.retry_after_s, work_s, time.monotonic())
            refusal.headers["Retry-After"] = str(place_s)
        return refusal

    def _placed_arrival(self, refusal: ApiError, arrival: Arrival) -> ApiError:
        """Return the refusal of a request that was not checked yet.

        Two kinds get no place and may come again as soon as there is room: requests that may exist already, as they may
        be no new work, and those without content (as to tokenize a text), as they do not enter the queue.
        """
        is_new = arrival.content and not arrival.may_exist
        return self._place_refusal(refusal, arrival.content, arrival) if is_new else refusal

    def _wait_s(self, waiting_tokens: float) -> float:
        """Return the seconds until so many more tokens of the queue will have begun to run; 0 before any rate was
        measured.
        """
        snapshot = self._cluster.snapshot
        return waiting_tokens / snapshot.drain_tok_s if snapshot and snapshot.drain_tok_s > 0 else 0.0

    def _forecast(self, priority: str) -> Forecast | None:
        """Return the wait that is predicted for a class; None when unknown, or when Redis was read too long ago."""
        snapshot = self._cluster.snapshot
        if snapshot is None or time.monotonic() - snapshot.at > STALE_S:
            return None
        forecast = snapshot.forecasts.get(priority)
        return forecast and self._recent.added_to(forecast, priority, snapshot)

    def admit(self, spec: GenerationSpec, forecast: Forecast | None, passed_s: float = 0.0) -> None:
        """Raise ApiError 429 or 503 when new work cannot be accepted. enqueue.lua checks the bounds of the queue.

        passed_s: since its arrival; its deadline counts from there.
        """
        cluster = self._cluster
        self._refuse_while_draining()
        if cluster.redis_error or cluster.snapshot is None:
            raise redis_silent(cluster.redis_error)
        if cluster.snapshot.memory_share > MAX_MEMORY_SHARE:
            raise memory_low(cluster.snapshot.memory_share)
        if not cluster.snapshot.leases:
            raise unavailable(f"no scheduler is alive; {RETRY}", "no_scheduler", 2)
        if not self._keyring.has_read:
            raise unavailable(f"the keys have not been read yet; {RETRY}", "keys_unread", 2)
        if forecast is not None:
            refuse_limits(forecast, spec, passed_s)

    def _refuse_crowd(self, spec: GenerationSpec, caller: Caller, has_place: bool) -> None:
        """Raise ApiError(429) when so many clients wait here that more urgent ones, or those of another tenant, would
        soon find no connection.
        """
        if spec.background:
            return
        share = CONNECTIONS_SHARE * CLASS_SHARES[spec.priority] * (1 + PLACES_SHARE if has_place else 1)
        most = max(1, int(share * self._settings.max_connections))
        claims = [("queue_full", "", self._connections.busy(), most)]
        if caller.has_others:
            of_tenant = max(1, int(self._settings.tenant_queue_share * most))
            count = self._connections.clients[caller.tenant] + 1
            claims.insert(0, ("tenant_queue_full", "this tenant in ", count, of_tenant))
        for code, where, count, most in claims:
            if count > most:
                raise ApiError(
                    429,
                    f"queue full for {where}class {spec.priority}: clients hold {count} connections of this gateway "
                    f"process, of which {most} are allowed; {RETRY}",
                    code=code,
                    retry_after_s=self._wait_s((count - most) * spec.prompt_tokens),
                )

    def _refuse_while_draining(self) -> None:
        if self.is_draining:
            raise shutting_down()

    def _open_stream(self, spec: GenerationSpec, client: str) -> RequestStream:
        bound = self._settings.client_buffer_events if spec.stream else 0
        return RequestStream(spec.id, spec.choices, bound, survives=spec.survives_client, client=client)


def unknown_request(request_id: str) -> ApiError:
    """Return the 404; the same for a request of another tenant."""
    text = f"request {request_id[:80]!r} not found; it ended too long ago, or is of another tenant: check id and key"
    return ApiError(404, text, param="request_id", code="request_not_found")
