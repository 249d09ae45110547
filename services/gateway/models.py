"""Hold what each model needs in a gateway process, and the table of them by name.

The first model is there as long as the process. Those of `models.yaml` are opened by the first request that names one,
and let go when none has come for a while: text, connections and tasks. What waits or runs in Redis stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.gateway.adapters import FORMER_S, AdapterNames, AdapterRecord
from services.gateway.admission import Admission, Connections, HeldBytes, unknown_request
from services.gateway.auth import Caller, Keyring
from services.gateway.cluster import STALE_S, Cluster, PlacerSeen, ask_placement, placement_of
from services.gateway.delivery.background import BackgroundTasks, OrphanAdopter
from services.gateway.delivery.dispatcher import Dispatcher, client_error
from services.gateway.delivery.response_store import ResponseStore
from services.gateway.errors import RETRY, UNAVAILABLE, ApiError, shutting_down, unavailable
from services.gateway.metrics import Metrics
from services.gateway.request import Limits
from services.gateway.text.tokenizer import ModelText
from services.gateway.tracing import Tracing
from shared.dead_letters import DeadLetters, text
from shared.errors import ConfigurationError, ModelError
from shared.keys import Keys
from shared.messages import quote
from shared.models.models_file import ModelEntry, check_names
from shared.redis_client import Unreachable, connect
from shared.settings import GatewaySettings
from shared.tasks import end

log = logging.getLogger("orcinus.gateway")

EVERY_S = 1.0
MAX_OPEN = 16
"""Models beside the first with tokenizer and template in memory at a time."""
LEAST_IDLE_S = 60.0
"""A request is tokenized and has its stream by then, so a model without streams for so long is not in use."""
FIRST_LOOK_S = 5.0
UNREADABLE_S = 30.0
"""After a failure to read a model, until it is read again."""

State = Literal["ready", "loading", "asleep", "unavailable", "unknown"]
"""ready: a scheduler leads a worker. loading: one of them is missing. asleep: the worker is, and the placer wants that
for now. unavailable: both are missing, and no placer that lives has the model. unknown: Redis is silent.
"""
SERVING = ("ready", "asleep")
"""States in which new work is served; for a model that is asleep, once it is awake."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What all models of a gateway process share."""

    gateway_id: str
    keyring: Keyring
    metrics: Metrics
    tracing: Tracing | None
    letters: DeadLetters
    connections: Connections
    rereads: HeldBytes
    conversations: HeldBytes


async def first_look(*looked: asyncio.Event) -> None:
    """Wait until Redis was read or did not answer, at most FIRST_LOOK_S: before that, requests would be refused."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_LOOK_S):
            for each in looked:
                await each.wait()


class ServedModel:
    """One model: its text, its part of Redis, its queue and its requests."""

    def __init__(self, settings: GatewaySettings, text: ModelText, parts: Parts, aliases: Sequence[str] = ()) -> None:
        """settings: those of the gateway, with this model's directory and name."""
        self.settings = settings
        self.name = settings.served_model_name
        self.aliases = tuple(aliases)
        self.text = text
        self.id_part = ""
        """Of ids of requests that clients name: the name of a model beside the first."""
        self.idle_s = LEAST_IDLE_S
        self.used_at = time.monotonic()
        metrics, letters, gateway_id = parts.metrics, parts.letters, parts.gateway_id
        text.grammars.on_refused = lambda reason: metrics.refused_grammars.labels(reason).inc()
        fallback = Limits(max_model_len=text.max_model_len, max_choices=settings.max_choices)
        self.cluster = Cluster(settings, gateway_id, fallback, letters)
        self.dispatcher = Dispatcher(
            settings, gateway_id, self.cluster, metrics, letters, parts.connections.clients, text.vocab_size
        )
        self.responses = ResponseStore(settings, self.dispatcher, letters)
        self.adapters = AdapterNames(settings, letters)
        self.rereads = parts.rereads
        self.conversations = parts.conversations
        self.background = BackgroundTasks()
        self.admission = Admission(
            settings, text, parts.keyring, self.cluster, self.dispatcher, self.background, metrics, parts.tracing,
            parts.connections,
        )  # fmt: skip
        self.adopter = OrphanAdopter(
            settings, gateway_id, self.background, self.admission.adopt, self.dispatcher.streams, letters
        )
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.dispatcher.start()
        work = (self.adopter.run, self.cluster.run, self.adapters.run)
        self._watchers = [asyncio.create_task(each()) for each in work]

    async def stop(self) -> None:
        """End tasks and connections; what is in Redis continues."""
        watchers, self._watchers = self._watchers, []
        await end(*watchers[:1])  # the adopter: it begins tasks of `background`
        await self.background.stop()
        await self.dispatcher.stop()
        await end(*watchers[1:])
        await self.adapters.close()
        await self.adopter.close(redis_answers=not self.cluster.redis_error)
        await self.responses.close()
        await self.cluster.close()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that run between start and stop; none of them ends by itself."""
        return [*self.dispatcher.tasks, *self._watchers]

    @property
    def state(self) -> State:
        """Return the state as of the last look at Redis."""
        snapshot = self.cluster.snapshot
        if snapshot is None or self.cluster.is_silent:
            return "unknown"
        if not (snapshot.leases or snapshot.workers or snapshot.placement):
            return "unavailable"
        if snapshot.is_served:
            return "ready"
        sleeps = snapshot.leases and snapshot.placement is not None and not snapshot.placement.awake
        return "asleep" if sleeps else "loading"

    def unused_s(self) -> float:
        """Return the seconds since a request came or, as of the last call, was here; 0 while one is here or about to
        be.
        """
        now = time.monotonic()
        if (
            self.dispatcher.streams
            or self.background.request_ids
            or self.background.readerless
            or self.background.end_counts
        ):
            self.used_at = now
        return now - self.used_at


class ModelTable:
    """The models of a gateway process by name and alias. `run` is a task of the gateway."""

    def __init__(self, first: ServedModel, parts: Parts, entries: Iterable[ModelEntry] = ()) -> None:
        """entries: of `models.yaml`; that of the first model among them adds its aliases.

        Raise ConfigurationError for a name that means two models.
        """
        self.first_model = first
        self.open: dict[str, ServedModel] = {}
        """By each name and alias, those that are open."""
        self.on_open: Callable[[ServedModel], None] = lambda model: None
        """Called with each model that is opened."""
        self.is_draining = False
        """Set once the process is to end: no model is opened."""
        self._parts = parts
        self._entries = {entry.name: entry for entry in entries if entry.name != first.name}
        named = [(first.name, first.aliases), *((entry.name, entry.aliases) for entry in self._entries.values())]
        check_names(first.settings.models, named)
        self._entry_of = {name: entry for entry in self._entries.values() for name in (entry.name, *entry.aliases)}
        self._states: dict[str, State] = {}
        self._placer = PlacerSeen()
        self._looked_at = -math.inf  # of time.monotonic(), when they were read
        self._unreadable_until: dict[str, float] = {}  # of time.monotonic(), by model that could not be opened
        self._open_tasks: dict[str, asyncio.Task[ServedModel]] = {}
        self._close_tasks: dict[str, asyncio.Task[None]] = {}
        self._closed_records: dict[str, dict[str, AdapterRecord]] = {}  # adapters of models that are not open
        self._closed_read_at = -math.inf  # of time.monotonic()
        self._read_lock = asyncio.Lock()
        self._redis: Redis = connect(first.settings, connections=2)
        self._add(first)

    def models(self) -> list[ServedModel]:
        """Return the models that are open, each once."""
        return list(dict.fromkeys(self.open.values()))

    def names(self) -> list[str]:
        """Return the names of all models, the first model's first."""
        return [self.first_model.name, *self._entries]

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return further names of a model."""
        return self.first_model.aliases if name == self.first_model.name else self._entries[name].aliases

    def state(self, name: str) -> State:
        """Return the state of a model of `names`, as of the last look at Redis."""
        if (model := self.open.get(name)) is not None:
            return model.state
        return self._states.get(name, "unavailable") if time.monotonic() - self._looked_at <= STALE_S else "unknown"

    def states(self) -> dict[str, State]:
        """Return the state of each model."""
        return {name: self.state(name) for name in self.names()}

    def reason_not_ready(self) -> str:
        """Return an empty text when a model would serve new work."""
        reason = self.first_model.cluster.reason_of_redis()
        if reason or any(self.state(name) in SERVING for name in self._entries):
            return reason
        return self.first_model.cluster.reason_unserved()

    def unknown(self, name: str, caller: Caller | None) -> ApiError:
        """Return the 404 for a name that no model here has, or none that runs; it lists those that there are."""
        if not self._entries:
            text = f"The model {quote(name)} does not exist; this server has {self.first_model.name!r}"
            return ApiError(404, text, param="model", code="model_not_found")
        there = [each for each in self.names() if self.state(each) != "unavailable"]
        names = ", ".join(each for each in there if caller is None or caller.may_use(each)) or "none now"
        is_here = name in self._entry_of and (caller is None or caller.may_use(self._entry_of[name].name))
        if is_here:
            text = f"The model {quote(name)} has no worker; this server has {names}; start its scheduler and a worker"
            return ApiError(404, text, param="model", code=UNAVAILABLE)
        text = f"The model {quote(name)} does not exist; this server has {names}"
        return ApiError(404, text, param="model", code="model_not_found")

    def has(self, name: str) -> bool:
        """Return whether a model, open or not, has this name or alias."""
        return name in self.open or name in self._entry_of

    def with_adapter(self, name: str) -> ServedModel | None:
        """Return the open model that has an adapter of this name; None for the name or alias of a model."""
        if self.has(name):
            return None
        return next((model for model in self.models() if name in model.adapters.records), None)

    def resolve(self, name: str) -> str:
        """Return the model that a name, an alias or an adapter's name means; empty for an unknown one."""
        if name not in self._entry_of and (model := self.with_adapter(name)) is not None:
            return model.name
        if (model := self.open.get(name)) is not None:
            return model.name
        return self._entry_of[name].name if name in self._entry_of else ""

    async def open_model(self, name: str, caller: Caller | None) -> ServedModel:
        """Return a model by its name or alias, or that of an adapter of it, opened now unless it is open.

        Raise ApiError 404 for one that is unknown, or has neither worker nor scheduler; 503 for one that cannot be
        opened now.
        """
        if (model := self.open.get(name)) is not None:
            return model
        entry = self._entry_of.get(name)
        if entry is None:
            entry = next((each for each, _ in await self.closed_with(name, caller)), None)
        if entry is None:
            for model in self.models():  # for what an Idempotency-Key has begun
                if name in model.adapters.former and (caller is None or caller.may_use(model.name)):
                    return model
            raise self.unknown(name, caller)
        if entry.name not in self._states or self.state(entry.name) == "unknown":
            await self._look()  # this gateway has just started, has let go of the model, or Redis was silent
        if self._states.get(entry.name, "unavailable") == "unavailable":
            raise self.unknown(name, caller)
        return await asyncio.shield(self._open(entry))

    async def closed_with(self, name: str, caller: Caller | None = None) -> list[tuple[ModelEntry, AdapterRecord]]:
        """Return the models that are not open and have an adapter of this name, then those that had one lately.

        Raise ApiError(503).
        """
        closed_entries = [
            entry
            for entry in self._entries.values()
            if entry.name not in self.open and (caller is None or caller.may_use(entry.name))
        ]
        if self.first_model.settings.adapter_dir is None or not closed_entries:
            return []
        pipe: Any = self._redis.pipeline(transaction=False)
        for entry in closed_entries:
            pipe.hget(Keys(entry.name).adapters, name)
        try:
            answers = await pipe.execute(raise_on_error=False)
        except (*Unreachable, RedisError) as error:
            raise client_error(error) from None
        holders = []
        for entry, reply in zip(closed_entries, answers, strict=True):
            with contextlib.suppress(ValueError, TypeError):  # no record; the model sets it aside when it is open
                record = AdapterRecord.decode(reply) if isinstance(reply, bytes) else None
                if record is not None and (not record.unloaded_s or record.unloaded_s > time.time() - FORMER_S):
                    holders.append((entry, record))
        return sorted(holders, key=lambda each: each[1].unloaded_s > 0)

    async def adapters(self, caller: Caller) -> dict[str, tuple[str, AdapterRecord]]:
        """Return the model and the record of each adapter by name, of all models that the caller may use.

        Of models that are not open they are read at most once a second; a silent Redis leaves them as they were.
        """
        closed_adapters = await self._closed_adapters()
        adapters: dict[str, tuple[str, AdapterRecord]] = {}
        for name in sorted(filter(caller.may_use, self.names()), key=lambda name: name not in self.open):
            records = self.open[name].adapters.records if name in self.open else closed_adapters.get(name, {})
            for adapter in sorted(records):
                if not self.has(adapter):
                    adapters.setdefault(adapter, (name, records[adapter]))
        return adapters

    async def _closed_adapters(self) -> dict[str, dict[str, AdapterRecord]]:
        """Return the adapters that stand, of models that are not open, by model and name."""
        async with self._read_lock:
            closed_names = [name for name in self._entries if name not in self.open]
            is_read = time.monotonic() - self._closed_read_at < EVERY_S and self._closed_records.keys() >= set(
                closed_names
            )
            if (
                self.first_model.settings.adapter_dir is None
                or not closed_names
                or is_read
                or self.first_model.cluster.redis_error
            ):
                return self._closed_records
            pipe: Any = self._redis.pipeline(transaction=False)
            for name in closed_names:
                pipe.hgetall(Keys(name).adapters)
            try:
                replies = await pipe.execute(raise_on_error=False)
            except (*Unreachable, RedisError) as error:
                log.warning("adapters of models that are not open not read: %s", error)
                return self._closed_records
            self._closed_records = {
                name: self._valid_records(Keys(name).adapters, reply) if isinstance(reply, dict) else {}
                for name, reply in zip(closed_names, replies, strict=True)
            }
            self._closed_read_at = time.monotonic()
            return self._closed_records

    def _valid_records(self, key: str, raw_records: dict[bytes, bytes]) -> dict[str, AdapterRecord]:
        letters, valid = self._parts.letters, {}
        for raw, value in raw_records.items():
            if name := letters.read(key, raw, text):
                record = letters.read(f"{key}:{name}", value, AdapterRecord.decode)
                if record is not None and not record.unloaded_s:
                    valid[name] = record
        return valid

    async def find_holder(self, request_id: str, caller: Caller | None = None) -> ServedModel:
        """Return the model that has a request or a stored response of this id; the first one where none has it.
        Raise ApiError 404 where that is a model that the caller may not use; 503.
        """
        names = [name for name in self.names() if caller is None or caller.may_use(name)]
        if not names:
            raise unknown_request(request_id)
        if not self._entries:
            return self.first_model
        for model in self.models():
            if model.name in names and request_id in model.dispatcher.streams:
                return model
        pipe: Any = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.exists(Keys(name).req(request_id), Keys(name).response(request_id))
        try:
            counts = await pipe.execute()
        except (*Unreachable, RedisError) as error:
            raise client_error(error) from None
        name = next((name for name, count in zip(names, counts, strict=True) if count), self.first_model.name)
        if name not in names:
            raise unknown_request(request_id)
        holder = self.open[name] if name in self.open else await asyncio.shield(self._open(self._entries[name]))
        holder.used_at = time.monotonic()
        return holder

    async def run(self) -> None:
        """Look once a second after models that are not open, and let go of idle ones, until cancelled."""
        while True:
            for model in self.models():
                if model is self.first_model or self.open.get(model.name) is not model:  # let go meanwhile
                    continue
                if any(task.done() for task in model.tasks):
                    raise RuntimeError(f"a task of model {model.name} ended")
                if model.unused_s() > max(LEAST_IDLE_S, model.idle_s):
                    await self._close(model)
            try:
                await self._look()
            except ApiError as error:
                log.debug("models not looked for: %s", error.message)
            await asyncio.sleep(EVERY_S)

    async def close(self) -> None:
        """Stop all models but the first."""
        await end(*self._open_tasks.values())
        await asyncio.gather(*self._close_tasks.values())
        for model in self.models():
            if model is not self.first_model:
                await self._close(model)
        await self._redis.aclose()

    def _add(self, model: ServedModel) -> None:
        self.open.update(dict.fromkeys((model.name, *model.aliases), model))

    async def _close(self, model: ServedModel) -> None:
        """Let go of a model, unless that has begun."""
        if self.open.get(model.name) is not model:
            return
        self.open = {name: other for name, other in self.open.items() if other is not model}
        await self._stop(model)

    async def _stop(self, model: ServedModel) -> None:
        """End a model that is not open; a cancelled caller leaves that to `close`."""
        task = self._close_tasks[model.name] = asyncio.create_task(self._end(model))
        await asyncio.shield(task)

    async def _end(self, model: ServedModel) -> None:
        try:
            await model.stop()
            await asyncio.to_thread(model.text.close)
            log.info("model %s: let go", model.name)
        except Exception:  # the other models go on
            log.exception("model %s: did not end as it should", model.name)
        finally:
            self._close_tasks.pop(model.name, None)

    def _open(self, entry: ModelEntry) -> asyncio.Task[ServedModel]:
        """Return the one task that opens a model."""
        task = self._open_tasks.get(entry.name)
        if task is None:
            task = self._open_tasks[entry.name] = asyncio.create_task(self._begin(entry))
            task.add_done_callback(lambda task: self._open_tasks.pop(entry.name, None))
        return task

    async def _begin(self, entry: ModelEntry) -> ServedModel:
        if (model := self.open.get(entry.name)) is not None:
            return model
        if self.is_draining:
            raise shutting_down()
        await self._make_room(entry.name)
        if entry.name in self._close_tasks:  # its end deletes this gateway's token stream and heartbeat
            await asyncio.shield(self._close_tasks[entry.name])
        if (left_s := self._unreadable_until.get(entry.name, 0.0) - time.monotonic()) > 0:
            raise _unreadable(entry.name, left_s)
        try:
            model = await asyncio.to_thread(self._load, entry)
        except (ConfigurationError, ModelError) as error:
            log.error("model %s: %s", entry.name, error)
            self._unreadable_until[entry.name] = time.monotonic() + UNREADABLE_S
            raise _unreadable(entry.name, UNREADABLE_S) from None
        model.id_part = entry.name
        model.idle_s = entry.idle_s
        model.start()
        try:
            await first_look(model.cluster.has_looked, model.adapters.has_looked)
            if self.is_draining:
                raise shutting_down()
        except BaseException:
            await self._stop(model)
            raise
        self._add(model)
        self.on_open(model)
        log.info("model %s: opened", model.name)
        return model

    def _load(self, entry: ModelEntry) -> ServedModel:
        """Read tokenizer and template; blocks. Raise ConfigurationError, ModelError."""
        settings = self.first_model.settings.of_model(entry)
        text = ModelText(
            settings.model,
            settings.template_timeout_s,
            settings.tool_parser,
            settings.sampling_defaults,
            settings.reasoning_parser,
        )
        model = ServedModel(settings, text, self._parts, entry.aliases)
        model.cluster.drain_asked = self.first_model.cluster.drain_asked  # the gateway is asked, under whichever model
        return model

    def _removable(self) -> list[ServedModel]:
        """Return the open models that may be let go for another one."""
        return [each for each in self.models() if each is not self.first_model and each.unused_s() > LEAST_IDLE_S]

    async def _make_room(self, name: str) -> None:
        """Let go of the model that was used longest ago, where there are too many with those that began to open before
        this one. Raise ApiError(503).
        """
        opening = [each for each in self._open_tasks if each not in self.open]
        if len(self.models()) - 1 + opening.index(name) < MAX_OPEN:
            return
        idle = self._removable()
        if not idle:
            raise unavailable(f"model: {MAX_OPEN} models are in use at this gateway; {RETRY}", "models_busy", 10)
        await self._close(min(idle, key=lambda model: model.used_at))

    async def _look(self) -> None:
        """Read the states of the models that are not open, and open one with work that a dead gateway left, where there
        is room. Raise ApiError(503).
        """
        names = [name for name in self._entries if name not in self.open]
        if not names:
            return
        try:
            states = await look(
                self._redis, names, self.first_model.settings.shard, self._parts.gateway_id, self._placer
            )
        except (*Unreachable, RedisError) as error:
            raise client_error(error) from None
        self._states = {name: state for name, (state, _) in states.items()}
        self._looked_at = time.monotonic()
        if self.is_draining or self._open_tasks or not (len(self.models()) - 1 < MAX_OPEN or self._removable()):
            return
        now = time.monotonic()
        for name, (state, has_orphans) in states.items():
            if has_orphans and state != "unavailable" and now >= self._unreadable_until.get(name, now):
                self._open(self._entries[name]).add_done_callback(_note_error)
                return


def _unreadable(name: str, retry_after_s: float) -> ApiError:
    text = f"model {name}: its tokenizer cannot be read; see the log of the gateway"
    return ApiError(503, text, param="model", code="model_unreadable", retry_after_s=retry_after_s)


def _note_error(task: asyncio.Task[ServedModel]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("model with requests of a dead gateway not opened: %s", error)


async def look(
    redis: Redis, names: Sequence[str], shard: str, gateway_id: str, placer: PlacerSeen
) -> dict[str, tuple[State, bool]]:
    """Return of each model its state, and whether a gateway without a heartbeat may have left requests behind.

    shard: where a scheduler without workers is looked for. gateway_id: this gateway, which has left none.
    """
    keys = [Keys(name) for name in names]
    pipe: Any = redis.pipeline(transaction=False)
    for each in keys:
        pipe.zrange(each.workers, 0, 255)
        pipe.smembers(each.background)
    replies = await _lists(pipe)
    pipe = redis.pipeline(transaction=False)
    for each, workers, gateways in zip(keys, replies[::2], replies[1::2], strict=True):
        ask_placement(pipe, each.model)
        pipe.exists(each.lease(shard))
        for worker in workers:
            pipe.hmget(each.worker(_text(worker)), "ready", "shard")
        for gateway in gateways:
            pipe.exists(each.alive("gateway", _text(gateway)))
    answers = iter(await pipe.execute(raise_on_error=False))
    placements, led_by_default, shards, orphans = [], [], [], []
    for workers, gateways in zip(replies[::2], replies[1::2], strict=True):
        lives = placer.lives(next(answers), time.monotonic())
        placements.append(placement_of(lives, next(answers)))
        led_by_default.append(next(answers) == 1)
        records = [next(answers) for _ in workers]
        shards.append({_text(one[1] or b"") for one in records if isinstance(one, list) and one[0] is not None})
        silent = [next(answers) == 0 and _text(gateway) != gateway_id for gateway in gateways]
        orphans.append(any(silent))
    pipe = redis.pipeline(transaction=False)
    for each, shard_ids in zip(keys, shards, strict=True):
        for one in sorted(shard_ids):
            pipe.exists(each.lease(one))
    leases = iter(await pipe.execute(raise_on_error=False))
    states: dict[str, tuple[State, bool]] = {}
    for name, lease, placement, shard_ids, has_orphans in zip(
        names, led_by_default, placements, shards, orphans, strict=True
    ):
        is_ready = any([next(leases) == 1 and one for one in sorted(shard_ids)])
        sleeps = placement is not None and not placement.awake
        missing: State = (
            "asleep" if lease and sleeps else "loading" if lease or shard_ids or placement else "unavailable"
        )
        states[name] = ("ready" if is_ready else missing, has_orphans)
    return states


async def _lists(pipe: Any) -> list[list[bytes]]:
    """Return replies that are lists or sets; none for a key of another type."""
    replies = await pipe.execute(raise_on_error=False)
    return [[] if isinstance(reply, Exception) else list(reply) for reply in replies]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
