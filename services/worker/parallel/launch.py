"""Which rank of its replica this process is, where the ranks meet, and the processes that rank 0 starts itself.

Either torchrun has started all of them and says so in the environment, or rank 0 finds nothing there and starts the
others with the same variables. They meet in a store of torch.distributed, where each publishes the address at which it
receives its steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from pydantic import SecretStr, ValidationError
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from services.worker.parallel.state import own_gpu
from services.worker.watchdog import end_process
from shared.errors import ConfigurationError
from shared.settings import ROOT, RankSettings, WorkerSettings

log = logging.getLogger("orcinus.worker")

MEET_S = 600.0
"""Time for the ranks to come, to load, and for any one collective beyond the watchdog."""
GRACE_S = 3.0
"""After an unexpected end of a rank: rank 0 may be about to say what is wrong itself."""
STOP_S = 1.0
"""For the interpreter to end in a rank that has done its steps, before it is killed."""
PR_SET_PDEATHSIG = 1
UNKNOWN_LEADER = (
    "ORCINUS_RANK_TOKEN: not set, so any process could give this rank steps; set one secret for all ranks of the "
    "replica (openssl rand -hex 32), or mutual TLS by ORCINUS_GRPC_CA, ORCINUS_GRPC_CERT and ORCINUS_GRPC_KEY"
)


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of its replica.

    host: the address of this machine for the others. token: the secret of the replica, by which the other ranks know
    rank 0; empty where torchrun started the ranks and none is set.
    """

    rank: int
    size: int
    store: Store
    host: str
    token: str

    def announce(self, address: str) -> None:
        """Publish the address at which this rank receives its steps."""
        self.store.set(f"address/{self.rank}", address)

    def addresses(self) -> dict[int, str]:
        """Return the addresses of all ranks but the first. Wait for those that have not come."""
        try:
            return {rank: self.store.get(f"address/{rank}").decode() for rank in range(1, self.size)}
        except DistStoreError as error:
            raise ConfigurationError(
                f"not all of the {self.size} ranks came within {MEET_S:.0f} s; see why in the logs of the others"
            ) from error


@contextlib.contextmanager
def join_group(settings: WorkerSettings) -> Iterator[Place | None]:
    """Yield this process's place; None if it is the whole replica.

    Rank 0 starts the other ranks unless torchrun has, and ends them at the end of the block.

    Raise ConfigurationError where what torchrun started is not --tp x --pp.
    """
    size, ranks = settings.tp * settings.pp, _rank_settings()
    if ranks.world_size not in (0, size):
        raise ConfigurationError(
            f"WORLD_SIZE={ranks.world_size}, but --tp {settings.tp} x --pp {settings.pp} is {size} ranks; start as many"
        )
    if ranks.rank >= size:
        raise ConfigurationError(
            f"RANK={ranks.rank}, but the replica has the ranks 0 to {size - 1}; set --tp x --pp to their number"
        )
    if size == 1:
        yield None
        return
    if ranks.orcinus_leader_pid:
        _die_with(ranks.orcinus_leader_pid)
    if settings.device != "cpu":
        # Before CUDA is asked for the first time.
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(ranks.local_rank, ranks.cuda_visible_devices)
    host = settings.rank_listen.rpartition(":")[0].strip("[]")
    token = settings.rank_token.get_secret_value() if settings.rank_token else ""
    if ranks.world_size and not token and settings.grpc_ca is None:
        raise ConfigurationError(UNKNOWN_LEADER)  # rank 0 says so as well, instead of waiting for the others
    if ranks.world_size:
        try:
            yield Place(ranks.rank, size, _store_of_torchrun(ranks), host, token)
        except ConfigurationError:
            if ranks.orcinus_leader_pid:
                time.sleep(GRACE_S)  # rank 0 meets the same as a rule, says so once for all, and ends this process
            raise
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(size)
        port = listener.getsockname()[1]
        # Given a port instead of a socket, the store would listen on every address of this machine.
        store = TCPStore(
            "127.0.0.1", port, None, True, timedelta(seconds=MEET_S), False, master_listen_fd=listener.detach()
        )
    token = token or secrets.token_hex(32)
    settings = settings.model_copy(update={"rank_token": SecretStr(token)})
    with _processes(settings, size, port, ranks.cuda_visible_devices):
        yield Place(0, size, _prefix_store(store), host, token)


def _rank_settings() -> RankSettings:
    """Read what the environment says of this process. Raise ConfigurationError."""
    try:
        return RankSettings()
    except ValidationError as error:
        said = "; ".join(f"{str(item['loc'][0]).upper()}={item['input']!r}: {item['msg']}" for item in error.errors())
        raise ConfigurationError(
            f"the variables by which torchrun says which rank this is: {said}; unset them, or start with torchrun"
        ) from None


def _store_of_torchrun(ranks: RankSettings) -> Store:
    """Return the store that torch's rendezvous by the environment makes."""
    leads = ranks.rank == 0 and not ranks.torchelastic_use_agent_store
    try:
        store = TCPStore(
            ranks.master_addr, ranks.master_port, ranks.world_size, leads, timedelta(seconds=MEET_S), False
        )
    except (DistStoreError, RuntimeError) as error:
        raise ConfigurationError(
            f"no ranks can meet at MASTER_ADDR={ranks.master_addr} MASTER_PORT={ranks.master_port}: {error}; "
            "give the address of rank 0 and a free port there"
        ) from error
    return _prefix_store(store, ranks.torchelastic_restart_count)


def _prefix_store(store: Store, start: int = 0) -> Store:
    """Return a part of the store for this start of the ranks: torchrun's agent keeps it from one start to the next."""
    return PrefixStore(f"orcinus/{start}", store)


@contextlib.contextmanager
def _processes(settings: WorkerSettings, size: int, port: int, gpus: str | None) -> Iterator[None]:
    """Run the ranks from 1 on as processes that end with this one; one that ends too early ends this one."""
    stopping = threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not stopping.wait(GRACE_S):
            end_process(f"rank {rank} (pid {process.pid}) ended with status {status}: the replica ends itself")

    try:
        for rank in range(1, size):
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "worker"],
                env=_environment(settings, rank, size, port, gpus),
                stdin=subprocess.DEVNULL,
            )
            started.append(process)
            threading.Thread(target=watch, args=(rank, process), name=f"watch-{rank}", daemon=True).start()
        yield
    except BaseException:
        stopping.set()
        for process in started:
            process.kill()  # it has no step to end, and nothing to say that is not said
        raise
    finally:
        stopping.set()
        for process in started:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(settings: WorkerSettings, rank: int, size: int, port: int, gpus: str | None) -> dict[str, str]:
    """Return every setting that differs from its default, and the rank in torchrun's words. gpus: of all ranks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ORCINUS_")}
    clean.pop("CUDA_VISIBLE_DEVICES", None)  # that of rank 0 by now
    clean |= {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    values: dict[str, object] = {}
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.get_default(call_default_factory=True):
            values[f"ORCINUS_{name.upper()}"] = value.get_secret_value() if isinstance(value, SecretStr) else value
    values |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values["ORCINUS_LEADER_PID"] = os.getpid()
    paths = [str(ROOT), *filter(None, [clean.get("PYTHONPATH", "")])]
    return {**clean, **{name: str(value) for name, value in values.items()}, "PYTHONPATH": os.pathsep.join(paths)}


def _die_with(leader: int) -> None:
    """Have Linux kill this process when rank 0 dies, also while it is stopped; elsewhere the stream's end does."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader:
        sys.exit(1)  # rank 0 died before prctl
