"""What goes into the core and what comes out: plain data, numpy columns where there is one entry per sequence.

Called by the scheduler service, the in-process tests and the simulator. No clock and no I/O here or anywhere
in this package: time is an argument, in nanoseconds of any monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]  # indices of rows of the slot table
Records = npt.NDArray[np.object_]  # of bytes, which the core only passes on
EMPTY: Int32 = np.zeros(0, np.int32)
NO_ROWS: Rows = np.zeros(0, np.intp)


class Finish(enum.IntEnum):
    """Why a sequence ended; the numbers are those of protos/queue.proto."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    DEADLINE = 4
    ERROR = 5


class Priority(enum.IntEnum):
    """Class of a request; a smaller number is more urgent."""

    REALTIME = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


CLASS_COUNT = len(Priority)
CLASS_NAMES = tuple(priority.name.lower() for priority in Priority)


@dataclass(slots=True)
class NewRequest:
    """One request as the service hands it over. It has len(prompts) * n sequences (choices)."""

    id: str
    prompts: list[Int32]
    max_tokens: int
    stop_ids: Int32 = field(default_factory=lambda: EMPTY)  # at most MAX_STOP_IDS
    n: int = 1
    min_tokens: int = 0
    priority: int = 2  # 0 realtime, 1 high, 2 normal, 3 low
    tenant: str = ""
    gateway: str = ""
    arrived_ns: int = 0
    ttft_slo_ns: int = 0  # 0: none; relative to arrival
    tbt_slo_ns: int = 0
    deadline_ns: int = 0  # absolute; 0: none
    salt: bytes = b""
    adapter: bytes = b""  # digest of its LoRA adapter; empty: the base model. It is part of `salt`
    payload: Any = None  # opaque; comes back in Enter (the service keeps sampling here)
    speculate: bool = True  # whether its next tokens may be guessed
    grammar: str = ""  # opaque; comes back in Enter. With one each token needs a mask
    prediction: Int32 = field(default_factory=lambda: EMPTY)  # what its output probably is
    # Per prompt, how many of its first tokens have recorded log-probabilities: 1 at first, as the very first has none.
    # None: none are wanted. The first choice of each prompt computes them.
    scored_tokens: list[int] | None = None
    outputs: list[Int32] | None = None  # per choice, tokens already produced (after a restart)
    checkpointed_tokens: list[int] | None = None  # per choice, how many of them a checkpoint has carried; None: all
    finishes: list[Finish] | None = None  # per choice, RUNNING where it still has to run
    identity: str = ""  # of the replicas that have run it (Limits.identity); empty: none, or not known
    has_begun: bool = False  # before a restart, perhaps without a token: its record cannot return to the queue


MAX_STOP_IDS = 16


@dataclass(slots=True)
class Enter:
    """A sequence that takes a slot in this step, new or again."""

    slot: int
    request: NewRequest
    choice: int
    tokens: Int32  # all that are known: prompt and outputs
    prompt_tokens: int
    computed_tokens: int  # tokens with KV in `blocks` already
    blocks: Int32
    tenant: int = 0  # interned
    scored_tokens: int = 0  # as Sequence.scored_tokens
    adapter: int = 0  # number of its adapter, 0: the base model


@dataclass(slots=True)
class Peer:
    """The host tier of another replica, by its number. A number that is sent again names another tier from then on."""

    number: int
    host_tier: str  # empty if the replica is lost
    host_blocks: int
    run: int = 0  # Limits.run


@dataclass(slots=True)
class Adapter:
    """A LoRA adapter and its number. A number that is sent again names another adapter from then on."""

    number: int
    digest: bytes


@dataclass(slots=True)
class StepPlan:
    """One iteration for one replica; the wire form is worker.proto's Step, field by field."""

    id: int
    replica: int
    free_slots: Int32
    swap_out_gpu: Int32
    swap_out_host: Int32
    swap_in_host: Int32
    swap_in_gpu: Int32
    enters: list[Enter]
    append_slots: Int32
    append_blocks: Int32
    chunk_slots: Int32
    chunk_starts: Int32
    chunk_lengths: Int32
    samples: npt.NDArray[np.bool_]  # [chunks] does the chunk sample a token?
    microbatch: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    adapters: list[Adapter] = field(default_factory=list)  # that the worker is to load
    peers: list[Peer] = field(default_factory=list)  # news of other replicas' host tiers
    # By swap-in, the peer that has the host block; -1 means this replica's tier. Empty means that tier for all.
    swap_in_peers: Int32 = field(default_factory=lambda: EMPTY)
    keep: Int32 = field(default_factory=lambda: EMPTY)  # host blocks that are to outlive the worker, which leaves
    chunk_drafts: Int32 = field(default_factory=lambda: EMPTY)  # [chunks] drafts at the end of each; empty: none
    drafts: Int32 = field(default_factory=lambda: EMPTY)  # their ids, one chunk after another


@dataclass(slots=True)
class PromptLogprobs:
    """The records of some tokens of one prompt, which the core only passes on."""

    slot: int
    first_position: int  # position of the first of them
    count: int
    records: bytes  # all of one size


@dataclass(slots=True)
class StepResult:
    """A worker's answer; the wire form is worker.proto's Result."""

    id: int
    replica: int
    slots: Int32
    tokens: Int32  # one slot after another
    token_counts: Int32 | None = None  # by slot: 1 and the drafts that were right; None: one token each
    logprobs: Records | None = None  # one per token, empty for requests without logprobs; None if there are none
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    swap_out_acks: Int32 = field(default_factory=lambda: EMPTY)
    swap_in_acks: Int32 = field(default_factory=lambda: EMPTY)
    errors: list[tuple[int, str, str]] = field(default_factory=list)  # slot, code, message
    error: str = ""
    step_ns: int = 0
    swap_ns: int = 0  # of the copies acknowledged here; 0: not measured
    late: Int32 = field(default_factory=lambda: EMPTY)  # slots that were to sample, and their mask is not there yet
    forced_tokens: tuple[Int32, Int32, Int32] | None = (
        None  # slots with forced text behind their tokens; counts; its tokens
    )
    adapter_acks: Int32 = field(default_factory=lambda: EMPTY)  # those of the step's adapters that are loaded
    peer_acks: Int32 = field(default_factory=lambda: EMPTY)  # those of the step's peers that can be read
    stale_peers: Int32 = field(default_factory=lambda: EMPTY)  # what was copied from these here may be anything
    kept_blocks: int = 0  # how many of the step's blocks to keep outlive the worker, the first ones


@dataclass(slots=True)
class FinishedRequest:
    """A request of which all sequences have ended; its record is written once."""

    request: NewRequest
    outputs: list[Int32]  # per choice
    finish: list[Finish]  # per choice
    error: str = ""


@dataclass(slots=True)
class Outcome:
    """What one call of apply, cancel, stop or plan made known. Rows are sorted by gateway.

    Row i: sequence (requests[i].id, choices[i]) got counts[i] tokens from index first[i] on; a step gives 0, 1, or with
    drafts several.
    """

    requests: list[NewRequest] = field(default_factory=list)
    gateways: list[str] = field(default_factory=list)  # one per row; equal ones stand together
    choices: Int32 = field(default_factory=lambda: EMPTY)
    first_indices: Int32 = field(default_factory=lambda: EMPTY)
    counts: Int32 = field(default_factory=lambda: EMPTY)
    tokens: Int32 = field(default_factory=lambda: EMPTY)  # rows one after another
    logprobs: Records | None = None  # as tokens; see StepResult
    drafts: Int32 = field(default_factory=lambda: EMPTY)  # guesses in the step of each row; empty without any
    # Per row: since the sequence's previous token (since arrival where first = 0); -1 in a row without a token.
    waits_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    finish: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    errors: dict[int, str] = field(default_factory=dict)  # row -> message
    cached_tokens: dict[int, int] = field(
        default_factory=dict
    )  # row of a first token -> prompt tokens from the prefix cache
    checkpoints: list[tuple[str, int, int, Int32]] = field(default_factory=list)  # id, choice, first index, tokens
    # Request, prompt, position of the first token, number of tokens, and their records.
    prompt_logprobs: list[tuple[str, int, int, int, bytes]] = field(default_factory=list)
    started_ids: list[str] = field(default_factory=list)  # requests that got their first slot
    identities: dict[str, str] = field(default_factory=dict)  # request -> what NewRequest.identity has become
    lost_peers: list[int] = field(default_factory=list)  # of StepResult.stale_peers: read until now, or not mapped
    ended_requests: list[FinishedRequest] = field(default_factory=list)


@dataclass(slots=True)
class Limits:
    """One replica's size, from the worker's Describe."""

    slots: int
    blocks: int
    block_size: int
    max_model_len: int
    max_step_tokens: int
    host_blocks: int = 0
    block_bytes: int = 0  # of one block, all layers; a first guess of what a swap costs
    stages: int = 1  # steps of disjoint sequences that it runs at the same time: pipeline stages
    role: str = ""  # PREFILL, DECODE; empty: both
    run: int = 0  # epoch of the Run, which the worker writes into its host tier
    host_tier: str = ""  # "<folder>/<file>", where replicas with the same folder find its host tier; empty: private
    kv_format: str = ""  # of a block's bytes: between equal ones blocks can be copied
    numerics: str = ""  # kernels and types that decide the numbers
    identity: str = ""  # weights, type and numerics: a request with tokens goes on at an equal one; empty: at any
    keeps: bool = False  # it can leave a part of its host tier behind, for other workers
    max_drafts: int = 0  # draft tokens that a step may have; 0: none
    masks_behind_drafts: bool = False  # whether sequences with a grammar may have drafts
    experts: int = 0  # of a layer with a mixture of experts; 0: there is none
    experts_per_token: int = 0
    max_loras: int = 0  # adapters that it holds at once
    whole_prompts: bool = False  # each prompt is computed in one chunk, and nothing of it is kept: an encoder


PREFILL, DECODE = "prefill", "decode"
