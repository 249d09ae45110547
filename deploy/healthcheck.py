"""Exit 0 if the service of this container is healthy: `healthcheck.py gateway|scheduler|worker|engines`.

Docker runs it inside each container, with that container's settings: the gateway answers /health/ready, the
scheduler's heartbeat is in Redis, the worker's gRPC health service says SERVING, and of the engines' models each that
is awake has a worker that serves.
"""

from __future__ import annotations

import socket
import ssl
import sys

TIMEOUT_S = 4.0
STALE_S = 30.0
"""The engines write their states every five seconds."""


def gateway() -> str:
    import urllib.error
    import urllib.request

    from shared.settings import GatewaySettings

    settings = GatewaySettings()
    url = f"{'https' if settings.tls_cert else 'http'}://127.0.0.1:{settings.port}/health/ready"
    own = ssl._create_unverified_context()  # noqa: S323 - its certificate is for the name that clients use
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=own if settings.tls_cert else None):  # noqa: S310
            return ""
    except urllib.error.HTTPError as error:
        return f"{url} answered {error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return f"{url}: {error}"


def scheduler() -> str:
    import redis

    from shared.settings import SchedulerSettings

    settings = SchedulerSettings()
    client = redis.Redis.from_url(settings.redis_url, socket_timeout=TIMEOUT_S, **settings.redis_options())
    # A process's id begins with its role and host (shared/ids.py). A scheduler without the shard's lease is a
    # standby and as well as one with it.
    beat = settings.keys.alive("scheduler", f"scheduler-{socket.gethostname()}-*")
    try:
        found = next(client.scan_iter(match=beat, count=1000), None)
    except redis.RedisError as error:
        return f"Redis: {error}"
    return "" if found else f"no heartbeat {beat}"


def worker() -> str:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from shared.security.channels import channel, channel_credentials
    from shared.settings import WorkerSettings

    settings = WorkerSettings()
    address = "127.0.0.1:" + settings.listen.rpartition(":")[2]
    with channel(address, channel_credentials(settings)) as dialled:
        try:
            reply = health_pb2_grpc.HealthStub(dialled).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{address}: {error.details()}"
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return "" if state == "SERVING" else f"{address}: {state}"


def engines() -> str:
    import json
    import time

    from shared.settings import LauncherSettings

    file = LauncherSettings().run_dir / "states.json"
    try:
        states, age_s = json.loads(file.read_text()), time.time() - file.stat().st_mtime
    except (OSError, ValueError) as error:
        return f"{file}: {error}"
    if age_s > STALE_S:
        return f"{file}: written {age_s:.0f} s ago; the supervisor hangs"
    return ", ".join(f"{name} is {state}" for name, state in states.items() if state not in ("ready", "asleep"))


CHECKS = {"gateway": gateway, "scheduler": scheduler, "worker": worker, "engines": engines}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in CHECKS:
        print(f"usage: healthcheck.py {'|'.join(CHECKS)}", file=sys.stderr)
        return 2
    problem = CHECKS[arguments[0]]()
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
