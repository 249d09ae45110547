"""Requests and their sequences as the core keeps them outside the slot table.

While a sequence runs, its numbers live in its row of the SlotTable; when it has no slot, they live here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.kv.prefix_index import NO_KEY, Key, Keys
from services.scheduler.core.types import EMPTY, Finish, Int32, Limits, NewRequest

PINNED_AFTER = 3  # preemptions after which a sequence enters only with its whole remainder reserved


class State(enum.IntEnum):
    """Where a sequence is: in the waiting queue, in a slot, ended, or parked until it is resumed."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2
    PARKED = 3


@dataclass(slots=True, eq=False)
class Record:
    """One request and its sequences; it is forgotten when the last of them ends."""

    request: NewRequest
    gateway: int  # interned
    tenant: int  # interned
    arrived_ns: int
    sequences: list[Sequence] = field(default_factory=list)
    unfinished_sequences: int = 0
    has_started: bool = False
    error: str = ""

    @property
    def has_tokens(self) -> bool:
        """Whether a sequence has outputs, or is in a slot where it may get some."""
        return any(sequence.outputs.size or sequence.slot >= 0 for sequence in self.sequences)


@dataclass(slots=True, frozen=True)
class SavedKV:
    """Where the KV of a sequence without a slot lies: in the host tier of one replica."""

    replica: int
    blocks: Int32  # of that tier, in the order of the block table
    tokens: int  # tokens with KV there
    copied_blocks: int  # blocks that the replica has copied out in all when all of it is there (Transfers.copied_out)
    is_all: bool  # of the tokens known when it left its row, at most the last one lacks KV


@dataclass(slots=True)
class PrefixState:
    """What the prefix cache remembers of a sequence."""

    keys: Keys = field(default_factory=list)  # chain of its full blocks; empty without a prefix cache
    hits: int = 0  # tokens that were cached when it was looked up last
    waited_for: Key = NO_KEY  # of a block that it has waited for long enough while another sequence computed it


@dataclass(slots=True)
class RouteState:
    """What the router has decided of a waiting sequence. A generation numbers the sets of replicas; -1 is none."""

    offers: dict[int, int] = field(default_factory=dict)  # replica -> from when (ns) it may take the sequence
    generation: int = -1  # for which `offers` holds
    passes: int = 0  # later ones that another replica took before it, while it might have been taken there
    stays: int = -1  # generation in which no other replica can go on with it


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `outputs` is current only while the sequence has no slot."""

    record: Record
    choice: int
    number: int  # order of arrival at the core; breaks ties
    prompt: Int32
    outputs: Int32 = field(default_factory=lambda: EMPTY)
    state: State = State.WAITING
    finish: Finish = Finish.RUNNING
    replica: int = -1  # where it runs, or ran last
    slot: int = -1
    unanswered_steps: int = 0  # steps sent before it left its slot and not answered yet
    preemptions: int = 0
    checkpointed_tokens: int = 0  # outputs that a checkpoint has carried
    checkpoint_ns: int = 0
    last_token_ns: int = 0  # when it got its last token; 0: none yet
    scored_tokens: int = 0  # first prompt tokens with log-probabilities that were published; 0: none are wanted
    cached_tokens: int = -1  # prompt tokens with KV when a worker first heard of it; -1: none has yet
    lost_tokens: int = 0  # tokens with KV that it gave up when it left its slot
    saved_kv: SavedKV | None = None  # its KV, while it is swapped out
    prefix: PrefixState = field(default_factory=PrefixState)  # of the prefix cache
    route: RouteState = field(default_factory=RouteState)  # of the router

    @property
    def priority(self) -> int:
        return self.record.request.priority

    @property
    def is_scored(self) -> bool:
        """Whether all log-probabilities of its prompt are published that are wanted."""
        return not 0 < self.scored_tokens < self.prompt.size

    @property
    def is_swapped(self) -> bool:
        return self.saved_kv is not None

    @property
    def computed_tokens(self) -> int:
        """Tokens with KV in a host tier."""
        return self.saved_kv.tokens if self.saved_kv is not None else 0

    def saved_at(self, replica: int) -> bool:
        """Return whether its KV lies in the host tier of that replica."""
        return self.saved_kv is not None and self.saved_kv.replica == replica

    @property
    def known_tokens(self) -> int:
        """Tokens known while it waits: prompt and outputs."""
        return self.prompt.size + self.outputs.size

    @property
    def max_total_tokens(self) -> int:
        """Tokens of prompt and output at most, by the request."""
        return int(self.prompt.size + self.record.request.max_tokens)

    @property
    def is_pinned(self) -> bool:
        """Whether it is past its last preemption: it enters with its whole remainder reserved and is never a victim."""
        return self.preemptions >= PINNED_AFTER

    def tokens(self) -> Int32:
        """Return [known] int32: prompt, then outputs."""
        return np.concatenate([self.prompt, self.outputs]) if self.outputs.size else self.prompt

    def longest(self, limits: Limits) -> int:
        """Return the tokens of prompt and output at most on a replica of this size."""
        return min(self.max_total_tokens, limits.max_model_len)

    def misfit(self, limits: Limits) -> str:
        """Return why this sequence can never run on a replica of this size; empty if it can.

        The last token's KV is never computed, so `longest - 1` tokens must fit the pool.
        """
        prompt, context = self.prompt.size, limits.max_model_len
        if self.record.request.adapter and not limits.max_loras:
            return "the worker has no adapters; start it with --adapter-dir"
        if prompt >= context:
            return f"the prompt of {prompt} tokens leaves no room for output: the context is {context} tokens"
        tokens = self.longest(limits) - 1
        blocks = -(-tokens // limits.block_size)
        if blocks > limits.blocks:
            return (
                f"prompt of {prompt} tokens with max_tokens {self.record.request.max_tokens} needs {blocks} KV blocks "
                f"of {limits.block_size} tokens; the worker has {limits.blocks}"
            )
        return ""

    def verdict(self, longest: int) -> Finish:
        """Return how it ends at its last output; RUNNING if it goes on. For the few without a slot."""
        request = self.record.request
        count = self.outputs.size
        if count and count >= request.min_tokens and bool((request.stop_ids == self.outputs[-1]).any()):
            return Finish.STOP
        if count >= request.max_tokens or self.prompt.size + count >= longest:
            return Finish.LENGTH
        return Finish.RUNNING
