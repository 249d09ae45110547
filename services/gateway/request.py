"""Define one checked request, as all of the gateway reads it, its limits and its wire forms; how requests wait.

`GenerationSpec` is the one definition of a request's fields. A field of a body that has the same name here is copied by
openai/bodies.py; a field that `queue_pb2.Request` or `queue_pb2.Delivery` has under the same name is copied here. A new
field of a request needs no code in between. `Backlog` orders and bounds requests that wait, `Line` gives them
deadlines, `TenantThreads` lets work on their texts wait so.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import orjson
from google.protobuf.message import Message

from protos import queue_pb2
from services.gateway.errors import RETRY, ApiError, other_version
from shared.ids import ENDPOINTS
from shared.keys import CLASSES, grammar_name
from shared.redis_client import GRAMMAR_APART_BYTES, PROMPT_APART_BYTES
from shared.text.logprobs import prompt_record_bytes, record_bytes
from shared.text.logprobs import wrong_number as wrong_logprobs
from shared.wire.columns import pack, unpack
from shared.wire.token_batches import check_tokens

THREADS = min(32, (os.cpu_count() or 1) + 4)
BACKLOG_REQUESTS = 4096
BACKLOG_BYTES = 64 << 20
BATCH_REQUESTS = 64
BATCH_BYTES = 1 << 20
"""Of one call of enqueue.lua; a larger request goes alone."""
RATE_SHARE = 0.2
"""Weight of the last batch in the measured rate."""
CLASS_SHARES = {"realtime": 1.0, "high": 0.95, "normal": 0.8, "low": 0.5}
"""Share of ORCINUS_MAX_QUEUED_TOKENS and of ORCINUS_MAX_WAIT_S up to which a class is accepted."""
PLACES_SHARE = 0.1
"""By how much requests that were told to come back may exceed the bounds of the queue."""
TURN_REQUESTS = 256
"""That wait for their turn in this process; of all classes together, as CLASS_SHARES of a backlog, and by PLACES_SHARE
more with a place.
"""
BODY_BYTES_PER_TOKEN = 4
"""About, of a prompt that is not yet read."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tool calls of a request are read. names: the tools that it may call. forced: the output is calls only.
    texts: parameters that are text, as `function.parameter`, where the format does not tell text from numbers.
    """

    format: str
    names: tuple[str, ...]
    parallel: bool
    forced: bool = False
    texts: tuple[str, ...] = ()


UNDECIDED, THINKING, FRAMED, CHANNELS = "undecided", "thinking", "framed", "channels"
"""States of thinking behind a prompt, in `Delivery.reasoning`: the model may begin it, the prompt has begun it, it is
over and the text behind it may have marks around it, or the answer has channels. Empty: all that follows is content."""
VECTOR, SCORE = 1, 2
"""What is pooled of a prompt (worker.proto, Enter.pooling)."""
OLDEST, VERSION = 0, 1
"""Versions of `Delivery` that this build reads as the build that wrote them. Raise VERSION with a change after which a
record and its tokens make other events: a state of thinking or a reader of text, of calls or of marks that works
otherwise. Raise OLDEST, too, where records of before cannot be read as they were."""
MAX_CHOICES = 65_536
"""Choices of a stored request: more than any gateway allows (--max-choices)."""
KEPT_KEY_BYTES = 256
"""What Redis needs for a choice beside its tokens, and for its log-probabilities beside their figures: 200 to 260 bytes
were measured. publish.lua counts with the same.
"""
FORESEEN_TOKENS = 4096
"""Of an output without a nearer limit. What there is behind the end of a request is counted then."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the workers, from their records, else from the model's config."""

    max_model_len: int
    max_input_tokens: int = 0  # 0 means as much as the context allows
    max_output_tokens: int = 0
    max_choices: int = 128


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of sampling that a request leaves out: OpenAI's, or those of the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(slots=True)
class GenerationSpec:
    """One request, checked. It has len(prompts) * n choices; choice c continues prompt c // n."""

    id: str
    endpoint: str  # completions | chat | embeddings | rerank | score
    model: str
    created: int  # seconds since the epoch
    prompts: list[list[int]]  # token ids; where `from_delivery` made the spec, their tails, unless they are scored
    n: int
    max_tokens: int
    sampling: queue_pb2.Sampling
    min_tokens: int = 0
    prompt_texts: list[str] = field(default_factory=list)  # for echo, else empty
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    speculate: bool = True  # whether next tokens may be guessed
    prediction: bytes = b""  # int32: what the output probably is
    adapter: bytes = b""  # digest of the LoRA adapter that `model` stood for; empty: the base model
    priority: str = ""  # '' until the caller's key has set it
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    return_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ttft_slo_ms: int = 0  # 0 means none, here and in the two below
    tbt_slo_ms: int = 0
    deadline_ms: int = 0
    traceparent: str = ""
    background: bool = False  # runs without a client
    body_sha256: bytes = b""  # of the HTTP body, where an Idempotency-Key names the request
    logprobs: int | None = None  # most likely tokens returned beside each sampled one; None means no log-probabilities
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; with `echo`, `logprobs` counts for them, too
    prompt_only: bool = False  # of the output, which has one token, nothing is returned
    pooling: int = 0  # VECTOR, SCORE: the answer has numbers of the prompts, no text
    vector_size: int = 0  # numbers of each prompt
    label_ids: bytes = b""  # int32, of a score: as in worker.proto
    segments: bytes = b""  # int32, of a score: where the second text of each prompt begins; empty: nowhere
    raw_scores: bool = False  # scores are returned as they are, not their sigmoid
    top_n: int = 0  # so many of the best scores are returned; 0 means all
    dimensions: int = 0  # so many of them are returned; 0 means all
    base64: bool = False  # whether vectors are returned as base64
    floats_too: bool = False  # whether vectors are returned as numbers beside base64
    keep: int = 0  # return the best `keep` of each prompt's n choices; 0 means all
    tools: ToolUse | None = None
    reasoning: str = ""  # where the prompt left the model (text/reasoning.py); empty: all text is content
    hides_thinking: bool = False  # of /v1/messages: blocks of thinking have no text
    markers: list[str] = field(default_factory=list)  # as MARKERS of text/reasoning.py; empty: the model's
    grammar_field: str = ""  # field of the body that brought the grammar of `sampling`
    prompt_tokens: int = 0  # counted from `prompts` unless given
    content: int = 0  # hash of tenant and body, by which one that comes back is known
    conversation_bytes: int = 0  # of a response and what is stored with it, that its gateway holds until the end

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or sum(map(len, self.prompts))

    @property
    def survives_client(self) -> bool:
        """Whether the request continues without its connection, since the client can return for the answer."""
        return self.is_named or self.background

    @property
    def is_named(self) -> bool:
        """Whether an Idempotency-Key names the request: sent again, it is the same request."""
        return bool(self.body_sha256)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of the record of one token, log-probabilities or a vector; 0 when the request needs none."""
        if self.pooling:
            return 4 * self.vector_size
        return record_bytes(self.sampling.logprobs)

    @property
    def prompt_wanted(self) -> int:
        """Return Sampling.prompt_logprobs: 1 and the most likely tokens beside each prompt token; 0 for none."""
        asked = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((1 + most for most in asked if most is not None), default=0)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of choices, log-probabilities and vectors in Redis, until minutes after the end."""
        of_prompt, of_token = prompt_record_bytes(self.prompt_wanted), self.record_bytes
        prompts = sum(KEPT_KEY_BYTES + of_prompt * len(prompt) for prompt in self.prompts) if of_prompt else 0
        tokens = min(self.max_tokens, FORESEEN_TOKENS)
        figures = KEPT_KEY_BYTES + of_token * tokens if of_token else 0
        return prompts + self.choices * (KEPT_KEY_BYTES + figures)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def least_tokens(self) -> int:
        """Return the tokens that each choice has at least: all, where nothing but their number ends it."""
        ends_early = self.stop_ids or self.stop or self.sampling.grammar
        return max(1, self.min_tokens if ends_early else self.max_tokens)

    @property
    def cost_tokens(self) -> int:
        """Return the tokens that the tenant's bucket pays in advance: the prompts and the longest possible output."""
        return self.prompt_tokens + self.choices * self.max_tokens

    def to_request(self, gateway: str, tenant: str, salt: bytes) -> tuple[queue_pb2.Request, bytes, str]:
        """Return the message for `requests:{class}` and, when they are big, the prompts and the text of the grammar for
        other keys.
        """
        prompts = queue_pb2.Prompts(tokens=[pack(prompt) for prompt in self.prompts])
        apart = 4 * self.prompt_tokens > PROMPT_APART_BYTES
        fields: dict[str, Any] = {name: getattr(self, name) for name in REQUEST_FIELDS}
        fields["class"] = CLASSES.index(self.priority)
        request = queue_pb2.Request(
            **fields,
            tenant=tenant,
            gateway=gateway,
            prompts=None if apart else prompts,
            prompts_apart=apart,
            stop_token_ids=pack(self.stop_ids),
            cache_salt=salt,
            created_ms=time.time_ns() // 1_000_000,
        )
        grammar = self.sampling.grammar
        if is_apart := len(grammar.encode()) > GRAMMAR_APART_BYTES:
            request.sampling.grammar = grammar_name(tenant, grammar)
        return request, prompts.SerializeToString() if apart else b"", grammar if is_apart else ""

    def to_delivery(self, tail: Callable[[Sequence[int], bool], list[int]]) -> bytes:
        """Return all that another gateway needs to continue the delivery; kept in the request's record.

        tail: the part of a prompt on which the text of its continuation depends (`TokenText.tail`).
        """
        return queue_pb2.Delivery(
            **{name: getattr(self, name) for name in DELIVERY_FIELDS},
            version=VERSION,
            stop_ids=pack(self.stop_ids),
            prompt_tails=[
                pack(prompt if self.prompt_wanted else tail(prompt, self.skip_special_tokens))
                for prompt in self.prompts
            ],
            prompt_texts=self.prompt_texts if self.echo else [],
            logprobs=0 if self.logprobs is None else self.logprobs + 1,
            prompt_logprobs=0 if self.prompt_logprobs is None else self.prompt_logprobs + 1,
            tools_json=b"" if self.tools is None else orjson.dumps(dataclasses.asdict(self.tools)),
        ).SerializeToString()

    @classmethod
    def from_record(cls, request_id: str, vocab_size: int, record: Mapping[bytes, bytes]) -> GenerationSpec:
        """Return the spec of `req:{id}`, to deliver the rest. vocab_size: of its model.

        Raise ApiError(503) for a record of another version, and what DeadLetters.read takes for unreadable.
        """
        spec = cls.from_delivery(request_id, record[b"delivery"], record.get(b"class", b"normal").decode())
        for prompt in spec.prompts:
            check_tokens(prompt, vocab_size)
        return spec

    @classmethod
    def from_delivery(cls, request_id: str, raw: bytes, priority: str) -> GenerationSpec:
        """Return the spec to deliver the rest. It cannot be enqueued: prompts and sampling are not stored. Raise as
        `from_record`.
        """
        wire = queue_pb2.Delivery.FromString(raw)
        if not OLDEST <= wire.version <= VERSION:
            raise other_version(wire.version, OLDEST, VERSION)
        fields: dict[str, Any] = {name: getattr(wire, name) for name in DELIVERY_FIELDS}
        fields["stop"], fields["markers"] = list(wire.stop), list(wire.markers)
        if not 0 < len(wire.prompt_tails) * wire.n <= MAX_CHOICES or wire.endpoint not in ENDPOINTS:
            raise ValueError(f"delivery: {len(wire.prompt_tails)} prompts, n={wire.n}, endpoint {wire.endpoint!r}")
        if wire.reasoning not in ("", UNDECIDED, THINKING, FRAMED, CHANNELS):
            raise ValueError(f"delivery: reasoning {wire.reasoning!r} is no state of thinking")
        if len(wire.markers) not in (0, 2, 4) or not all(wire.markers):
            raise ValueError(f"delivery: markers {list(wire.markers)!r} are not one or two pairs of marks")
        if wrong := wrong_logprobs(wire.logprobs) or wrong_logprobs(wire.prompt_logprobs, "prompt_logprobs"):
            raise ValueError(f"delivery: {wrong}")
        return cls(
            **fields,
            id=request_id,
            prompts=[unpack(tail).tolist() for tail in wire.prompt_tails],
            prompt_texts=list(wire.prompt_texts),
            max_tokens=0,
            stop_ids=unpack(wire.stop_ids).tolist(),
            sampling=queue_pb2.Sampling(logprobs=wire.logprobs or int(wire.keep > 0)),
            priority=priority,
            logprobs=wire.logprobs - 1 if wire.logprobs else None,
            prompt_logprobs=wire.prompt_logprobs - 1 if wire.prompt_logprobs else None,
            tools=_tools(wire.tools_json),
        )


SPEC_FIELDS = frozenset(field.name for field in dataclasses.fields(GenerationSpec))


def _common(message: type[Message], *coded: str) -> tuple[str, ...]:
    """Return the fields that a message and the spec have under one name, except those `coded` in another form."""
    return tuple(field.name for field in message.DESCRIPTOR.fields if field.name in SPEC_FIELDS.difference(coded))


REQUEST_FIELDS = _common(queue_pb2.Request, "prompts")
DELIVERY_FIELDS = _common(queue_pb2.Delivery, "stop_ids", "prompt_texts", "logprobs", "prompt_logprobs")


def _tools(raw: bytes) -> ToolUse | None:
    if not raw:
        return None
    use = orjson.loads(raw)
    return ToolUse(
        use["format"], tuple(use["names"]), use["parallel"], use.get("forced", False), tuple(use.get("texts", ()))
    )


class Owner(Protocol):
    """The caller of a request, as auth.py has it."""

    @property
    def tenant(self) -> str: ...

    @property
    def has_others(self) -> bool: ...

    def priority(self, name: str) -> str:
        """Return the class of a request that names one, or none. Raise ApiError(403)."""
        ...


def content_of(tenant: str, body: bytes) -> int:
    """Return by what a request that comes back is known."""
    return hash((tenant, body))


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is read of a request before it is checked: enough to order it and to refuse it. A field of the body that is
    not valid counts as left out; its check follows.
    """

    tenant: str
    has_others: bool  # there are keys of other tenants
    priority: str
    content: int  # 0 before the body is read
    size_bytes: int
    arrived_at: float  # time.monotonic()
    ttft_slo_ms: int = 0  # 0 means none, here and below
    deadline_ms: int = 0
    min_tokens: int = 0
    background: bool = False
    may_exist: bool = False  # an Idempotency-Key names it: it may be queued already, so no limit on its wait refuses it
    is_echo: bool = False  # max_tokens is 0: perhaps nothing is generated
    has_place: bool = False  # it was refused and told to come now

    @classmethod
    def of(cls, body: dict[str, Any], raw: bytes, owner: Owner, arrived_at: float, may_exist: bool = False) -> Arrival:
        """Raise ApiError(403) for a class above the key's limit. raw: the bytes of the body."""

        def number(name: str) -> int:
            value = body.get(name)
            return value if type(value) is int and value > 0 else 0

        class_name = body.get("priority")
        return cls(
            owner.tenant,
            owner.has_others,
            owner.priority(class_name if isinstance(class_name, str) and class_name in CLASS_SHARES else ""),
            content_of(owner.tenant, raw) if raw else 0,
            len(raw),
            arrived_at,
            number("ttft_slo_ms"),
            number("deadline_ms"),
            number("min_tokens"),
            body.get("background") is True,
            may_exist,
            body.get("max_tokens") == 0,
        )

    @property
    def sets_its_wait(self) -> bool:
        """Whether the longest wait of its class is not for it, as in `overload_error`."""
        return self.background or self.ttft_slo_ms > 0

    @property
    def least_tokens(self) -> int:
        return max(1, self.min_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Return about how many the prompts have."""
        return self.size_bytes // BODY_BYTES_PER_TOKEN + 1


def backlog_full(priority: str, full: FullBacklog, resource: str) -> ApiError:
    """Return the 429 for a request of which as many wait as may. resource: for what."""
    code, where = ("tenant_queue_full", "this tenant in ") if full.of_tenant else ("queue_full", "")
    text = (
        f"queue full for {where}class {priority}: {full.amount} of at most {full.max_amount} {full.unit} are "
        f"waiting for {resource}; {RETRY}"
    )
    return ApiError(429, text, code=code, retry_after_s=full.wait_s)


def deadline_error(deadline_ms: int) -> ApiError:
    text = f"deadline_ms: {deadline_ms} ms passed before the request was in the queue; {RETRY}"
    return ApiError(429, text, param="deadline_ms", code="deadline_unreachable", retry_after_s=1)


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """One request that waits in a backlog."""

    tenant: str
    priority: int  # number of its class
    size_bytes: int
    survives: bool  # is taken also when its handler has gone
    expires_at: float  # of time.monotonic(); math.inf means never
    answer: asyncio.Future[Any]


W = TypeVar("W", bound=WaitingRequest)


class FullBacklog(NamedTuple):
    """A bound of the backlog that is reached."""

    of_tenant: bool
    unit: str  # of `amount` and `max_amount`: requests or bytes
    amount: int
    max_amount: int
    wait_s: float  # until there is room


class Backlog(Generic[W]):
    """Requests that wait, for enqueue.lua, their turn or a thread: by class, then in turn by tenant, without those that
    came too late.

    It is bounded as the queue in Redis is: a less urgent class, and a tenant beside others, leave room for the rest.
    """

    def __init__(self, requests: int = 0, a_call: int = 0) -> None:
        """requests: that may wait; 0 uses BACKLOG_REQUESTS. a_call: that one `take` returns at most; 0 uses
        BATCH_REQUESTS.
        """
        self._requests = requests
        self._a_call = a_call
        # By class, by tenant; the next tenant first.
        self._lanes: list[dict[str, OrderedDict[W, None]]] = [{} for _ in CLASSES]
        self._requests_of: Counter[str] = Counter()  # by tenant
        self._bytes = 0
        self._bytes_of: Counter[str] = Counter()  # by tenant
        self._request_s = 0.0

    def __len__(self) -> int:
        return self._requests_of.total()

    def max_waiting(self, share: float) -> int:
        """Return how many requests may wait when one enters that may fill `share` of the backlog."""
        return max(1, int(share * (self._requests or BACKLOG_REQUESTS)))

    def full(self, tenant: str, share: float, tenant_share: float, size_bytes: int) -> FullBacklog | None:
        """Return the bound that keeps a request out: of all requests `share` may wait, of its tenant's `tenant_share`
        of that. Return None when there is room; alone a request always has.
        """
        for owner, waiting_count, held_bytes, part in (
            ("", len(self), self._bytes, share),
            (tenant, self._requests_of[tenant], self._bytes_of[tenant], share * tenant_share),
        ):
            most, most_bytes = self.max_waiting(part), int(part * BACKLOG_BYTES)
            tenants = len(self._requests_of) if owner else 1
            if waiting_count >= most:
                return FullBacklog(
                    bool(owner), "requests", waiting_count, most, self._wait_s(tenants * (waiting_count - most + 1))
                )
            if waiting_count and (excess := held_bytes + size_bytes - most_bytes) > 0:
                ahead = min(waiting_count, math.ceil(excess * waiting_count / held_bytes))
                return FullBacklog(bool(owner), "bytes", held_bytes, most_bytes, self._wait_s(tenants * ahead))
        return None

    def put(self, entry: W) -> None:
        self._lanes[entry.priority].setdefault(entry.tenant, OrderedDict())[entry] = None
        self._requests_of[entry.tenant] += 1
        self._bytes += entry.size_bytes
        self._bytes_of[entry.tenant] += entry.size_bytes

    def take(self, now: float, may: Callable[[str], bool] = lambda tenant: True) -> tuple[list[W], list[W]]:
        """Return the requests of the next call, and those with a deadline that has passed; forget both, and those with
        a handler that has gone. may: whether one of a tenant may leave now.
        """
        batch: list[W] = []
        late: list[W] = []
        room = BATCH_BYTES
        for lane in self._lanes:
            while lane and len(batch) < (self._a_call or BATCH_REQUESTS):
                tenant = next(filter(may, lane), None)
                if tenant is None:
                    break
                entries = lane[tenant]
                entry = next(iter(entries))
                if batch and entry.size_bytes > room:
                    return batch, late
                self.drop(entry)
                if entries:  # the tenant's turn comes again after the others'
                    lane[tenant] = lane.pop(tenant)
                if entry.answer.done() and not entry.survives:
                    continue
                if now >= entry.expires_at:
                    late.append(entry)
                    continue
                batch.append(entry)
                room -= entry.size_bytes
        return batch, late

    def drop(self, entry: W) -> None:
        """Forget a request, wherever it waits; nothing where it does not wait any more."""
        lane = self._lanes[entry.priority]
        entries = lane.get(entry.tenant)
        if entries is None or entry not in entries:
            return
        del entries[entry]
        if not entries:
            del lane[entry.tenant]
        self._requests_of[entry.tenant] -= 1
        self._bytes_of[entry.tenant] -= entry.size_bytes
        if not self._requests_of[entry.tenant]:
            del self._requests_of[entry.tenant], self._bytes_of[entry.tenant]
        self._bytes -= entry.size_bytes

    def note_departures(self, requests: int, seconds: float) -> None:
        """Note how long it took until so many requests had left."""
        each_s = max(seconds, 1e-4) / requests
        self._request_s += RATE_SHARE * (each_s - self._request_s) if self._request_s else each_s

    def _wait_s(self, ahead: int) -> float:
        """Return the seconds until this many requests have left, at the measured rate."""
        return ahead * self._request_s or 1.0


class Line(Backlog[W]):
    """Requests that wait in this process for one thing, each until its deadline or the longest wait of its class."""

    def __init__(self, kind: type[W], resource: str, a_call: int, tenant_share: float, max_wait_s: float) -> None:
        """resource: for errors. tenant_share: of those that wait, for one tenant beside others. max_wait_s: of class
        `realtime`; CLASS_SHARES of it for others; 0 means no limit.
        """
        super().__init__(TURN_REQUESTS, a_call)
        self._kind = kind
        self._resource = resource
        self._tenant_share = tenant_share
        self._max_wait_s = max_wait_s

    async def wait(self, arrival: Arrival, **fields: Any) -> Any:
        """Return the answer that a request of `take` is given: what has begun by it, or None, which may still be
        refused. fields: further ones of its kind.

        Raise ApiError(429) where too many wait before it, or it has waited too long.
        """
        tenant_share = self._tenant_share if arrival.has_others else 1.0
        share = CLASS_SHARES[arrival.priority] * (1 + PLACES_SHARE if arrival.has_place else 1)
        if full := self.full(arrival.tenant, share, tenant_share, arrival.size_bytes):
            raise backlog_full(arrival.priority, full, self._resource)
        limit_at, deadline_at = math.inf, math.inf
        longest_s = self._max_wait_s * CLASS_SHARES[arrival.priority]
        if longest_s and not (arrival.has_place or arrival.may_exist or arrival.sets_its_wait):
            limit_at = time.monotonic() + longest_s
        if arrival.deadline_ms and not arrival.may_exist:
            deadline_at = arrival.arrived_at + arrival.deadline_ms / 1000
        entry = self._kind(
            tenant=arrival.tenant,
            priority=CLASSES.index(arrival.priority),
            size_bytes=arrival.size_bytes,
            survives=False,
            expires_at=math.inf,
            answer=asyncio.get_running_loop().create_future(),
            **fields,
        )
        self.put(entry)
        end = min(limit_at, deadline_at)
        try:
            async with asyncio.timeout(None if math.isinf(end) else end - time.monotonic()):
                return await entry.answer
        except TimeoutError:
            # It may have come in the same turn of the event loop.
            if not entry.answer.cancelled() and (answer := entry.answer.result()) is not None:
                return answer
            if deadline_at < limit_at:
                raise deadline_error(arrival.deadline_ms) from None
            limit = f"{longest_s:g} s, the limit of class {arrival.priority}"
            text = f"overloaded: waited for {self._resource} for {limit}; {RETRY}"
            raise ApiError(429, text, code="overloaded", retry_after_s=longest_s) from None
        finally:
            self.drop(entry)


@dataclass(slots=True, eq=False)
class Work(WaitingRequest):
    """Work on texts that waits for a thread."""

    function: Callable[[], Any]


_UNKNOWN = Arrival("", False, "normal", 0, 0, 0.0)
ARRIVAL: ContextVar[Arrival] = ContextVar("arrival", default=_UNKNOWN)
"""Of the request that the current task answers, as far as it was read. Set where a caller is known: by RequireKey, by
the gRPC front, by lines of batches; and where a request waits for its turn.
"""


@contextlib.asynccontextmanager
async def until_deadline() -> AsyncIterator[None]:
    """Raise ApiError(429) where the deadline of the current task's request passes inside. A request that may exist
    already goes on.
    """
    arrival = ARRIVAL.get()
    has_deadline = arrival.deadline_ms and not arrival.may_exist
    left_s = arrival.arrived_at + arrival.deadline_ms / 1000 - time.monotonic() if has_deadline else None
    try:
        async with asyncio.timeout(left_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise deadline_error(arrival.deadline_ms) from None


class TenantThreads:
    """The threads of one model that run long work on texts beside the event loop.

    Encoding a conversation of 4 MB takes seconds. A tenant gets a thread while more are free than it has: one tenant
    half of them, two that are at it together three quarters, so that work of the next tenant begins at once. What waits
    has the order, the bounds and the deadlines of requests that wait for their turn (`Line`), as ARRIVAL says; the
    deadline counts until the work is done.
    """

    def __init__(
        self,
        tenant_share: float = 1.0,
        max_wait_s: float = 0.0,
        with_place: Callable[[ApiError, Arrival], ApiError] = lambda refusal, _: refusal,
    ) -> None:
        """tenant_share, max_wait_s: as of Line. with_place: gives a refusal the time of a place."""
        self._pool = ThreadPoolExecutor(THREADS, "texts")
        self._tenants: dict[Future[Any], str] = {}  # its tenant
        self._threads_of: Counter[str] = Counter()  # by tenant, of what runs
        self._line: Line[Work] = Line(Work, "a thread for their texts", 1, tenant_share, max_wait_s)
        self._with_place = with_place
        self._begun_at = 0.0  # the last work

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function that blocks returns. Work of a cancelled caller keeps its thread to its end. Raise
        ApiError(429) for work that waits too long, or behind too much, and at the deadline.
        """
        arrival, work = ARRIVAL.get(), partial(function, *args, **kwargs)
        self._begin()
        try:
            if self._has_thread(arrival.tenant):
                future = self._submit(arrival.tenant, work)
            else:
                future = await self._line.wait(arrival, function=work)
            async with until_deadline():
                return await asyncio.wrap_future(future)
        except ApiError as error:
            raise self._with_place(error, arrival) from error.__cause__

    def _has_thread(self, tenant: str) -> bool:
        return THREADS - len(self._tenants) > self._threads_of[tenant]

    def _submit(self, tenant: str, function: Callable[[], T]) -> Future[T]:
        """Begin work. Raise RuntimeError where no thread can be started."""
        work = self._pool.submit(function)
        self._tenants[work] = tenant
        self._threads_of[tenant] += 1
        self._begun_at = time.monotonic()
        work.add_done_callback(partial(self._on_end, asyncio.get_running_loop()))
        return work

    def _begin(self) -> None:
        """Give free threads to what waits."""
        for ended in [work for work in self._tenants if work.done()]:
            tenant = self._tenants.pop(ended)
            self._threads_of[tenant] -= 1
            if not self._threads_of[tenant]:
                del self._threads_of[tenant]
        while self._line and len(self._tenants) < THREADS:
            batch, _ = self._line.take(now := time.monotonic(), self._has_thread)
            if not batch:
                return
            (next_work,) = batch
            self._line.note_departures(1, now - self._begun_at)
            try:
                next_work.answer.set_result(self._submit(next_work.tenant, next_work.function))
            except RuntimeError as error:
                next_work.answer.set_exception(error)

    def _on_end(self, loop: asyncio.AbstractEventLoop, _work: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the process ends
            loop.call_soon_threadsafe(self._begin)
