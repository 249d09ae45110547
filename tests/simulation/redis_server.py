"""The simulated Redis: fakeredis with its Lua on the virtual clock, behind the simulated network.

The scripts are those of shared/lua. A command runs in one piece when its message arrives. redis-py's own client, pool
and time-outs are the real ones; only the socket is not (`Connection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fakeredis
from fakeredis._commands import COMMANDS_WITH_SUB, command
from fakeredis._helpers import NoResponse, SimpleError  # no public name
from fakeredis._socket import FakeSocket
from fakeredis.commands_mixins.scripting_mixin import LUA_MODULE, _convert_redis_arg
from redis.asyncio import BlockingConnectionPool
from redis.asyncio import Connection as _Connection
from redis.exceptions import ResponseError

from tests.simulation.clock import Loop
from tests.simulation.network import Endpoint, Network

ADDRESS = "redis"
URL = "redis://redis:6379/0?protocol=2"
MEMORY = b"# Memory\r\nused_memory:1000000\r\nmaxmemory:%d\r\n"


WRITES = (b"EVALSHA", b"EVAL", b"XADD")
"""Commands that may add what a blocking read waits for."""


class Server(fakeredis.FakeServer):
    """The data of one Redis."""

    def __init__(self) -> None:
        super().__init__(version=(7,), server_type="valkey")
        self.compiled: dict[bytes, Any] = {}
        self.blocked: list[Socket] = []
        self.maxmemory = 0
        self.below_zero: list[str] = []
        """Counters that a script took below 0: more was counted back than was counted."""


class Socket(FakeSocket):
    """A client's session. Replies go to `out`."""

    def __init__(self, server: Server, out: Callable[[Any], None]) -> None:
        super().__init__(server, 0, client_class=_Connection)
        self._data = server
        self._out = out
        self.waits: tuple[Callable[[bool], Any], Callable[[Any], Any] | None] | None = None
        self.timer: Any = None
        self.later: Callable[[float], Any] | None = None
        self.answer: Callable[[], None] = lambda: None
        self.run: Callable[[], None] = lambda: None

    def put_response(self, msg: Any) -> None:
        self._out(msg)

    def run_words(self, words: Sequence[bytes]) -> None:
        """Run one command."""
        self._process_command(list(words))

    def _blocking(
        self, timeout: float | None, func: Callable[[bool], Any], shape: Callable[[Any], Any] | None = None
    ) -> Any:
        # Called for a first time, fakeredis's XREADGROUP may forget what it has read; an empty reply is none.
        found = func(False) or None
        if found is not None or self._in_transaction or self.later is None:
            return found if shape is None else shape(found)
        self.waits = (func, shape)
        self._data.blocked.append(self)
        self.timer = self.later(timeout) if timeout else None
        return NoResponse()

    def retry(self, last: bool = False) -> bool:
        """Look again for what a blocking read waits for; answer it if it is there, or if this is the last try."""
        assert self.waits is not None
        func, shape = self.waits
        try:
            found = None if last else func(False) or None
        except SimpleError as error:
            found, last, shape = error, True, None
        if found is None and not last:
            return False
        self.forget()
        self.put_response(self._decode_result(found if shape is None else shape(found)))
        return True

    def forget(self) -> None:
        """Wait no more."""
        if self.waits is not None:
            self.waits = None
            self._data.blocked.remove(self)
            if self.timer is not None:
                self.timer.cancel()

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """Run a script. fakeredis compiles it at each call and collects all garbage after each; this one does not."""
        server: Any = self._data
        runtime = self._get_server_runtime(server)
        sha = hashlib.sha1(script).hexdigest().encode()
        server.script_cache[sha] = script
        if script not in server.compiled:
            server.compiled[script] = runtime.compile(script)
        server._lua_current_socket[0] = self
        self._script_resp = 2
        server._lua_set_keys_argv(
            runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
        )
        try:
            result = server.compiled[script]()
        except LUA_MODULE.LuaError as error:
            raise SimpleError(f"ERR script {sha.decode()}: {error}") from error
        finally:
            self._script_resp = None
        return self._convert_lua_result(result, nested=False)

    def evalsha(self, sha1: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        script = self._server.script_cache.get(sha1)
        if script is None:
            raise SimpleError("NOSCRIPT No matching script.")
        return self.eval(script, numkeys, *keys_and_args)

    def xpending(self, key: Any, group_name: bytes, *args: bytes) -> Any:
        """Answer a summary as servers do: counts of consumers as text, and no list where nothing is pending."""
        found = super().xpending(key, group_name, *args)
        if args:
            return found
        return [*found[:3], [[name, str(count).encode()] for name, count in sorted(found[3])] or None]

    @command((), (bytes,), name="info")
    def info(self, *sections: bytes) -> bytes:
        """Answer what the services read; fakeredis has no INFO."""
        return MEMORY % self._data.maxmemory

    def _lua_redis_call(self, lua_runtime: Any, expected_globals: set[Any], op: bytes, *args: Any) -> Any:
        """Run a script's command; fakeredis also lists all globals each time, in search of new ones."""
        name = op.decode().lower()
        if args and name in COMMANDS_WITH_SUB:
            name, args = f"{name} {_convert_redis_arg(args[0]).decode().lower()}", args[1:]
        func, signature = self._name_to_func(name)
        words = [_convert_redis_arg(arg) for arg in args]
        result = self._run_command(func, signature, words, True)
        if name == "hincrby" and isinstance(result, int) and result < 0:
            self._data.below_zero.append(f"{words[0].decode()} {words[1].decode()}")
        return self._convert_redis_result(lua_runtime, result)


class Node:
    """The Redis of a simulation: sessions over the network, blocking reads on the virtual clock."""

    def __init__(self, loop: Loop, network: Network) -> None:
        self.loop = loop
        self.data = Server()
        self.offset_s = 0.0  # of Redis's clock from the wall clock
        self.restores = 0  # how often data was lost
        self.before: list[Callable[[str, Sequence[bytes]], None]] = []
        self.after: list[Callable[[str, Sequence[bytes], Any], None]] = []
        self.commands = 0
        self.reset_before_reply = 0.0
        """Chance that a connection breaks between the effect of a command and its reply."""
        self.silent: set[Endpoint] = set()
        """Connections on which commands are carried out and never answered."""
        self._network = network
        self.start()

    def start(self) -> None:
        self._network.listen(ADDRESS, None, self._accept)

    def end(self) -> None:
        """End Redis: connections break, and new ones are refused until `start`. Scripts are forgotten, data is not."""
        self._network.refuse(ADDRESS)
        self.silent.clear()
        self.data.script_cache.clear()

    def move_clock(self, by_s: float) -> None:
        """Set Redis's clock forward or back."""
        self.offset_s += by_s

    def keep(self) -> Callable[[], bool]:
        """Return what restores the data as it is now, as from a log without its tail. It does nothing and returns False
        after another restore: that one may have lost this data.
        """
        database, restores = self.data.dbs[0], self.restores
        kept = copy.deepcopy(dict(database.items()))

        def restore() -> bool:
            if self.restores != restores:
                return False
            self.restores += 1
            with self.data.lock:
                database.clear()
            database.update(kept)
            return True

        return restore

    def silence(self, name: str) -> None:
        """Answer no more on the connections that a process has now."""
        self.silent |= {each for each in self._network.endpoints if each.owner == ADDRESS and each.peer.owner == name}

    def local(self) -> Callable[..., Any]:
        """Return a function that runs a command at once and returns its reply, for checks."""
        replies: list[Any] = []
        socket = Socket(self.data, replies.append)

        def call(*words: str | bytes | int) -> Any:
            encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
            with self._clock():
                socket.run_words(encoded)
            return replies.pop()

        return call

    @contextlib.contextmanager
    def _clock(self) -> Iterator[None]:
        before, self.loop.wall_offset_s = self.loop.wall_offset_s, self.offset_s
        try:
            yield
        finally:
            self.loop.wall_offset_s = before

    def _accept(self, endpoint: Endpoint) -> None:
        owner = endpoint.peer.owner
        replies: list[Any] = []
        waiting: deque[Sequence[bytes]] = deque()
        socket = Socket(self.data, replies.append)

        def answer() -> None:
            for reply in replies:
                if not (endpoint.broken or endpoint.closed or endpoint in self.silent):
                    endpoint.send(reply)
            replies.clear()

        def run() -> None:
            while waiting and socket.waits is None:
                words = waiting.popleft()
                self.commands += 1
                for hook in self.before:
                    hook(owner, words)
                with self._clock():
                    socket.run_words(words)
                reply = replies[-1] if replies else None
                for follow in self.after:
                    follow(owner, words, reply)
                if self.reset_before_reply and self.loop.random.random() < self.reset_before_reply:
                    self.loop.note(f"reset of {owner} behind {words[0].decode()}")
                    waiting.clear()
                    self._network.reset(endpoint)
                answer()

        def later(seconds: float) -> Any:
            return self.loop.call_later(seconds, expire, context=contextvars.Context())

        def expire() -> None:
            if socket.waits is not None:
                socket.retry(last=True)
                answer()
                run()

        def received(commands: list[Sequence[bytes]]) -> None:
            waiting.extend(commands)
            run()
            if any(words[0] in WRITES for words in commands):
                self._serve_blocked()

        socket.later = later
        socket.answer = answer
        socket.run = run
        endpoint.received = received
        endpoint.lost = socket.forget

    def _serve_blocked(self) -> None:
        """Answer blocking reads, the longest waiting first, as Redis does after each command."""
        again = True
        while again:
            again = False
            for socket in list(self.data.blocked):
                with self._clock():
                    self.data.dbs[0].time = time.time()
                    done = socket.waits is not None and socket.retry()
                if done:
                    again = True
                    socket.answer()
                    socket.run()


class Connection(_Connection):
    """redis-py's connection over the simulated network: commands and replies travel as they are, without RESP."""

    network: Network

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader = self._writer = await self.network.connect(ADDRESS)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Nothing is negotiated."""

    def set_parser(self, parser_class: Any) -> None:
        self._parser = _NoParser()

    def pack_command(self, *args: Any) -> list[list[bytes]]:
        head = args[0].encode().split() if isinstance(args[0], str) else [args[0]]
        return [[*head, *map(self.encoder.encode, args[1:])]]

    def pack_commands(self, commands: Any) -> list[list[bytes]]:
        return [words for command in commands for words in self.pack_command(*command)]

    async def can_read(self) -> bool:
        return bool(self._reader.inbox) or self._reader.broken

    async def _read_response_from_parser(
        self, disable_decoding: bool = False, push_request: bool | None = False
    ) -> Any:
        return await self._reader.receive()


class Wire:
    """Takes the place of redis_client.Wire."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def call(self, words: Any, deadline_at: float | None) -> Any:
        """Send a command and return the answer, which may be an error."""
        async with asyncio.timeout_at(deadline_at):
            await self._connection.send_packed_command(self._connection.pack_command(*words), check_health=False)
            try:
                return await self._connection.read_response()
            except ResponseError as error:
                return error


class _NoParser:
    def on_connect(self, connection: Any) -> None:
        """Replies need no parser."""

    def on_disconnect(self) -> None:
        """Replies need no parser."""


class Pool(BlockingConnectionPool):
    """The pool that `connect` of redis_client.py makes, of such connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"connection_class": Connection})
