"""One simulated stack: Redis, schedulers, workers, gateways, clients, and the faults that a seed draws for them.

Schedulers run the whole Service, gateways the whole Gateway and the writer of events behind HTTP. Each runs in a
process of its own and is started again when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import random
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from protos import queue_pb2
from services.gateway.auth import Caller, Rates
from services.gateway.delivery import dispatcher
from services.gateway.delivery.dispatcher import Dispatcher
from services.gateway.errors import ApiError
from services.gateway.gateway import Gateway
from services.gateway.openai.answers import EventStream, EventWriter
from services.gateway.request import GenerationSpec
from services.scheduler import quarantine
from services.scheduler.core.types import DECODE, PREFILL
from services.scheduler.service import Service
from services.scheduler.workers import link
from shared import ids, redis_client
from shared.keys import CLASSES, Keys
from shared.settings import GatewaySettings, SchedulerSettings
from tests.simulation import clock, redis_server, worker
from tests.simulation.checker import Checker, Wanted
from tests.simulation.clock import Loop, Process
from tests.simulation.network import Endpoint, Network
from tests.support.gateway import generations
from tests.support.sse import DONE, Decoder

MODEL = worker.MODEL
ABANDONED_S = 8.0
"""Instead of five minutes: how long a request waits for a gateway or its client."""
WATCHES = ((0.05, 0.1), (0.3, 0.3), (5.0, 1.0))
"""Of a gateway: how long a request is silent before its record is read, and how often it looks. The last is the
product's; by the others many records are read while tokens arrive.
"""
ROLES = (
    ("",), ("", ""), ("", ""), ("", "", ""),
    (PREFILL, DECODE), (PREFILL, DECODE, DECODE), (PREFILL, PREFILL, DECODE), (PREFILL, PREFILL, DECODE, DECODE),
)  # fmt: skip
"""Roles of the workers of a stack; empty: both."""
LOST = ("record_lost", "request_not_found", "cancelled", "generation_failed")
"""Errors of requests that Redis has lost, or tokens of."""
AHEAD_S = 100.0
"""How far Redis's clock is ahead in what it loses."""
UNHEARD_S = 2.0
"""How long a scheduler goes on without hearing that another one has its worker."""
SETTLE_S = 40.0
"""Virtual time from the last fault by which every request must have ended."""


@functools.cache
def vocabulary() -> tuple[list[int], int]:
    """Return the ids of the letters a to z, and the id that ends a text."""
    tokenizer = generations.model().tokenizer
    return [tokenizer.token_to_id(chr(97 + number)) for number in range(26)], tokenizer.token_to_id("<|eos|>")


class World:
    """A stack of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = Loop(seed)
        self.draw = random.Random(seed ^ 0x5EED)
        self.network = Network(self.loop)
        self.node = redis_server.Node(self.loop, self.network)
        self.keys = Keys(MODEL)
        self.checker = Checker(self.loop, self.node, self.keys, *vocabulary())
        self.processes: dict[str, Process] = {}
        self.supervised: dict[str, Callable[[Process], Any]] = {}
        self.schedulers: list[str] = []
        self.calm = False
        draw = self.draw
        self.shards = draw.choice([1, 1, 2, 2, 3])
        self.roles = draw.choice(ROLES)
        shares = any(self.roles) or draw.random() < 0.3
        self.tiers: dict[str, worker.Tier] | None = {} if shares else None
        self.gateways = draw.choice([1, 2, 2, 3])
        self.standby = draw.random() < 0.7
        self.requests = draw.choice([4, 8, 12])
        self.faults = draw.choice([0, 2, 4, 6, 9])
        self.span_s = draw.choice([2.0, 4.0, 8.0])
        self.silent_s, self.watch_s = draw.choice(WATCHES)
        self.numbers = 0
        self.apart = random.Random(seed)  # so that all else of a seed stays what it was
        self.takes = self.apart.choice([0, 1, 2]) if PREFILL in self.roles else 0
        self.losses = random.Random(seed ^ 0x105E)  # the same for what `take_over` draws
        self.loses_lease = self.standby and self.faults > 0 and self.losses.random() < 0.2

    # Processes

    def start(self, name: str) -> None:
        """Start a process, and again whenever it ends."""
        process = self.processes[name] = Process(self.loop, name)
        self.loop.note(f"start {name}")
        process.spawn(self._supervise(name, process))

    async def _supervise(self, name: str, process: Process) -> None:
        try:
            await self.supervised[name](process)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            logging.getLogger("simulation").debug("%s", name, exc_info=error)
            self.checker.violation(f"{name} died of {error!r}")
        self.loop.note(f"end {name}")
        self.loop.call_soon(self.kill, name, process, context=contextvars.Context())

    def kill(self, name: str, process: Process | None = None) -> None:
        """Kill a process; it starts again after a while."""
        running = self.processes.get(name)
        if running is None or (process is not None and running is not process):
            return
        self.loop.note(f"kill {name}")
        del self.processes[name]
        running.kill()
        delay = self.draw.choice([0.05, 0.3, 1.0, 4.0]) * (0.3 if self.calm else 1)
        self.loop.call_later(delay, self.start, name, context=contextvars.Context())

    def _scheduler(self, shard: str) -> Callable[[Process], Any]:
        async def main(process: Process) -> None:
            settings = SchedulerSettings(
                served_model_name=MODEL, redis_url=redis_server.URL, shard=shard, lease_ms=1000, watchdog_s=3.0
            )
            service = Service(settings)
            code = await service.run()
            self.loop.note(f"{process.name} ended with {code}")

        return main

    def _worker(self, name: str, role: str) -> Callable[[Process], Any]:
        letters, eos = vocabulary()

        async def main(process: Process) -> None:
            running = worker.WorkerProcess(
                self.loop,
                self.network,
                process,
                name,
                letters,
                eos,
                self.checker.violation,
                role,
                self.tiers,
                self.take_over,
            )
            running.step_s = self.draw.choice([0.01, 0.05, 0.1])
            await running.main()

        return main

    def _gateway(self, name: str) -> Callable[[Process], Any]:
        async def main(process: Process) -> None:
            settings = GatewaySettings(served_model_name=MODEL, redis_url=redis_server.URL, drain_s=2.0)
            gateway = Gateway(settings, generations.model())
            stopping = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
            await gateway.start()
            self.network.listen(name, process, lambda endpoint: self.loop.create_task(self._handle(gateway, endpoint)))
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({stopped, *gateway.tasks}, return_when=asyncio.FIRST_COMPLETED)
            if dead := gateway.dead_task():
                self.checker.violation(f"a task of {name} died: {dead}")
            await gateway.drain(settings.drain_s)
            await gateway.stop()

        return main

    async def _handle(self, gateway: Gateway, endpoint: Endpoint) -> None:
        """Serve one connection of a client, as the HTTP layer does."""
        try:
            kind, fields, last_event = await endpoint.receive()
        except ConnectionResetError:
            return
        caller = Caller("alice" if fields["priority"] == "normal" else "bob", rates=Rates(0, 0, 100))
        try:
            if kind == "cancel":
                endpoint.send(("cancelled", await gateway.dispatcher.cancel_for(fields["id"], caller.tenant)))
                return
            if kind == "resume":
                generation = await gateway.admission.resume(fields["id"], caller.tenant, time.monotonic(), last_event)
            else:
                spec = GenerationSpec(**fields)
                if spec.background:
                    await gateway.admission.begin_background(spec, caller, time.monotonic())
                    endpoint.send(("accepted", ""))
                    return
                generation = await gateway.admission.begin(spec, caller, time.monotonic(), last_event)
        except ApiError as error:
            with contextlib.suppress(ConnectionResetError):
                endpoint.send(("refused", error))
            return
        except ConnectionResetError:
            return

        async def send(message: Any) -> None:
            if body := message.get("body"):
                with contextlib.suppress(ConnectionResetError):
                    endpoint.send(("body", body))

        async def receive() -> Any:
            with contextlib.suppress(ConnectionResetError):
                await endpoint.receive()
            return {"type": "http.disconnect"}

        def put(body: bytes) -> None:
            with contextlib.suppress(ConnectionResetError):
                endpoint.send(("body", body))

        extensions: dict[str, Any] = {}
        if self.loop.random.random() < 0.5:
            extensions = {"orcinus.has_room": {"call": lambda: True}, "orcinus.write": {"call": put}}
        await EventStream(generation, EventWriter(generation, "fp"), 1.0)({"extensions": extensions}, receive, send)
        endpoint.close()

    # Clients

    def fields(self) -> dict[str, Any]:
        """Return one drawn request."""
        draw = self.draw
        letters, eos = vocabulary()
        self.numbers += 1
        named = draw.random() < 0.5
        prompt = [draw.choice(letters[:3]) for _ in range(draw.choice([1, 3, 9, 20, 40]))]
        fields = {
            "id": f"cmpl-{self.numbers}", "endpoint": "completions", "model": MODEL, "created": 1, "prompts": [prompt],
            "n": draw.choice([1, 1, 1, 2, 3]), "max_tokens": draw.choice([1, 4, 12, 30, 60]), "stop_ids": [eos],
            "sampling": queue_pb2.Sampling(seed=draw.getrandbits(63)), "priority": draw.choice(CLASSES), "stream": True,
            "stop": draw.choice([[], [], ["e"], ["ab", "x"]]),
            "body_sha256": b"x" if named else b"", "background": draw.random() < 0.2,
        }  # fmt: skip
        fields["sampling"].grammar = worker.grammar_of(fields["sampling"].seed)
        return fields

    async def client(self, at_s: float) -> None:
        """Send one request and see it to its end, at any gateway that answers; or leave."""
        fields = self.fields()
        await asyncio.sleep(at_s)
        wanted = self.checker.wanted(fields)
        leaves_s = self.draw.choice([0.01, 0.1, 1.0]) if self.draw.random() < 0.15 else 1e9
        reading = asyncio.create_task(self._read(fields, wanted))
        await asyncio.wait({reading}, timeout=leaves_s)
        if not reading.done():
            self.loop.note(f"client leaves {fields['id']}")
            wanted.left = True
            reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    async def _read(self, fields: dict[str, Any], wanted: Wanted) -> None:
        last_event = ""
        persists = bool(fields["body_sha256"]) or fields["background"]
        while not wanted.complete:
            gateway = f"gateway-{self.draw.randrange(self.gateways)}"
            try:
                async with asyncio.timeout(3.0):
                    endpoint = await self.network.connect(gateway)
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(0.3)
                continue
            kind = (
                "begin"
                if (persists or not wanted.sent) and not (fields["background"] and wanted.accepted)
                else "resume"
            )
            if kind == "resume" and not wanted.accepted and not fields["background"]:
                wanted.left = True  # the client knows no id by which it could go on
                endpoint.close()
                return
            decoder, rest = Decoder(), ""
            try:
                endpoint.send((kind, fields, last_event))
                wanted.sent = True
                while not wanted.complete:
                    async with asyncio.timeout(20.0):
                        what, body = await endpoint.receive()
                    if what == "accepted":
                        wanted.accepted = True
                        if self.draw.random() < 0.5:
                            wanted.left_background = True
                            return
                        break
                    if what == "refused":
                        if self._refused(body, wanted, fields):
                            return
                        break
                    rest += body.decode()
                    *lines, rest = rest.split("\n")
                    for line in lines:
                        if (event := decoder.feed(line)) is None:
                            continue
                        if event.data == DONE:
                            wanted.end(self.checker)
                            break
                        wanted.accepted = True
                        if "error" in event.json:
                            if self._refused(event.json["error"], wanted, fields):
                                return
                            raise ConnectionResetError
                        last_event = event.id or last_event
                        wanted.take(event.json, self.checker)
            except (ConnectionResetError, TimeoutError):
                wanted.breaks += 1
            finally:
                endpoint.close()
            if not wanted.complete:
                await asyncio.sleep(0.05 + 0.3 * self.loop.random.random())

    def _refused(self, error: Any, wanted: Wanted, fields: dict[str, Any]) -> bool:
        """Take a refusal; return whether the client gives up."""
        code = error.code if isinstance(error, ApiError) else error["code"]
        text = error.message if isinstance(error, ApiError) else error["message"]
        self.loop.note(f"refusal of {fields['id']}: {code}: {text}")
        if code in ("taken_over", "handed_over", "shutting_down", "no_scheduler", "redis_unavailable", "keys_unread",
                    "queue_full", "tenant_queue_full", "rate_limit_exceeded"):  # fmt: skip
            if not wanted.accepted:
                wanted.sent = bool(fields["body_sha256"]) and wanted.sent
                if code == "redis_unavailable" and not fields["body_sha256"]:
                    wanted.left = True  # it may be in the queue; the gateway cancels it
                    return True
            return False
        if code == "cancelled" and wanted.breaks:
            wanted.left = True
            return True
        if code == "request_not_found" and not wanted.accepted:
            return False
        if wanted.harmed and code in LOST:
            wanted.left = True
            return True
        self.checker.violation(f"client of {fields['id']} got {code}: {text}")
        return True

    # Faults

    def fault(self) -> None:
        """Draw one fault and let it happen."""
        draw, loop = self.draw, self.loop
        names = sorted(self.processes)
        if not names or self.calm:
            return
        leaders = [name for name in names if name in self.schedulers]
        name = draw.choice(leaders if leaders and draw.random() < 0.4 else names)
        process = self.processes[name]
        empty = contextvars.Context()
        kinds = ["kill", "pause", "pause", "cut", "cut", "term", "reset", "lost replies", "clock", "slow"]
        kinds += ["lag", "no replies", "redis restart", "redis loses"]
        if name in self.schedulers:
            kinds += ["pause"] * 6  # a leader that is paused for longer than its lease is the hardest case
        kind = draw.choice(kinds)
        loop.note(f"fault {kind} {name}")
        if kind == "kill":
            self.kill(name)
        elif kind == "term":
            process.signal(signal.SIGTERM)
        elif kind == "pause":
            process.pause()
            loop.call_later(draw.choice([0.1, 0.8, 1.5, 1.5, 3.0, 7.0]), process.resume, context=empty)
        elif kind == "cut":
            other = draw.choice([redis_server.ADDRESS, redis_server.ADDRESS, *names])
            if other != name:
                self.network.cut(name, other)
                loop.call_later(draw.choice([0.2, 1.5, 4.0, 7.0]), self.network.heal, context=empty)
        elif kind == "reset":
            for endpoint in list(self.network.endpoints):
                if endpoint.owner == name and draw.random() < 0.7:
                    self.network.reset(endpoint)
        elif kind == "lost replies":
            self.node.reset_before_reply = 0.03
            loop.call_later(1.0, setattr, self.node, "reset_before_reply", 0.0, context=empty)
        elif kind == "clock":
            self.node.move_clock(draw.choice([-2.0, -0.5, 0.5, 1.5]))
        elif kind == "slow":
            self.network.slow = 20.0
            loop.call_later(1.0, setattr, self.network, "slow", 1.0, context=empty)
        elif kind == "lag":
            for endpoint in list(self.network.endpoints):
                if endpoint.owner == name and draw.random() < 0.5:
                    endpoint.lag_s = draw.choice([0.02, 0.2])
        elif kind == "no replies":
            self.node.silence(name)
        elif kind == "redis restart":
            self._end_redis()
        elif kind == "redis loses":
            restore, lose = self.node.keep(), self.checker.loss()
            back_s = draw.choice([0.0, 0.0, 0.5, 2.0])

            def lose_tail() -> None:
                if not self.calm:
                    self._end_redis()
                    if restore():
                        self.node.move_clock(-back_s)
                        lose()

            loop.call_later(draw.choice([0.05, 0.2, 0.5, 1.5]), lose_tail, context=empty)
            if back_s or draw.random() < 0.7:
                self.kill(name)  # the next epochs are given in what is lost

    def take_over(self, taken: worker.WorkerProcess) -> None:
        """Draw whether another scheduler takes a worker that has saved KV. The one that has it hears of that late."""
        if not self.takes or self.calm or taken.leader not in self.schedulers or self.apart.random() > 0.3:
            return
        self.takes -= 1
        self.loop.note(f"another scheduler takes {taken.name}")
        self.network.cut(taken.leader, taken.name)
        self.loop.call_later(UNHEARD_S, self.network.heal, context=contextvars.Context())
        Process(self.loop, "another scheduler").spawn(taken.take())

    async def lose_lease(self) -> None:
        """Let Redis lose that a shard has another leader, which is paused meanwhile.

        Either the clock was set back and all epochs follow the counter: then the next leader gets the same epoch.
        Or the clock is ahead in what is lost: then workers have seen epochs far above the counter and the clock.
        """
        draw, node, lease = self.losses, self.node, self.keys.lease("shard-0")
        ahead_s = draw.choice([0.0, AHEAD_S])
        await asyncio.sleep(draw.uniform(0.5, self.span_s))
        if not ahead_s:
            node.move_clock(-self.loop.now_s - 1.0)
            await asyncio.sleep(draw.uniform(0.3, 0.8))  # leases are renewed by the clock as it is now
        leader, acquired = self.checker.holder(lease)
        if leader not in self.processes:
            return
        self.loop.note(f"fault lost lease {leader}")
        restore, lose = node.keep(), self.checker.loss()
        node.move_clock(ahead_s)
        self.kill(leader)
        end_s = self.loop.now_s + 6.0
        while self.checker.holder(lease)[1] == acquired and self.loop.now_s < end_s:
            await asyncio.sleep(0.02)
        await asyncio.sleep(draw.choice([0.05, 0.2, 0.5]))
        paused = self.processes.get(self.checker.holder(lease)[0])
        if paused is not None:
            paused.pause()
            self.loop.call_later(draw.choice([1.5, 3.0, 7.0]), paused.resume, context=contextvars.Context())
        self._end_redis()
        if restore():
            node.move_clock(-ahead_s)
            lose()

    def _end_redis(self) -> None:
        """End Redis; it starts again after a while."""
        self.node.end()
        delay_s = self.draw.choice([0.05, 0.3, 1.5, 5.0])
        self.loop.note(f"redis ends for {delay_s} s")
        self.loop.call_later(delay_s, self.node.start, context=contextvars.Context())

    # The run

    async def play(self) -> None:
        """Run the whole scenario; the checker holds what was wrong."""
        for shard in range(self.shards):
            self.supervised[f"shard-{shard}"] = self._scheduler(f"shard-{shard}")
        if self.standby:
            self.supervised["standby-0"] = self._scheduler("shard-0")
        self.schedulers = list(self.supervised)
        for number, role in enumerate(self.roles):
            self.supervised[f"worker-{number}"] = self._worker(f"worker-{number}", role)
        for number in range(self.gateways):
            self.supervised[f"gateway-{number}"] = self._gateway(f"gateway-{number}")
        for name in self.supervised:
            self.start(name)
        clients = Process(self.loop, "clients")
        tasks = [clients.spawn(self.client(self.draw.uniform(0.5, self.span_s))) for _ in range(self.requests)]
        losing = self.loop.create_task(self.lose_lease()) if self.loses_lease else None
        moments = sorted(self.draw.uniform(0.3, self.span_s + 2) for _ in range(self.faults))
        for moment in moments:
            await asyncio.sleep(moment - self.loop.now_s)
            self.fault()
        await asyncio.sleep(max(0.0, self.span_s - self.loop.now_s))
        if losing is not None:
            await losing
        self._calm_down()
        end_s = self.loop.now_s + SETTLE_S
        while self.loop.now_s < end_s and not self.checker.violations:
            await asyncio.sleep(0.5)
            if all(task.done() for task in tasks) and not self.checker.open():
                break
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception():
                self.checker.violation(f"a client died of {task.exception()!r}")
        if not self.checker.violations:
            self.checker.check_end()

    def _calm_down(self) -> None:
        """End all faults."""
        self.calm = True
        self.loop.note("calm")
        self.network.slow = 1.0
        self.network.heal()
        self.node.reset_before_reply = 0.0
        self.node.start()
        for endpoint in self.network.endpoints:
            endpoint.lag_s = 0.0
        for process in list(self.processes.values()):
            if process.paused:
                process.resume()


class Log(logging.Handler):
    """Errors that services log are violations, except those that say what a fault leads to."""

    EXPECTED = ("lease lost", "another scheduler holds")

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._world.loop.note(f"log {record.levelname} {text}")
        if record.levelno >= logging.ERROR and not any(part in text for part in self.EXPECTED):
            error = f": {record.exc_info[1]!r}" if record.exc_info else ""
            self._world.checker.violation(
                f"logged by {clock.current.get() and clock.current.get().name}: {text}{error}"
            )


def _noted(checker: Checker, command: Callable[..., None], kind: str) -> Callable[..., None]:
    """Return a command of the dispatcher that the checker learns of."""

    def noted(self: Dispatcher, request_id: str, *rest: Any) -> None:
        checker.asked(request_id, f"{kind} {rest[0]}" if kind == "stop" else kind)
        command(self, request_id, *rest)

    return noted


@contextlib.contextmanager
def simulated(seed: int) -> Iterator[World]:
    """Yield a world; the services use its clock, network and names."""
    vocabulary()
    world = World(seed)
    logger = logging.getLogger("orcinus")
    handler = Log(world)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    random.seed(seed)
    redis_server.Connection.network = world.network
    worker.Channel.network = world.network
    ids.os, ids.socket = SimpleNamespace(getpid=lambda: 1), SimpleNamespace(gethostname=lambda: "host")
    world.loop.set_exception_handler(
        lambda _, context: world.checker.violation(f"{context.get('message')}: {context.get('exception')!r}")
    )
    clock.use(world.loop)
    replaced = [
        (redis_client, "BlockingConnectionPool", redis_server.Pool),
        (redis_client, "Wire", redis_server.Wire),
        (link, "aio_channel", worker.Channel),
        (quarantine, "ABANDONED_S", ABANDONED_S),
        (dispatcher, "SILENT_S", world.silent_s),
        (dispatcher, "EVERY_S", world.watch_s),
        (Dispatcher, "cancel", _noted(world.checker, Dispatcher.cancel, "cancel")),
        (Dispatcher, "stop_choice", _noted(world.checker, Dispatcher.stop_choice, "stop")),
    ]
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, other in replaced:
                stack.enter_context(patch.object(owner, name, other))
            yield world
    finally:
        clock.use(None)
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def run(seed: int) -> World:
    """Play one seed and return its world."""
    with simulated(seed) as world:
        asyncio.set_event_loop(world.loop)
        try:
            world.loop.run_until_complete(world.play())
        except clock.StuckError as error:
            world.checker.violation(str(error))
        except RuntimeError:
            if not world.checker.violations:  # else the checker has stopped the loop
                raise
        finally:
            asyncio.set_event_loop(None)
    return world
