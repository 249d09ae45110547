"""The bounds of what a worker may answer to Describe and to a step. Pure; no socket.

The link checks Describe before its hello, the fleet compares it with the linked workers, and the loop checks every
Result before the core sees it. A worker that breaks the contract is dropped with an event that says why. Its requests
go on at other workers, and none of them is suspected of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from protos import worker_pb2
from services.scheduler.core.speculation.drafts import MAX_ROW_DRAFTS
from services.scheduler.core.types import DECODE, PREFILL, Int32, StepResult
from shared.errors import ProtocolError
from shared.keys import EPOCHS
from shared.wire.handshake import wrong_version
from shared.wire.run_socket import is_name
from shared.wire.token_batches import MAX_VOCABULARY

BOUNDS = {
    "block_size": (1, 1 << 20),
    "gpu_blocks": (1, 1 << 24),
    "host_blocks": (0, 1 << 24),
    "max_seqs": (1, 8192),
    "max_model_len": (1, 1 << 24),
    "max_input_tokens": (0, 1 << 24),
    "max_output_tokens": (0, 1 << 24),
    "max_step_tokens": (1, 1 << 20),
    "vocab_size": (1, MAX_VOCABULARY),
    "stages": (0, 64),
    "largest_step_ms": (0, 600_000),
    "block_bytes": (0, 1 << 40),
    "highest_epoch": (0, EPOCHS - 2),
    "max_drafts": (0, 1 << 16),
    "max_loras": (0, 1 << 10),
    "experts": (0, 1 << 16),
    "experts_per_token": (0, 1 << 16),
    "vector_size": (0, 1 << 16),
}
"""Smallest and largest value of a number of Describe."""
TABLE_TOKENS = 1 << 31
"""Bound of max_seqs * max_model_len: the scheduler has a table of so many token ids."""
NAME_LENGTH = 4096
DTYPES = ("float32", "bfloat16", "float16")
ROLES = ("", PREFILL, DECODE)
SAME = ("model_hash", "dtype", "block_size", "vocab_size")
"""What all workers of a shard have in common, as a sequence may go on at any of them."""
LONGEST_NS = 86_400_000_000_000
"""Bound of each time in a Result: a day. The device may have been idle for longer."""
LONGEST_IDLE_NS = 3650 * LONGEST_NS


class ContractError(ProtocolError):
    """A worker described itself or answered a step against the contract of worker.proto."""


class Slots(Protocol):
    """What was sent: which slot had a sequence at a step, and the log-probabilities that it asked for."""

    logprob_slots: set[int]

    def has_entered(self, slot: int, step: int) -> bool:
        """Return whether a sequence entered the slot at or before the step."""

    def record_bytes(self, slot: int, step: int) -> int:
        """Return the size of one token's log-probabilities of the sequence that had the slot."""

    def prompt_record_bytes(self, slot: int, step: int) -> int:
        """Return the same of a token of its prompt."""


def check_info(info: worker_pb2.WorkerInfo, model: str) -> None:
    """Raise ContractError where Describe names another model than `model` or a version too far away, or is out of
    bounds.
    """
    theirs = info.version if info.HasField("version") else None
    if wrong := wrong_version(theirs, f"worker {info.id[:100]}", "this scheduler"):
        raise ContractError(wrong)
    if info.model != model:
        raise ContractError(f"model: the worker serves {info.model[:100]!r}, not {model!r}; start it with that name")
    for name, (least, most) in BOUNDS.items():
        if not least <= (value := getattr(info, name)) <= most:
            raise ContractError(f"{name}: {value} is not between {least} and {most}; update or repair the worker")
    if info.max_seqs * info.max_model_len > TABLE_TOKENS:
        raise ContractError(
            f"max_seqs: {info.max_seqs} sequences of {info.max_model_len} tokens are more than {TABLE_TOKENS} in all; "
            f"lower ORCINUS_MAX_SEQS or ORCINUS_MAX_MODEL_LEN of the worker"
        )
    if (info.experts_per_token > 0) != (info.experts > 0) or info.experts_per_token > info.experts:
        raise ContractError(
            f"experts_per_token: {info.experts_per_token} of {info.experts} experts; update or repair the worker"
        )
    if info.whole_prompts and info.max_model_len > min(info.max_step_tokens + 1, info.block_size):
        raise ContractError(
            f"whole_prompts: max_model_len {info.max_model_len} is more than a step of {info.max_step_tokens} tokens "
            f"and the token behind it, or than a block of {info.block_size}; update or repair the worker"
        )
    if info.dtype not in DTYPES:
        raise ContractError(f"dtype: {info.dtype[:100]!r} is none of {', '.join(DTYPES)}; update the scheduler")
    if info.role not in ROLES:
        raise ContractError(f"role: {info.role[:100]!r} is neither prefill nor decode; update the scheduler")
    if info.run_socket and not is_name(info.run_socket):
        raise ContractError(f"run_socket: {info.run_socket[:100]!r} is not 32 hex digits; update the scheduler")
    for name in ("id", "identity", "model_hash", "host_tier", "kv_format", "numerics"):
        if len(getattr(info, name)) > NAME_LENGTH:
            raise ContractError(f"{name}: longer than {NAME_LENGTH} characters; update or repair the worker")


def check_same(
    info: worker_pb2.WorkerInfo, linked: Iterable[worker_pb2.WorkerInfo], mixed_numerics: bool = False
) -> None:
    """Raise ContractError where a worker differs from a linked one in what a shard's workers have in common.

    That is their numerics too, if both name them, unless `mixed_numerics`: a sequence that goes on at the other worker
    keeps its tokens only between equal ones.
    """
    for other in linked:
        if not mixed_numerics and info.numerics and other.numerics and info.numerics != other.numerics:
            raise ContractError(
                f"numerics: {info.numerics[:100]!r}, and {other.id} of this shard has {other.numerics[:100]!r}; start "
                f"the worker in a shard of its own, or the scheduler with --mixed-numerics"
            )
        has_both = info.HasField("version") == other.HasField("version")  # else one digests a sample of the weights
        for name in SAME if has_both else SAME[1:]:
            if (value := getattr(info, name)) != (wanted := getattr(other, name)):
                raise ContractError(
                    f"{name}: {str(value)[:100]!r}, and {other.id} of this shard has {str(wanted)[:100]!r}; start the "
                    f"worker with the same model and settings, or in a shard of its own"
                )


def check_result(message: worker_pb2.Result, result: StepResult, vocab_size: int, slots: Slots) -> None:
    """Raise ContractError where a Result is out of bounds. result: the core's form of the same."""
    tokens = result.tokens
    if tokens.size and int(np.maximum.reduce(tokens.view(np.uint32))) >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
        raise ContractError(f"tokens: {wrong[0]} is outside the vocabulary of {vocab_size}; repair the worker")
    times, idle_ns = message.timings, message.timings.idle_ns
    spans = times.queued_ns, times.forward_ns, times.sample_ns, times.total_ns, times.swap_ns
    if min(spans) < 0 or max(spans) > LONGEST_NS or not 0 <= idle_ns <= LONGEST_IDLE_NS:
        wrong_ns = next((span for span in spans if not 0 <= span <= LONGEST_NS), idle_ns)
        raise ContractError(f"timings: {wrong_ns} ns is not a time that a step takes; repair the worker's clock")
    if result.errors:
        _check_errors(result, slots)
    if result.forced_tokens is not None:
        _check_forced(result, *result.forced_tokens, vocab_size)
    if slots.logprob_slots or result.logprobs is not None:
        _check_logprobs(result, slots)
    for prompt in result.prompt_logprobs:
        record_bytes, size = slots.prompt_record_bytes(prompt.slot, result.id), len(prompt.records)
        if size != prompt.count * record_bytes:
            raise ContractError(
                f"prompt_logprobs: {size} bytes for {prompt.count} tokens of slot {prompt.slot}, which asked "
                f"for {record_bytes} each; repair the worker"
            )


def _check_errors(result: StepResult, slots: Slots) -> None:
    seen: set[int] = set()
    for slot, _, _ in result.errors:
        if slot in seen or not slots.has_entered(slot, result.id):
            how = "twice" if slot in seen else "and no sequence had it"
            raise ContractError(f"errors: slot {slot} failed in step {result.id} {how}; repair the worker")
        seen.add(slot)


def _check_forced(result: StepResult, slots: Int32, counts: Int32, tokens: Int32, vocab_size: int) -> None:
    if slots.size > result.slots.size or np.unique(slots).size < slots.size:
        raise ContractError(
            f"forced_slots: {slots.size} slots, of {result.slots.size} with tokens, or one of them twice; repair the "
            f"worker"
        )
    if not (known := np.isin(slots, result.slots)).all():
        raise ContractError(f"forced_slots: slot {slots[~known][0]} has no token in this result; repair the worker")
    if (most := counts.max(initial=0)) > MAX_ROW_DRAFTS:
        raise ContractError(f"forced_counts: {most} tokens of one slot (limit {MAX_ROW_DRAFTS}); repair the worker")
    if (wrong := tokens[(tokens < 0) | (tokens >= vocab_size)]).size:
        raise ContractError(f"forced_tokens: {wrong[0]} is outside the vocabulary of {vocab_size}; repair the worker")


def _check_logprobs(result: StepResult, slots: Slots) -> None:
    of_tokens = result.slots
    if result.token_counts is not None:
        counts = result.token_counts
        if counts.size != result.slots.size or (counts < 0).any() or counts.sum(dtype=np.int64) != result.tokens.size:
            raise ContractError(
                f"token_counts: {counts.size} counts for {result.slots.size} slots and {result.tokens.size} tokens; "
                f"repair the worker"
            )
        of_tokens = np.repeat(result.slots, counts)
    elif result.slots.size != result.tokens.size:
        raise ContractError(
            f"slots: {result.slots.size} slots for {result.tokens.size} tokens without token_counts; repair the worker"
        )
    for row, slot in enumerate(of_tokens.tolist()):
        wanted = slots.record_bytes(slot, result.id)
        size = len(result.logprobs[row]) if result.logprobs is not None else 0
        if size != wanted:
            raise ContractError(f"logprobs: {size} bytes for slot {slot}, which asked for {wanted}; repair the worker")
