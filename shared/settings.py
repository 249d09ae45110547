"""One settings class per service. No environment variable is read anywhere else.

A value comes from, first wins: the command line (`orcinus worker --device cpu`), the environment
(`ORCINUS_DEVICE`), the default here. `orcinus config` prints the effective values, secrets hidden.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import ConfigurationError
from shared.keys import Keys, model_tag
from shared.tls import readable

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "assets" / "demo-model"


def is_loopback(host: str) -> bool:
    """True for localhost and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class CommonSettings(BaseSettings):
    """What every service needs to know."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// address of Redis")
    redis_username: str = Field("", description="Redis ACL user, when the URL carries none; empty: the default user")
    redis_password: SecretStr | None = Field(None, description="password, when the URL carries none")
    redis_ca: Path | None = Field(None, description="file with the CA that signed Redis's certificate, for rediss://")
    model: Path = Field(DEMO_MODEL, description="Hugging Face model directory")
    served_model_name: str = Field("", description="the id in /v1/models; default: the directory's name")
    shard: str = Field("shard-0", pattern=r"^[a-z0-9._-]+$", description="scheduler shard")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    metrics_aliases: bool = Field(False, description="metrics also by the names of vLLM (vllm:...)")
    otlp_endpoint: str = Field(
        "", pattern=r"^($|https?://)", description="OpenTelemetry collector for traces, http://host:4318; empty: none"
    )

    @model_validator(mode="after")
    def _name(self) -> CommonSettings:
        if not self.served_model_name:
            self.served_model_name = model_tag(self.model.resolve().name)
        elif model_tag(self.served_model_name) != self.served_model_name:
            raise ValueError(
                f"served model name {self.served_model_name!r} may hold only [a-z0-9._-]; "
                f"try {model_tag(self.served_model_name)!r}"
            )
        return self

    @property
    def keys(self) -> Keys:
        return Keys(self.served_model_name)

    def redis_options(self) -> dict[str, str]:
        """User, password and CA as redis-py takes them beside the URL. Raises ConfigurationError."""
        found = {"username": self.redis_username} if self.redis_username else {}
        if self.redis_password and (password := self.redis_password.get_secret_value()):
            found["password"] = password
        if self.redis_ca is not None:
            if not self.redis_url.startswith("rediss://"):
                raise ConfigurationError("ORCINUS_REDIS_CA is for rediss://, but ORCINUS_REDIS_URL names no such Redis")
            found["ssl_ca_certs"] = str(readable(self.redis_ca, "ORCINUS_REDIS_CA"))
        return found


class InternalSettings(CommonSettings):
    """Both ends of the gRPC between scheduler and worker: mutual TLS when all three files are given."""

    grpc_ca: Path | None = Field(None, description="file with the CA of scheduler's and worker's certificates")
    grpc_cert: Path | None = Field(None, description="this service's certificate, for mutual TLS over gRPC")
    grpc_key: Path | None = Field(None, description="the private key of ORCINUS_GRPC_CERT")

    @model_validator(mode="after")
    def _mutual(self) -> InternalSettings:
        given = [self.grpc_ca, self.grpc_cert, self.grpc_key]
        if any(given) and not all(given):
            raise ValueError("mutual TLS needs all of ORCINUS_GRPC_CA, ORCINUS_GRPC_CERT and ORCINUS_GRPC_KEY")
        return self


class GatewaySettings(CommonSettings):
    """The HTTP front."""

    host: str = Field("127.0.0.1", description="address to listen on; beyond loopback a key is required")
    port: int = Field(8000, ge=1, le=65535)
    ops_host: str = Field("127.0.0.1", description="address of /metrics and /stats")
    ops_port: int = Field(0, ge=0, le=65535, description="0: PORT + 1")
    grpc_port: int = Field(
        0, ge=0, le=65535, description="port of the gRPC front (Open Inference Protocol), beside PORT; 0: none"
    )
    processes: int = Field(
        1,
        ge=1,
        le=256,
        description="gateways behind these ports, each a process with an id of its own; above 1 on Linux",
    )
    process_start_s: float = Field(
        60.0, gt=0, description="one of several processes that does not serve so long after its start is ended"
    )
    api_key: SecretStr | None = Field(None, description="key that every client must present")
    api_key_file: Path | None = Field(None, description="file with one key a line")
    require_key: bool = Field(
        False, description="ask for a key also when none is set here: those of `orcinus keys`, which lie in Redis"
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM) of both ports; read again at SIGHUP")
    tls_key: Path | None = Field(None, description="the private key of ORCINUS_TLS_CERT")
    ops_names: str = Field(
        "", description="names, with commas between, by which the ops port may be asked beside addresses and localhost"
    )
    max_connections: int = Field(4096, ge=1, description="open connections of a port in each process; more get 503")
    max_header_bytes: int = Field(32 << 10, ge=1024, description="a longer head of a request gets 431")
    read_timeout_s: float = Field(30.0, gt=0, description="a request that is not all there after this gets 408")
    template_timeout_s: float = Field(2.0, gt=0, description="what the chat template may take for one conversation")
    max_body_bytes: int = Field(4 << 20, ge=1024)
    max_queued_tokens: int = Field(
        2_000_000, ge=1, description="prompt tokens that may wait; more gets 429, class low from half of it on"
    )
    tenant_queue_share: float = Field(
        0.5, gt=0, le=1, description="of that, what one tenant may have waiting while there are keys of others"
    )
    max_wait_s: float = Field(
        60.0,
        ge=0,
        description="a first token predicted later is 429, for class low from half of it on; 0: no limit. "
        "Not for requests with a ttft_slo_ms, nor in the background",
    )
    requests_per_minute: int = Field(0, ge=0, description="per key; 0: unlimited")
    tokens_per_minute: int = Field(0, ge=0, description="per key, prompt and output together; 0: unlimited")
    concurrent_requests: int = Field(0, ge=0, description="per key; 0: unlimited")
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "mistral-args", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does, none where it knows none"
    )
    max_choices: int = Field(128, ge=1, description="sequences of one request (prompts x n)")
    client_buffer_events: int = Field(1024, ge=16, description="events kept for a slow client before it is cut")
    client_write_s: float = Field(30.0, gt=0, description="a client that takes nothing for so long is cut")
    keepalive_s: float = Field(10.0, gt=0, description="SSE comment while nothing else is sent")
    progress_timeout_s: float = Field(30.0, gt=0, description="/health/progress fails after this without a step")
    drain_s: float = Field(55.0, ge=0, description="time that running streams get at SIGTERM")

    @model_validator(mode="after")
    def _ports(self) -> GatewaySettings:
        if self.ops_port == 0:
            self.ops_port = self.port + 1
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS needs both ORCINUS_TLS_CERT and ORCINUS_TLS_KEY")
        return self

    def api_keys(self) -> list[str]:
        """The keys that are set here; empty: none is asked for, or those of `orcinus keys` alone.

        Raises ConfigurationError when the gateway would listen beyond loopback without a key.
        """
        keys = [self.api_key.get_secret_value()] if self.api_key else []
        if self.api_key_file:
            try:
                keys += [line.strip() for line in self.api_key_file.read_text().splitlines() if line.strip()]
            except OSError as error:
                raise ConfigurationError(f"cannot read the key file {self.api_key_file}: {error}") from error
        if not keys and not self.require_key:
            for host in (self.host, self.ops_host):
                if not is_loopback(host):
                    raise ConfigurationError(
                        f"listening on {host} needs a key: set ORCINUS_API_KEY or ORCINUS_API_KEY_FILE, or "
                        "ORCINUS_REQUIRE_KEY=true for those of `orcinus keys`, or listen on 127.0.0.1"
                    )
        return keys


class SchedulerSettings(InternalSettings):
    """The loop that decides."""

    policy: str = Field("orcinus", description="a preset, or one with parts replaced: sarathi:order=fair,memory=peak")
    prefix_cache: Literal["auto", "on", "off"] = Field(
        "auto", description="keep the KV of prefixes and share it; auto: as the policy does"
    )
    step_tokens: int = Field(0, ge=0, description="token budget of an iteration; 0: the policy's default")
    max_seqs: int = Field(0, ge=0, description="running sequences at most; 0: the worker's slots")
    microbatches: int = Field(
        0, ge=0, le=16, description="disjoint sets of sequences in flight; 0: as many as the worker has pipeline stages"
    )
    lookahead: int = Field(1, ge=0, le=4, description="unanswered steps a sequence may have when it is planned again")
    claim_window: int = Field(0, ge=0, description="requests held at most by a shard that is alone; 0: 16,384")
    lease_ms: int = Field(2000, ge=200)
    stats_ms: int = Field(1000, ge=100)
    watchdog_s: float = Field(10.0, gt=0, description="a step unanswered for longer means that the worker is lost")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port of scheduler and worker")
    scheduler_metrics_port: int = Field(0, ge=0, le=65535, description="port of the scheduler's /metrics; 0: none")


class WorkerSettings(InternalSettings):
    """One engine."""

    worker_id: str = Field("worker-0", pattern=r"^[a-z0-9._-]+$")
    listen: str = Field("127.0.0.1:0", description="gRPC address; port 0 picks one")
    advertise: str = Field("", description="address that schedulers dial; default: what is listened on")
    tp: int = Field(1, ge=1, le=64, description="tensor parallel ranks of a replica")
    pp: int = Field(1, ge=1, le=64, description="pipeline stages of a replica")
    rank_listen: str = Field(
        "127.0.0.1:0",
        description="where a rank other than the first hears of its steps; ranks on several hosts: this host's address",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of weights and activations; auto: the checkpoint's, on a CPU float16 widened to float32",
    )
    kernels: Literal["auto", "cpu", "cuda", "reference", "emulator"] = Field(
        "auto",
        description="auto: the device's own, or plain torch (reference) where they cannot be had; "
        "emulator: a GPU's on a CPU, for tests",
    )
    quantize: Literal["none", "int8"] = Field(
        "none", description="int8: weights of linear layers in 8 bits; needs the cpu kernels"
    )
    deterministic: bool = Field(
        False,
        description="a request's tokens and logits are the same to the bit whatever else runs; needs the cpu kernels",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="dummy: random weights in the shapes of config.json, for benches; auto: the directory's"
    )
    block_size: int = Field(
        16,
        ge=1,
        le=256,
        description="tokens in a KV block; the cpu kernels need a multiple of 16, else the slower reference; "
        "a GPU 16, 32, 64, 128 or 256",
    )
    max_seqs: int = Field(256, ge=1, le=8192)
    max_input_tokens: int = Field(0, ge=0, description="0: as much as the context allows")
    max_output_tokens: int = Field(0, ge=0, description="0: as much as the context allows")
    max_step_tokens: int = Field(2048, ge=1, le=1 << 20, description="tokens of one step at most")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of free memory for KV blocks; unset: 0.2, on a GPU 0.9 of what weights and the largest step "
        "leave",
    )
    kv_blocks: int = Field(0, ge=0, le=1 << 30, description="0: from kv_memory_fraction")
    host_blocks: int | None = Field(
        None,
        ge=0,
        le=1 << 30,
        description="host tier; unset: as many as KV blocks, in 5 % of free memory (beside a GPU 10 %, at most "
        "16 GiB), if those may run out or a prefill worker hands them over; 0: none",
    )
    worker_role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: hands over what it has computed of a prompt; decode: goes on with what others hand over; "
        "needs kv_share_dir",
    )
    kv_share_dir: Path | None = Field(
        None,
        description="absolute path of a folder in which the workers of this host keep their host tiers, so that they "
        "can copy from each other's; on a tmpfs; unset or empty: memory of its own",
    )
    threads: int = Field(0, ge=0, description="compute threads of a rank; 0: every core, shared among the ranks")
    step_timeout_s: float = Field(
        0.0, ge=0, description="a step that runs longer ends the worker; 0: max(60, 10 x its predicted time)"
    )
    step_log: Path | None = Field(None, description="appends one JSON line a step; for debugging")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port of scheduler and worker")
    worker_metrics_port: int = Field(0, ge=0, le=65535, description="port of the worker's /metrics; 0: none")

    @field_validator("kv_share_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        """An empty text is no folder; as a path it would be the current one."""
        return None if value == "" else value

    @model_validator(mode="after")
    def _role(self) -> WorkerSettings:
        if self.worker_role != "both" and self.kv_share_dir is None:
            raise ValueError(
                f"the worker role {self.worker_role} needs ORCINUS_KV_SHARE_DIR, a folder that the prefill and the "
                "decode workers of this host share"
            )
        if self.kv_share_dir is not None and not self.kv_share_dir.is_absolute():
            raise ValueError(
                f"ORCINUS_KV_SHARE_DIR {self.kv_share_dir} is relative, so that it may be another folder for each "
                "worker; begin it with /"
            )
        return self


class RankSettings(BaseSettings):
    """Which rank of its replica this worker process is, as torchrun tells it, or rank 0 those that it starts."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True)

    rank: int = Field(0, ge=0, description="of this process; 0 leads")
    world_size: int = Field(0, ge=0, description="processes of the replica; 0: this one starts the others")
    local_rank: int = Field(0, ge=0, description="of this process on its host: which GPU it takes")
    master_addr: str = Field("127.0.0.1", description="host on which the ranks meet")
    master_port: int = Field(0, ge=0, le=65535, description="port on which the ranks meet")
    torchelastic_use_agent_store: bool = Field(False, description="torchrun's agent listens on that port, not rank 0")
    torchelastic_restart_count: int = Field(0, ge=0, description="how often torchrun has started the ranks again")
    cuda_visible_devices: str | None = Field(None, description="GPUs of this host, of which the rank takes its own")
    orcinus_leader_pid: int = Field(0, ge=0, description="the rank 0 that started this process, which ends with it")


class LauncherSettings(BaseSettings):
    """`orcinus up`: what only the launcher knows. Everything else it takes goes to the services."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    run_dir: Path = Field(ROOT / ".run", description="state of a local stack: lock, processes.json, logs, Redis data")
    replicas: int = Field(1, ge=1, description="copies of the model")
    prefill: int = Field(
        0, ge=0, description="instead of replicas: copies that compute prompts, and hand over their KV"
    )
    decode: int = Field(0, ge=0, description="with prefill: copies that go on from there")
    stop_s: float = Field(10.0, gt=0, description="time that each service gets to stop before it is killed")
    redis_memory_mb: int = Field(0, ge=0, description="bound of a Redis we start; 0: min(1024, 10 % of the memory)")

    def roles(self) -> list[str]:
        """Of each worker (WorkerSettings.worker_role). Raises ConfigurationError."""
        if not (self.prefill or self.decode):
            return ["both"] * self.replicas
        if "replicas" in self.model_fields_set:
            raise ConfigurationError(
                f"REPLICAS={self.replicas} are copies that do both; give it, or PREFILL and DECODE"
            )
        if not (self.prefill and self.decode):
            raise ConfigurationError(f"PREFILL={self.prefill} DECODE={self.decode}: it takes at least one of each")
        return ["prefill"] * self.prefill + ["decode"] * self.decode


class BatchSettings(BaseSettings):
    """`orcinus batch`: a client of a running server."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    url: str = Field("http://127.0.0.1:8000", pattern=r"^https?://", description="address of the server, without /v1")
    api_key: SecretStr | None = Field(None, description="key of the server")
    priority: Literal["realtime", "high", "normal", "low", "none"] = Field(
        "low", description="class of lines that name none; none: the field is not sent, for servers that do not know it"
    )
    concurrency: int = Field(32, ge=1, le=1024, description="requests under way at the same time")
    timeout_s: float = Field(3600.0, gt=0, description="time that one answer may take")
    patience_s: float = Field(600.0, gt=0, description="ends the run when no line was answered for so long")
