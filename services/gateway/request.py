"""Define one checked request, as all of the gateway reads it, and the limits that it is checked against.

This is the one definition of a request's fields. A field of a body that has the same name here is copied by
openai/validate.py; a field that `queue_pb2.Request` or `queue_pb2.Delivery` has under the same name is copied by
delivery/codec.py. A new per-request field needs no code in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protos import queue_pb2
from shared.logprobs import record_bytes


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How tool calls of a request are read. names: the tools that it may call. forced: the output is calls only."""

    format: str
    names: tuple[str, ...]
    parallel: bool
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limit of the workers, from their records, else from the model's config."""

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
    endpoint: str  # completions | chat
    model: str
    created: int  # seconds since the epoch
    prompts: list[list[int]]  # token ids; only their tails where `from_delivery` made the spec
    n: int
    max_tokens: int
    sampling: queue_pb2.Sampling
    min_tokens: int = 0
    prompt_texts: list[str] = field(default_factory=list)  # for echo, else empty
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    priority: str = ""  # '' until the class of the caller's key is known
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
    keep: int = 0  # return the best `keep` of each prompt's n choices; 0 means all
    tools: ToolUse | None = None
    grammar_field: str = ""  # field of the body that brought the grammar of `sampling`
    prompt_tokens: int = 0  # counted from `prompts` unless given

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or sum(map(len, self.prompts))

    @property
    def survives_client(self) -> bool:
        """Return whether the request runs on when its connection is gone, since the client can come back for the
        answer.
        """
        return self.is_named or self.background

    @property
    def is_named(self) -> bool:
        """Return whether an Idempotency-Key names the request: sent again, it is the same request."""
        return bool(self.body_sha256)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of the log-probabilities of one token; 0 when the request needs none."""
        return record_bytes(self.sampling.logprobs)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def cost_tokens(self) -> int:
        """Return the tokens that the tenant's bucket pays in advance: the prompts and the longest possible output."""
        return self.prompt_tokens + self.choices * self.max_tokens
