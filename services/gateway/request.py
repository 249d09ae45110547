"""Define one checked request, as all of the gateway reads it, its limits and its wire forms; the threads of its texts.

`GenerationSpec` is the one definition of a request's fields. A field of a body that has the same name here is copied by
openai/bodies.py; a field that `queue_pb2.Request` or `queue_pb2.Delivery` has under the same name is copied here. A new
field of a request needs no code in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import orjson
from google.protobuf.message import Message

from protos import queue_pb2
from services.gateway.errors import other_version
from shared.columns import pack, unpack
from shared.ids import BEGINNINGS
from shared.keys import CLASSES
from shared.redis_client import PROMPT_APART_BYTES
from shared.text.logprobs import prompt_record_bytes, record_bytes
from shared.text.logprobs import wrong_number as wrong_logprobs
from shared.token_batches import check_tokens

THREADS = min(32, (os.cpu_count() or 1) + 4)
TENANT_THREADS = THREADS // 2

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Of the request that the current task answers."""
PRIORITY: ContextVar[str] = ContextVar("priority", default="normal")
"""Its class, or that of its key where it names none."""

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
KEPT_KEY_BYTES = 512
"""What Redis needs for a record of log-probabilities beside its value, about: its key, and that of the tokens."""
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
    conversation_bytes: int = 0  # of a response, that its gateway holds until the end, when it is stored

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
        """Return the bytes that log-probabilities and vectors may take in Redis, until minutes after the end."""
        of_prompt, of_token = prompt_record_bytes(self.prompt_wanted), self.record_bytes
        prompts = sum(KEPT_KEY_BYTES + of_prompt * len(prompt) for prompt in self.prompts) if of_prompt else 0
        tokens = min(self.max_tokens, FORESEEN_TOKENS)
        return prompts + (self.choices * (KEPT_KEY_BYTES + of_token * tokens) if of_token else 0)

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

    def to_request(self, gateway: str, tenant: str, salt: bytes) -> tuple[queue_pb2.Request, bytes]:
        """Return the message for `requests:{class}` and, when they are big, the prompts for another key."""
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
        return request, prompts.SerializeToString() if apart else b""

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
    def from_delivery(cls, request_id: str, stored: bytes, priority: str) -> GenerationSpec:
        """Return the spec to deliver the rest. It cannot be enqueued: prompts and sampling are not stored. Raise as
        `from_record`.
        """
        wire = queue_pb2.Delivery.FromString(stored)
        if not OLDEST <= wire.version <= VERSION:
            raise other_version(wire.version, OLDEST, VERSION)
        fields: dict[str, Any] = {name: getattr(wire, name) for name in DELIVERY_FIELDS}
        fields["stop"], fields["markers"] = list(wire.stop), list(wire.markers)
        if not 0 < len(wire.prompt_tails) * wire.n <= MAX_CHOICES or wire.endpoint not in BEGINNINGS:
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


def _tools(stored: bytes) -> ToolUse | None:
    if not stored:
        return None
    use = orjson.loads(stored)
    return ToolUse(
        use["format"], tuple(use["names"]), use["parallel"], use.get("forced", False), tuple(use.get("texts", ()))
    )


Lane = dict[str, OrderedDict[asyncio.Future[Future[Any]], Callable[[], Any]]]
"""Work of a class that waits for a thread, by tenant; the next tenant first."""


class TenantThreads:
    """The threads of one model that run long work on texts beside the event loop: half of them for a tenant.

    Encoding a conversation of 4 MB takes seconds. Where a tenant has all of its threads at work, more of its work
    waits, and that of another tenant begins at once. Of what waits the better class begins first, tenants of a class in
    turn. `TENANT` is set where a caller is known: by RequireKey, by the gRPC front, by lines of batches; `PRIORITY`
    by RequireKey, and where a request waits for its turn.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "texts")
        self._running: dict[Future[Any], str] = {}  # its tenant
        self._waiting: list[Lane] = [{} for _ in CLASSES]

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function that blocks returns. Work of a cancelled caller keeps its thread to its end."""
        tenant, lane = TENANT.get(), self._waiting[CLASSES.index(PRIORITY.get())]
        begun: asyncio.Future[Future[T]] = asyncio.get_running_loop().create_future()
        lane.setdefault(tenant, OrderedDict())[begun] = partial(function, *args, **kwargs)
        self._begin()
        try:
            work = await begun
        except asyncio.CancelledError:
            if waiting := lane.get(tenant):
                waiting.pop(begun, None)
                if not waiting:
                    del lane[tenant]
            raise
        return await asyncio.wrap_future(work)

    def _begin(self) -> None:
        """Give free threads to what waits."""
        self._running = {work: tenant for work, tenant in self._running.items() if not work.done()}
        while len(self._running) < THREADS and (found := self._next()):
            lane, tenant = found
            waiting = lane.pop(tenant)
            begun, function = waiting.popitem(last=False)
            if waiting:  # its turn comes again after the others'
                lane[tenant] = waiting
            if begun.done():  # its caller was cancelled just now
                continue
            try:
                work = self._pool.submit(function)
            except RuntimeError as error:  # no thread can be started
                begun.set_exception(error)
                continue
            self._running[work] = tenant
            work.add_done_callback(partial(self._ended, begun.get_loop()))
            begun.set_result(work)

    def _next(self) -> tuple[Lane, str] | None:
        """Return the best class that may begin, and its tenant with the next turn."""
        running = Counter(self._running.values())
        for lane in self._waiting:
            for tenant in lane:
                if running[tenant] < TENANT_THREADS:
                    return lane, tenant
        return None

    def _ended(self, loop: asyncio.AbstractEventLoop, _work: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the process ends
            loop.call_soon_threadsafe(self._begin)
