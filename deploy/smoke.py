"""Check the promises of a stack that compose.yaml started: `smoke.py --project NAME --port PORT`.

From outside as a client (the key from the logs, streaming and not, refusals), and as an operator (users, file systems,
capabilities, published ports, networks); then a worker dies in the middle of a stream, and the only gateway under
clients that connect. What several of a service promise smoke_scaled.py asks. Standard library and the docker command
only; exit 1 where a promise is not kept.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVICES = {"redis", "worker", "scheduler", "gateway", "front"}
ONE_SHOT = {"keys", "pull"}
"""Services that end once their work is done."""
PROMPT = "def main():\n"
LOOKS = 5
"""At the processes of a container, until none is root's."""
STREAMS = 5
"""Tries to kill a worker in the middle of a stream."""
PAUSE_S = 0.3
"""A stream pauses at least so long while its worker starts again."""
CONNECTING, REQUESTS = 8, 5
"""Clients, and the requests of each, every one over a new connection, while the gateway starts again."""


class BrokenPromiseError(Exception):
    """What was asked for, and what was found."""


def check(kept: bool, promise: str, found: object = "") -> None:
    if not kept:
        raise BrokenPromiseError(f"{promise}; found: {found!r}" if found != "" else promise)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, f"{' '.join(command)} works", done.stderr[-500:])
    return done.stdout


class Stack:
    """A running stack as its client and its operator see it."""

    def __init__(self, project: str, port: int) -> None:
        self.project, self.port, self.key = project, port, ""

    def compose(self, *command: str) -> str:
        return run("docker", "compose", "-p", self.project, *command)

    def containers(self) -> list[dict[str, Any]]:
        ids = self.compose("ps", "-q", "--all").split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids))
        return found

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, http.client.HTTPResponse]:
        """Send one request; return its status and the response with an unread body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Content-Type": "application/json", **(headers or {})}
        if key != "":
            given["Authorization"] = f"Bearer {key or self.key}"
        connection.request(method, path, json.dumps(body) if body is not None else None, given)
        response = connection.getresponse()
        return response.status, response

    def json(self, method: str, path: str, body: object = None, key: str | None = None) -> tuple[int, Any]:
        status, response = self.ask(method, path, body, key)
        return status, json.loads(response.read())

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion up to [DONE], which must come."""
        status, response = self.ask("POST", "/v1/completions", {**body, "stream": True})
        check(status == 200, "a streamed completion answers 200", response.read(500) if status != 200 else "")
        kind = response.headers.get("Content-Type", "")
        check(kind.startswith("text/event-stream"), "a stream is text/event-stream", kind)
        done = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            check(not done, "nothing follows [DONE]", line)
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            check("error" not in event, "a stream holds no error", event)
            yield event
        check(done, "a stream ends with [DONE]")


def labels(container: dict[str, Any]) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def key_is_printed_once(stack: Stack) -> None:
    logs = stack.compose("logs", "--no-color", "--no-log-prefix", "keys")
    keys = re.findall(r"sk-orcinus-[\w-]{40,}", logs)
    check(len(keys) == 1, "the logs of `keys` show exactly one key", len(keys))
    stack.compose("start", "keys")
    run("docker", "wait", *stack.compose("ps", "-q", "--all", "keys").split())
    logs = stack.compose("logs", "--no-color", "--no-log-prefix", "keys")
    check(len(re.findall(r"sk-orcinus-[\w-]{40,}", logs)) == 1, "a second start prints no key")
    check("earlier start" in logs, "a second start says that the key was made before", logs)
    stack.key = keys[0]


def without_key_nothing_is_answered(stack: Stack) -> None:
    for key in ("", "sk-orcinus-wrong"):
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("POST", "/v1/completions", {"model": "demo-model", "prompt": "x", "max_tokens": 1}),
            ("POST", "/tokenize", {"model": "demo-model", "prompt": "x"}),
            ("GET", "/metrics", None),
        ):
            status, answer = stack.json(method, path, body, key)
            check(status == 401, f"{method} {path} without the key answers 401", status)
            check(answer["error"]["code"] == "invalid_api_key", "the 401 has OpenAI's shape", answer)
    status, _ = stack.ask("GET", "/health/ready", key="")
    check(status == 200, "/health/ready needs no key and answers 200", status)


def models_are_listed(stack: Stack) -> str:
    status, answer = stack.json("GET", "/v1/models")
    check(status == 200, "/v1/models answers 200", answer)
    names = [model["id"] for model in answer["data"]]
    check(names == ["demo-model"], "/v1/models lists the demo model", names)
    return str(names[0])


def completion_streams(stack: Stack, model: str) -> None:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    events = list(stack.stream({**body, "return_token_ids": True, "stream_options": {"include_usage": True}}))
    usage = events[-1].get("usage")
    check(bool(usage) and usage["completion_tokens"] == 32, "the last event counts 32 tokens", events[-1])
    choices = [choice for event in events for choice in event["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or []]
    check(len(tokens) == 32, "the events carry 32 tokens", len(tokens))
    with_text = [choice for choice in choices if choice["text"]]
    check(len(with_text) >= 4, "text comes in several events", len(with_text))
    check(choices[-1]["finish_reason"] == "length", "the last choice says why it ended", choices[-1])

    status, whole = stack.json("POST", "/v1/completions", body)
    check(status == 200, "a completion answers 200", whole)
    streamed = "".join(choice["text"] for choice in choices)
    check(whole["choices"][0]["text"] == streamed, "streamed or not, the greedy text is the same", (whole, streamed))
    check(whole["usage"]["completion_tokens"] == 32, "usage counts 32 tokens", whole["usage"])

    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    status, answer = stack.json("POST", "/v1/chat/completions", chat)
    check(status == 200 and answer["choices"][0]["message"]["role"] == "assistant", "chat answers", answer)


def backend_is_named(stack: Stack, model: str) -> None:
    """Check that the worker does not run on plain torch: the image has the CPU kernels of x86-64."""
    key = f"orcinus:{{{model}}}:stats:shard-0"
    read = f"REDISCLI_AUTH=$(cat /secrets/redis-ops/password) redis-cli --user ops hget '{key}' backend"
    backend = stack.compose("exec", "-T", "redis", "sh", "-c", read).strip()
    check(bool(backend), f"{key} names the worker's backend")
    if platform.machine() in ("x86_64", "AMD64"):
        check(backend != "reference", "the worker uses compiled kernels", backend)
    print(f"        backend: {backend}")


class Signals:
    """A shell in a container that is there already when a signal is to come at once.

    From inside, as `docker kill` counts as a wish that the container stay down. Spares pid 1, which ends with its
    child.
    """

    def __init__(self, stack: Stack, service: str, index: int = 1) -> None:
        self.killed = False
        self._shell = subprocess.Popen(
            [
                *("docker", "compose", "-p", stack.project, "exec", "-T", "--index", str(index), service),
                *("sh", "-c", "echo ready; while read -r signal; do kill -$signal -1; echo sent; done"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._answer()
        check(said == "ready", f"a shell runs in {service}", said)

    def send(self, signal: str) -> None:
        """Send a signal to all processes, and wait until the kernel has it."""
        if self._shell.stdin:
            self._shell.stdin.write(f"{signal}\n")
            self._shell.stdin.flush()
        said = self._answer()
        check(said == "sent", f"{signal} reaches the processes", said)

    def kill(self) -> None:
        """Kill the processes; the shell dies with them, so no exit status is expected."""
        if not self.killed:
            self._shell.communicate("KILL\n", timeout=60)
            self.killed = True

    def end(self) -> None:
        self._shell.communicate(timeout=60)

    def _answer(self) -> str:
        return self._shell.stdout.readline().strip() if self._shell.stdout else ""


def stream_survives_its_worker(stack: Stack, model: str) -> None:
    """Kill the worker's processes after the first tokens: Docker restarts it and the stream continues.

    A stream that was computed whole before its client had killed the worker shows no pause: then another is tried.
    """
    for restarts in range(1, STREAMS + 1):
        pause = longest_pause(stack, model, Signals(stack, "worker"))
        worker_restarted(stack, model, restarts)
        if pause >= PAUSE_S:
            break
    check(pause >= PAUSE_S, "the worker was killed before the stream's end", pause)
    print(f"        longest pause of the stream behind the kill: {pause:.1f} s")


def worker_restarted(stack: Stack, model: str, restarts: int) -> None:
    """Wait until Docker has restarted the worker so often in all, and it answers."""
    by = time.monotonic() + 60
    state: dict[str, Any] = {}
    while time.monotonic() < by:
        worker = next(one for one in stack.containers() if labels(one) == "worker")
        state = {"restarts": worker["RestartCount"], "status": worker["State"]["Status"]}
        if state == {"restarts": restarts, "status": "running"}:
            break
        time.sleep(0.2)
    check(state == {"restarts": restarts, "status": "running"}, "Docker restarted the worker", state)
    status, answer = stack.json("POST", "/v1/completions", {"model": model, "prompt": PROMPT, "max_tokens": 1})
    check(status == 200, "a worker that was restarted answers", answer)


def longest_pause(stack: Stack, model: str, worker: Signals) -> float:
    """Return the most seconds without an event behind the kill of a stream's worker, after its first tokens."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 450, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    tokens: list[int] = []
    longest, last = 0.0, 0.0
    for event in stack.stream(body):
        if worker.killed:
            longest = max(longest, time.monotonic() - last)
        tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
        if tokens and not worker.killed:
            worker.kill()
        last = time.monotonic()
    check(len(tokens) == 450, "a stream holds every token once after its worker died", len(tokens))
    return longest


def clients_wait_for_the_gateway(stack: Stack) -> None:
    """Kill the only gateway: clients that connect from its end on wait for the next one, which Docker starts."""
    clients = [Connecting(stack) for _ in range(CONNECTING)]
    (gateway,) = stack.compose("ps", "-q", "gateway").split()
    restarts = ("docker", "inspect", "-f", "{{.RestartCount}}", gateway)
    before = run(*restarts)
    Signals(stack, "gateway").kill()
    by = time.monotonic() + 60
    while run(*restarts) == before and time.monotonic() < by:
        time.sleep(0.05)
    check(run(*restarts) != before, "the gateway has ended, and Docker restarts it")
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    requests = [request for client in clients for request in client.requests]
    failed = [request for request in requests if request[1] != "200"]
    check(not failed, f"all of {len(requests)} requests of clients that connect anew are answered 200", failed[:5])
    check(len(requests) == CONNECTING * REQUESTS, "every client is answered", len(requests))
    print(f"        longest wait of {len(requests)} requests: {max(took for took, _ in requests):.1f} s")


class Connecting(threading.Thread):
    """A client that opens a connection for each of its requests."""

    def __init__(self, stack: Stack) -> None:
        super().__init__(daemon=True)
        self.requests: list[tuple[float, str]] = []
        """Of each: the seconds it took, its status or error."""
        self._stack = stack

    def run(self) -> None:
        for _ in range(REQUESTS):
            begin = time.monotonic()
            try:
                status, response = self._stack.ask("GET", "/v1/models")
                response.read()
                answer = str(status)
            except (OSError, http.client.HTTPException) as error:
                answer = f"{type(error).__name__}: {error}"
            self.requests.append((time.monotonic() - begin, answer))


def containers_are_confined(stack: Stack) -> None:
    containers = stack.containers()
    check({labels(one) for one in containers} == SERVICES | ONE_SHOT, "every service has its container", containers)
    for one in containers:
        name, config, host = labels(one), one["Config"], one["HostConfig"]
        user = config["User"].partition(":")[0]
        check(user.isdigit() and int(user) > 0, f"{name} does not run as root", config["User"])
        check(host["ReadonlyRootfs"], f"{name} has a read-only root file system")
        check(host["CapDrop"] == ["ALL"] and not host["CapAdd"], f"{name} has no capability", host["CapDrop"])
        check("no-new-privileges:true" in host["SecurityOpt"], f"{name} gains no privileges", host["SecurityOpt"])
        check(host["Memory"] > 0 and host["PidsLimit"] > 0, f"{name} has bounded memory and processes")
        published = [item for items in (host["PortBindings"] or {}).values() for item in items or []]
        wanted = [{"HostIp": "127.0.0.1", "HostPort": str(stack.port)}] if name == "front" else []
        check(published == wanted, f"{name} publishes {wanted or 'nothing'}", published)
        networks = {network.removeprefix(f"{stack.project}_") for network in one["NetworkSettings"]["Networks"]}
        special = {"front": {"edge", "door"}, "gateway": {"door", "core"}, "keys": {"none"}, "pull": {"egress"}}
        expected = special.get(name, {"core"})
        check(networks == expected, f"{name} is on {sorted(expected)}", networks)
    for service in sorted(SERVICES):
        for _ in range(LOOKS):  # Docker's own process is root's for a moment when a health check begins
            # The kernel's word on pid 1 and all others, not the configuration's.
            status = stack.compose(
                "exec", "-T", service, "sh", "-c", "cat /proc/[0-9]*/status; echo x 2>&1 > /etc/x || echo refused"
            )
            users = set(re.findall(r"^Uid:\s+(\d+)", status, re.M))
            if "0" not in users:
                break
        check(bool(users) and "0" not in users, f"no process of {service} is root's", users)
        check(
            set(re.findall(r"^CapEff:\s+(\S+)", status, re.M)) == {"0" * 16}, f"{service} has no effective capability"
        )
        check("refused" in status, f"{service} cannot write to its root file system")
    for network in ("core", "door"):
        internal = json.loads(run("docker", "network", "inspect", f"{stack.project}_{network}"))[0]["Internal"]
        check(internal is True, f"the {network} network is internal")
    logs = stack.compose("logs", "--no-color", *sorted(SERVICES))
    check(stack.key not in logs, "no service logs the key")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", required=True, help="compose project name")
    parser.add_argument("--port", type=int, required=True, help="the gateway's published port")
    options = parser.parse_args()
    stack = Stack(options.project, options.port)
    begin = time.monotonic()

    def step(action: Callable[..., Any], *arguments: object) -> Any:
        result = action(stack, *arguments)
        print(f"[{time.monotonic() - begin:4.1f}s] {action.__name__.replace('_', ' ')}", flush=True)
        return result

    try:
        step(key_is_printed_once)
        step(without_key_nothing_is_answered)
        model = step(models_are_listed)
        step(completion_streams, model)
        step(backend_is_named, model)
        step(containers_are_confined)
        step(stream_survives_its_worker, model)
        step(clients_wait_for_the_gateway)
    except (BrokenPromiseError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
        print(f"smoke: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
