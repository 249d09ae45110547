"""One settings class per service. No other module reads environment variables.

A value comes from the first of these: the command line (`orcinus worker --device cpu`), the environment
(`ORCINUS_DEVICE`), the default. `orcinus config` prints the effective values and hides secrets.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import ConfigurationError
from shared.keys import Keys, model_tag
from shared.models.gguf.parts import stem_of
from shared.models.hub import as_hub_name, find_snapshot, gguf_in, is_repository, repository_of
from shared.models.models_file import ModelEntry, ModelsFile, read_models
from shared.security.tls import readable

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "assets" / "demo-model"


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class CommonSettings(BaseSettings):
    """Settings of every service."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    redis_url: str = Field("redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// address of Redis")
    redis_username: str = Field("", description="Redis ACL user, if the URL has none; empty means the default user")
    redis_password: SecretStr | None = Field(None, description="Redis password, if the URL has none")
    redis_ca: Path | None = Field(None, description="file with the CA that signed Redis's certificate, for rediss://")
    model: Path = Field(
        DEMO_MODEL,
        description="Hugging Face directory, GGUF file, or ORG/NAME[@REVISION] of the Hub; an existing path goes first",
    )
    served_model_name: str = Field(
        "", description="model id in /v1/models; empty means ORG/NAME, or the name of the directory or file"
    )
    shard: str = Field("shard-0", pattern=r"^[a-z0-9._-]+$", description="shard of the scheduler")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    log_json: bool = Field(False, description="log JSON lines instead of text")
    metrics_aliases: bool = Field(False, description="also show metrics under the names of vLLM (vllm:...)")
    otlp_endpoint: str = Field(
        "",
        pattern=r"^($|https?://)",
        description="OpenTelemetry collector for traces, http://host:4318; empty means no traces",
    )

    @field_validator("redis_url")
    @classmethod
    def _scheme(cls, value: str) -> str:
        try:
            has_port = urlsplit(value).port != 0
        except ValueError:  # no number, or above 65535
            has_port = False
        if not (has_port and value.startswith(("redis://", "rediss://", "unix://"))):
            raise ValueError("no address of Redis; write redis://HOST:PORT/0, rediss://... or unix://...")
        return value

    @field_validator("model", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        """Keep `./org/name` a path: Path drops the dot, and `org/name` may be a name of the Hub."""
        if value == "":
            raise ValueError("empty; give a Hugging Face directory or ORG/NAME")
        return Path(value).absolute() if isinstance(value, str) and value.startswith("./") else value

    @model_validator(mode="after")
    def _name(self) -> CommonSettings:
        """Replace a Hub name by its snapshot, and a directory by its one GGUF file; name the model after it."""
        name = as_hub_name(self.model)
        if name is not None and (snapshot := find_snapshot(name)) is not None:
            self.model = snapshot
        self.model = gguf_in(self.model)
        if not self.served_model_name:
            repository = name.repository if name is not None else repository_of(self.model)
            path = self.model.resolve()
            self.served_model_name = repository or model_tag(stem_of(path) if path.suffix == ".gguf" else path.name)
        elif model_tag(self.served_model_name) != self.served_model_name and not is_repository(self.served_model_name):
            raise ValueError(
                f"served model name {self.served_model_name!r}: only [a-z0-9._-] or ORG/NAME is allowed; "
                f"try {model_tag(self.served_model_name)!r}"
            )
        return self

    @property
    def keys(self) -> Keys:
        return Keys(self.served_model_name)

    def redis_options(self) -> dict[str, str]:
        """Return user, password and CA as redis-py takes them beside the URL. Raises ConfigurationError."""
        options = {"username": self.redis_username} if self.redis_username else {}
        if self.redis_password and (password := self.redis_password.get_secret_value()):
            options["password"] = password
        if self.redis_ca is not None:
            if not self.redis_url.startswith("rediss://"):
                raise ConfigurationError(
                    "ORCINUS_REDIS_CA: needs TLS, but ORCINUS_REDIS_URL is not rediss://; change the URL or drop the CA"
                )
            options["ssl_ca_certs"] = str(readable(self.redis_ca, "ORCINUS_REDIS_CA"))
        return options


class InternalSettings(CommonSettings):
    """Settings of both ends of the gRPC between scheduler and worker: mutual TLS with all three files."""

    grpc_ca: Path | None = Field(None, description="file with the CA of the certificates of scheduler and workers")
    grpc_cert: Path | None = Field(None, description="this service's certificate, for mutual TLS over gRPC")
    grpc_key: Path | None = Field(None, description="the private key of ORCINUS_GRPC_CERT")

    @model_validator(mode="after")
    def _mutual(self) -> InternalSettings:
        given = [self.grpc_ca, self.grpc_cert, self.grpc_key]
        if any(given) and not all(given):
            raise ValueError("mutual TLS: set all of ORCINUS_GRPC_CA, ORCINUS_GRPC_CERT and ORCINUS_GRPC_KEY, or none")
        return self


class AdapterSettings(CommonSettings):
    """Settings of the services that read LoRA adapters."""

    adapter_dir: Path | None = Field(
        None,
        description="absolute path of a folder from which LoRA adapters may be loaded while the stack runs; "
        "gateways and workers share it. Unset or empty means that there are none",
    )
    max_lora_rank: int = Field(64, ge=1, le=4096, description="largest rank of an adapter")

    @field_validator("adapter_dir", mode="before")
    @classmethod
    def _no_adapters(cls, value: object) -> object:
        """Return None for an empty text, which as a path would be the current folder."""
        return None if value == "" else value

    @field_validator("adapter_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError(f"{value}: relative, so it may be another folder for each service; begin it with /")
        return value


class GatewaySettings(AdapterSettings):
    """Settings of the gateway."""

    models: Path | None = Field(
        None,
        description="YAML file with the models behind this gateway; unset means one, that of MODEL",
    )
    host: str = Field("127.0.0.1", description="address to listen on; an address beyond loopback requires a key")
    port: int = Field(8000, ge=1, le=65535, description="port of the HTTP API")
    ops_host: str = Field("127.0.0.1", description="address of /metrics and /stats")
    ops_port: int = Field(0, ge=0, le=65535, description="port of /metrics and /stats; 0 uses PORT + 1")
    grpc_port: int = Field(
        0, ge=0, le=65535, description="port of the gRPC front (Open Inference Protocol); 0 means none"
    )
    processes: int = Field(
        1,
        ge=1,
        le=256,
        description="gateway processes behind these ports, each with its own id; more than 1 needs Linux",
    )
    process_start_s: float = Field(
        60.0, gt=0, description="time after which a gateway process that does not serve yet is ended"
    )
    api_key: SecretStr | None = Field(None, description="key that every client must send")
    api_key_file: Path | None = Field(None, description="file with one key per line")
    require_key: bool = Field(
        False, description="require a key even if none is set here: keys of `orcinus keys`, stored in Redis"
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM) of both ports; SIGHUP reads it again")
    tls_key: Path | None = Field(None, description="the private key of ORCINUS_TLS_CERT")
    ops_names: str = Field(
        "",
        description="host names, separated by commas: ports without a key take requests to them, beside addresses and "
        "localhost, and from pages of them",
    )
    max_connections: int = Field(4096, ge=1, description="open connections per port and process; further ones get 503")
    idle_connection_s: int = Field(
        75,
        ge=1,
        description="time that a connection stays open between two requests; set it above that of clients and proxies, "
        "which else may send a request while it closes. At the limit of connections the longest idle one closes",
    )
    max_header_bytes: int = Field(32 << 10, ge=1024, description="longest head of a request; a longer one gets 431")
    read_timeout_s: float = Field(30.0, gt=0, description="time to receive a whole request; then it gets 408")
    template_timeout_s: float = Field(
        2.0, gt=0, description="time that the chat template may take for one conversation"
    )
    request_log: bool = Field(
        True, description="log a line for each request under /v1: ids, key, class, tokens, time, status; no text"
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest body of a request; a larger one gets 413")
    max_queued_tokens: int = Field(
        2_000_000,
        ge=1,
        description="prompt tokens that may wait; further requests get 429, those of class low from half of it on",
    )
    max_queued_bytes: int = Field(
        0,
        ge=0,
        description="bytes of Redis that requests (prompts, schemas, conversations to store) may hold until they end, "
        "with what stays of them for five minutes more; further ones get 429, those of class low from half of it on; 0 "
        "means half of Redis's maxmemory, where it is set",
    )
    response_retention_s: int = Field(
        86_400,
        ge=0,
        le=30 * 86_400,
        description="time for which responses of /v1/responses are stored in Redis, with their conversation, unless a "
        "request has store false; 0 stores none",
    )
    stored_response_bytes: int = Field(
        64 << 20,
        ge=0,
        description="bytes that stored responses may take in Redis; the oldest go first",
    )
    tenant_response_bytes: int = Field(
        0, ge=0, description="bytes that those of one tenant may take; the oldest go first; 0 means half of all"
    )
    files_dir: Path | None = Field(
        None,
        description="folder of the files and batches of clients, one for all gateways of a model; unset or empty means "
        "none, so /v1/files and /v1/batches are off, but `orcinus up` makes one in its run directory",
    )
    file_bytes: int = Field(200 << 20, ge=1024, description="largest file of /v1/files; a larger one gets 413")
    tenant_file_bytes: int = Field(
        2 << 30, ge=1024, description="bytes of all files and batches of a tenant; then it can upload none"
    )
    tenant_files: int = Field(1000, ge=1, description="files of a tenant; then it can upload none")
    file_retention_s: int = Field(
        30 * 86_400, ge=3600, description="time after which files are deleted, and batches that have ended"
    )
    batch_requests: int = Field(
        64, ge=1, le=4096, description="lines of all batches that a gateway process has in the queue or running"
    )
    tenant_queue_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of these tokens and bytes that one tenant may have while other tenants have keys",
    )
    max_wait_s: float = Field(
        60.0,
        ge=0,
        description="a request with a later predicted first token gets 429, class low from half of it on; 0 means "
        "none. Requests with a ttft_slo_ms and background requests are exempt",
    )
    requests_per_minute: int = Field(0, ge=0, description="per key; 0 means unlimited")
    tokens_per_minute: int = Field(0, ge=0, description="per key, prompt and output together; 0 means unlimited")
    concurrent_requests: int = Field(0, ge=0, description="per key; 0 means unlimited")
    tool_parser: Literal[
        "auto",
        "hermes",
        "llama3",
        "mistral",
        "mistral-args",
        "granite",
        "qwen3-coder",
        "glm-4.5",
        "deepseek-v3",
        "kimi-k2",
        "pythonic",
        "channels",
        "none",
    ] = Field(
        "auto",
        description="format of the model's tool calls; auto takes it from the chat template",
    )
    reasoning_parser: Literal["auto", "think", "mistral", "seed", "cohere", "channels", "none"] = Field(
        "auto",
        description="marks of the model's thinking; think is the tag of that name, mistral, seed and cohere are "
        "those of Magistral, Seed OSS and Command A Reasoning, channels are analysis and final, none leaves it in the "
        "content; auto takes it from the chat template and the tokenizer",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="temperature, top_p, top_k, min_p and repetition_penalty of requests that leave them out; model "
        "takes them from generation_config.json, openai uses 1, 1, 0, 0 and 1",
    )
    max_choices: int = Field(128, ge=1, description="sequences of one request (prompts x n)")
    client_buffer_events: int = Field(
        1024, ge=16, description="events buffered for a slow client before it is disconnected"
    )
    client_write_s: float = Field(30.0, gt=0, description="a client that reads nothing for this time is disconnected")
    keepalive_s: float = Field(10.0, gt=0, description="interval of SSE comments while no event is sent")
    progress_timeout_s: float = Field(30.0, gt=0, description="/health/progress fails after this without a step")
    drain_s: float = Field(55.0, ge=0, description="time that running streams have to end after SIGTERM")

    @model_validator(mode="before")
    @classmethod
    def _first_model(cls, value: Any) -> Any:
        """Take the first model of the file for `model`, or the one that `served_model_name` names, unless `model` is
        given.
        """
        path = value.get("models") if isinstance(value, dict) else None
        if path and not value.get("model"):
            entries = read_models(Path(path)).models
            name = value.get("served_model_name") or entries[0].name
            first = next((one for one in entries if one.name == name), None)
            if first is None:
                names = ", ".join(one.name for one in entries)
                raise ConfigurationError(
                    f"--served-model-name={str(name)[:100]}: no model of {path}; "
                    f"name one of {names}, or give --model too"
                )
            return {**value, "model": first.source, "served_model_name": first.name}
        return value

    @field_validator("files_dir", "models", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        """Return None for an empty text, which as a path would be the current folder."""
        return None if value == "" else value

    @model_validator(mode="after")
    def _ports(self) -> GatewaySettings:
        if self.ops_port == 0:
            self.ops_port = self.port + 1
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("TLS: set both ORCINUS_TLS_CERT and ORCINUS_TLS_KEY, or neither")
        return self

    def models_file(self) -> ModelsFile:
        """Return the file of models; one without models where there is none. Raise ConfigurationError."""
        return read_models(self.models) if self.models else ModelsFile([])

    def of_model(self, entry: ModelEntry) -> GatewaySettings:
        """Return these settings for another model of the file. Raise ConfigurationError."""
        named = CommonSettings(model=Path(entry.source), served_model_name=entry.name)
        return self.model_copy(update={"model": named.model, "served_model_name": named.served_model_name})

    def api_keys(self) -> list[str]:
        """Return the keys that are set here; empty if none is required or only those of `orcinus keys` count.

        Raises ConfigurationError when the gateway would listen beyond loopback without a key.
        """
        keys = [self.api_key.get_secret_value()] if self.api_key else []
        if self.api_key_file:
            try:
                keys += [line.strip() for line in self.api_key_file.read_text().splitlines() if line.strip()]
            except OSError as error:
                raise ConfigurationError(
                    f"key file {self.api_key_file}: cannot be read: {error}; check ORCINUS_API_KEY_FILE"
                ) from error
        if not keys and not self.require_key:
            for host in (self.host, self.ops_host):
                if not is_loopback(host):
                    raise ConfigurationError(
                        f"listening on {host}: needs a key; set ORCINUS_API_KEY or ORCINUS_API_KEY_FILE, or "
                        "ORCINUS_REQUIRE_KEY=true for those of `orcinus keys`, or listen on 127.0.0.1"
                    )
        return keys


class SchedulerSettings(InternalSettings):
    """Settings of the scheduler."""

    policy: str = Field("orcinus", description="a preset, or one with parts replaced: sarathi:order=fair,memory=peak")
    prefix_cache: Literal["auto", "on", "off"] = Field(
        "auto", description="keep and share the KV of prefixes; auto uses the policy's choice"
    )
    step_tokens: int = Field(0, ge=0, description="token budget of a step; 0 uses the policy's own budget")
    max_seqs: int = Field(0, ge=0, description="sequences that run at most; 0 uses all slots of the worker")
    microbatches: int = Field(
        0, ge=0, le=16, description="disjoint sets of sequences in flight; 0 uses one per pipeline stage of the worker"
    )
    lookahead: int = Field(
        1, ge=0, le=4, description="steps of a sequence that may be in flight when the next one is planned"
    )
    speculate: Literal["auto", "off", "suffix"] = Field(
        "auto",
        description="guess next tokens from earlier text and check several in a step (docs/speculation.md); auto does "
        "where that changes no bit of the logits",
    )
    claim_window: int = Field(
        0, ge=0, description="requests that a shard without other shards holds at most; 0 means 16,384"
    )
    lease_ms: int = Field(2000, ge=200, description="lifetime of the shard's lease, renewed four times in it")
    stats_ms: int = Field(1000, ge=100, le=2000, description="interval of the statistics")
    watchdog_s: float = Field(10.0, gt=0, description="a worker that leaves a step unanswered for longer is lost")
    mixed_numerics: bool = Field(
        False,
        description="let workers of different instruction sets, kernels or weight formats serve one shard, though a "
        "request that moves between them may get other tokens",
    )
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port of scheduler and worker")
    scheduler_metrics_port: int = Field(0, ge=0, le=65535, description="port of the scheduler's /metrics; 0 means none")


class PlacerSettings(CommonSettings):
    """Settings of the placer."""

    models: Path = Field(
        Path("models.yaml"), description="YAML file with the models, and how many of them are awake at a time"
    )


class WorkerSettings(InternalSettings, AdapterSettings):
    """Settings of a worker."""

    worker_id: str = Field(
        "worker-0", pattern=r"^[a-z0-9._-]+$", description="name of the worker in Redis, unique in a stack"
    )
    listen: str = Field("127.0.0.1:0", description="gRPC address; port 0 picks one")
    advertise: str = Field("", description="address that schedulers dial; empty means the address of `listen`")
    tp: int = Field(1, ge=1, le=64, description="tensor parallel ranks of a replica")
    pp: int = Field(1, ge=1, le=64, description="pipeline stages of a replica")
    rank_listen: str = Field(
        "127.0.0.1:0",
        description="address where ranks other than the first receive steps; with several hosts this host's",
    )
    rank_token: SecretStr | None = Field(
        None,
        description="secret of all ranks of a replica, by which the others know the first; ranks that torchrun starts "
        "need it, or mutual TLS. Unset means that the first rank draws one for the ranks that it starts",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto uses a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="type of weights and activations; auto uses the checkpoint's, on a CPU float32 instead of float16",
    )
    kernels: Literal["auto", "cpu", "cuda", "reference", "emulator"] = Field(
        "auto",
        description="auto uses the kernels of the device, or plain torch (reference) where they are not available; "
        "emulator runs those of a GPU on a CPU, for tests",
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        "none",
        description="int8 and int4 round the weights of linear layers to so many bits; int8 needs the cpu kernels",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="type of the KV cache; auto is that of the activations, int8 and fp8 (e4m3) have 8 bits and a "
        "scale for each token and head; int8 needs the cpu kernels, fp8 these or the cuda kernels",
    )
    deterministic: bool = Field(
        False,
        description="make tokens and logits of a request the same to the bit in every batch; needs the cpu kernels",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="dummy uses random weights in the shapes of config.json, for benches; auto reads the directory",
    )
    block_size: int = Field(
        16,
        ge=1,
        le=256,
        description="tokens in a KV block; the cpu kernels need a multiple of 16 (else the slower reference runs), "
        "a GPU 16, 32, 64, 128 or 256",
    )
    max_seqs: int = Field(256, ge=1, le=8192, description="slots: sequences that run at once")
    max_loras: int = Field(
        8,
        ge=1,
        le=1024,
        description="adapters that a worker holds, and so that run in a step, at once; with adapter_dir",
    )
    max_input_tokens: int = Field(0, ge=0, description="longest prompt; 0 allows as much as the context")
    max_output_tokens: int = Field(0, ge=0, description="longest output; 0 allows as much as the context")
    max_step_tokens: int = Field(2048, ge=1, le=1 << 20, description="tokens in one step at most")
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of free memory for KV blocks; unset uses 16,384 tokens a thread or the longest sequence, "
        "within 0.2; on a GPU 0.9 of what weights and the largest step leave",
    )
    kv_blocks: int = Field(
        0, ge=0, le=1 << 30, description="KV blocks on the device; 0 computes them from kv_memory_fraction"
    )
    host_blocks: int | None = Field(
        None,
        ge=0,
        le=1 << 30,
        description="blocks of the host tier; 0 means none; unset uses as many as KV blocks if these may run out, "
        "beside a GPU within 10 % of free memory and 16 GiB; else, with kv_share_dir and role both, within 5 % of this "
        "worker's memory; else none",
    )
    worker_role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill computes prompts and hands over their KV, decode goes on from there; "
        "both of these need kv_share_dir",
    )
    kv_share_dir: Path | None = Field(
        None,
        description="absolute path of a folder on a tmpfs where the workers of this host keep their host tiers, "
        "copy from each other, and leave KV for the workers that follow; unset or empty means private memory",
    )
    threads: int = Field(0, ge=0, description="compute threads of a rank; 0 uses all cores, shared among the ranks")
    step_timeout_s: float = Field(
        0.0, ge=0, description="a step that runs longer ends the worker; 0 uses max(60, 10 x its predicted time)"
    )
    step_log: Path | None = Field(None, description="file for one JSON line per step; for debugging")
    metrics_host: str = Field("127.0.0.1", description="address of the metrics port of scheduler and worker")
    worker_metrics_port: int = Field(0, ge=0, le=65535, description="port of the worker's /metrics; 0 means none")

    @field_validator("kv_share_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        """Return None for an empty text, which as a path would be the current folder."""
        return None if value == "" else value

    @model_validator(mode="after")
    def _role(self) -> WorkerSettings:
        if self.worker_role != "both" and self.kv_share_dir is None:
            raise ValueError(
                f"worker role {self.worker_role}: needs ORCINUS_KV_SHARE_DIR; set it to a folder that all prefill and "
                "decode workers of this host share"
            )
        if self.kv_share_dir is not None and not self.kv_share_dir.is_absolute():
            raise ValueError(
                f"ORCINUS_KV_SHARE_DIR={self.kv_share_dir}: relative, so it may be another folder for each worker; "
                "begin it with /"
            )
        return self


class RankSettings(BaseSettings):
    """The rank of this worker process in its replica, set by torchrun or by the rank 0 that starts the others."""

    model_config = SettingsConfigDict(extra="ignore", env_ignore_empty=True)

    rank: int = Field(0, ge=0, description="rank of this process; 0 leads")
    world_size: int = Field(
        0, ge=0, description="processes of the replica; 0 means that this process starts the others"
    )
    local_rank: int = Field(0, ge=0, description="rank of this process on its host, which selects its GPU")
    master_addr: str = Field("127.0.0.1", description="host on which the ranks meet")
    master_port: int = Field(0, ge=0, le=65535, description="port on which the ranks meet")
    torchelastic_use_agent_store: bool = Field(False, description="torchrun's agent listens on that port, not rank 0")
    torchelastic_restart_count: int = Field(0, ge=0, description="number of restarts by torchrun")
    cuda_visible_devices: str | None = Field(None, description="GPUs of this host; the rank takes one of them")
    orcinus_leader_pid: int = Field(
        0, ge=0, description="process id of the rank 0 that started this process, which ends with it"
    )


class LauncherSettings(BaseSettings):
    """Settings of `orcinus up` itself; all others are passed to the services."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    run_dir: Path = Field(ROOT / ".run", description="state of a local stack: lock, processes.json, logs, Redis data")
    replicas: int = Field(1, ge=1, description="copies of the model")
    prefill: int = Field(0, ge=0, description="instead of replicas: copies that compute prompts and hand over their KV")
    decode: int = Field(0, ge=0, description="with prefill: copies that decode what was handed over")
    stop_s: float = Field(10.0, gt=0, description="time that each service has to stop before it is killed")
    redis_memory_mb: int = Field(
        0, ge=0, description="memory limit of the Redis that is started; 0 uses min(1024, 10 % of the memory)"
    )

    def roles(self) -> list[str]:
        """Return the role of each worker (WorkerSettings.worker_role). Raises ConfigurationError."""
        if not (self.prefill or self.decode):
            return ["both"] * self.replicas
        if "replicas" in self.model_fields_set:
            raise ConfigurationError(
                f"REPLICAS={self.replicas}: excludes PREFILL and DECODE; give REPLICAS, or PREFILL and DECODE"
            )
        if not (self.prefill and self.decode):
            raise ConfigurationError(
                f"PREFILL={self.prefill} DECODE={self.decode}: at least one of each is needed; set both"
            )
        return ["prefill"] * self.prefill + ["decode"] * self.decode


class EnginesSettings(BaseSettings):
    """Settings of `orcinus engines` itself, beside those of the launcher."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    redis_users: Path | None = Field(
        None,
        description="folder with scheduler.password, worker.password and placer.password, as deploy/redis_users.py "
        "writes them: each process is then the user of Redis of that name; unset means one user for all",
    )


class BatchSettings(BaseSettings):
    """Settings of `orcinus batch`, a client of a running server."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    url: str = Field(
        "",
        pattern=r"^($|https?://)",
        description="address of the server, without /v1; empty means the stack that runs on this machine",
    )
    api_key: SecretStr | None = Field(None, description="key for the server")
    run_dir: Path = Field(ROOT / ".run", description="state of the local stack, which has its address")
    priority: Literal["realtime", "high", "normal", "low", "none"] = Field(
        "low", description="class of lines without one; none sends no class, for servers that do not know the field"
    )
    concurrency: int = Field(32, ge=1, le=1024, description="requests in flight at the same time")
    timeout_s: float = Field(3600.0, gt=0, description="time that one answer may take")
    patience_s: float = Field(600.0, gt=0, description="ends the run when no line was answered for this time")


class ChatSettings(BaseSettings):
    """Settings of `orcinus chat` and `orcinus adapters`, clients of a running server."""

    model_config = SettingsConfigDict(env_prefix="ORCINUS_", extra="ignore")

    url: str = Field(
        "",
        pattern=r"^($|https?://)",
        description="address of the server, with or without /v1; empty means the stack that runs on this machine",
    )
    api_key: SecretStr | None = Field(None, description="key for the server")
    timeout_s: float = Field(600.0, gt=0, description="time without a byte after which an answer is given up")
    run_dir: Path = Field(ROOT / ".run", description="state of the local stack, which has its address")
