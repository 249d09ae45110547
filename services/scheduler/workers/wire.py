"""Between the core's plans and worker.proto: pack a step, read a result. Pure; no socket.

The fleet, the in-process tests and the benches use these functions, so there is one way from a plan to the wire.
"""

from __future__ import annotations

import hashlib

from protos import queue_pb2, worker_pb2
from services.scheduler.core.types import EMPTY, Enter, Int32, Limits, PromptLogprobs, StepPlan, StepResult
from shared.text.logprobs import split_records
from shared.wire.columns import pack, unpack

_OF_WORKER = worker_pb2.Sampling.DESCRIPTOR.fields_by_name
SAMPLING_FIELDS = [
    field.name for field in queue_pb2.Sampling.DESCRIPTOR.fields if field.name in _OF_WORKER and field.name != "grammar"
]
"""Fields that both protos have: a new one passes from the request to the worker by its name. The text of a grammar may
lie apart from its request.
"""


def limits_from_wire(
    info: worker_pb2.WorkerInfo, speculate: str = "auto", run: int = 0, mixed_numerics: bool = False
) -> Limits:
    """Return the size of a worker from its Describe. run: epoch of the Run; others as in SchedulerSettings."""
    drafts = speculate == "suffix" or (speculate == "auto" and info.same_bits)
    return Limits(
        slots=info.max_seqs,
        blocks=info.gpu_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_step_tokens=info.max_step_tokens,
        host_blocks=info.host_blocks,
        block_bytes=info.block_bytes,
        stages=max(info.stages, 1),
        role=info.role,
        run=run,
        host_tier=info.host_tier,
        kv_format=info.kv_format,
        numerics=info.numerics,
        identity="" if mixed_numerics else identity_of(info),
        keeps=info.keeps,
        max_drafts=info.max_drafts if drafts else 0,
        masks_behind_drafts=info.masks_behind_drafts,
        experts=info.experts,
        experts_per_token=info.experts_per_token,
        max_loras=info.max_loras,
        whole_prompts=info.whole_prompts,
    )


IDENTITY_LENGTH = 256


def identity_of(info: worker_pb2.WorkerInfo) -> str:
    """Return what decides each number of a worker: weights, type and numerics; empty if these are not known.

    Each request's record has it, so one of more than IDENTITY_LENGTH characters is a digest. A worker of version 1.0
    names none and has a hash of samples of its weights: after its update the same weights have another one.
    """
    if not info.numerics or not info.HasField("version"):
        return ""
    text = f"{info.model_hash} {info.dtype} {info.numerics}"
    return text if len(text) <= IDENTITY_LENGTH else hashlib.sha256(text.encode()).hexdigest()


def sampling_of(request: queue_pb2.Request, choice: int) -> worker_pb2.Sampling:
    """Return the sampling of one choice, without its grammar. Choice i uses seed + i, so that the n choices differ."""
    sampling = worker_pb2.Sampling(**{name: getattr(request.sampling, name) for name in SAMPLING_FIELDS})
    sampling.seed = (request.sampling.seed + choice) & 0xFFFFFFFFFFFFFFFF
    if choice % max(request.n, 1):
        sampling.prompt_logprobs = 0  # the first choice of the prompt tells them
    sampling.stop_ids, sampling.min_tokens = request.stop_token_ids, request.min_tokens
    return sampling


def _enter(enter: Enter) -> worker_pb2.Enter:
    request: queue_pb2.Request = enter.request.payload
    sampling = sampling_of(request, enter.choice)
    sampling.grammar = enter.request.grammar
    segments = unpack(request.segments)
    return worker_pb2.Enter(
        slot=enter.slot,
        tokens=pack(enter.tokens),
        prompt_tokens=enter.prompt_tokens,
        computed=enter.computed_tokens,
        blocks=pack(enter.blocks),
        sampling=sampling,
        tenant=enter.tenant,
        scored=enter.scored_tokens,
        adapter=enter.adapter,
        pooling=request.pooling,
        label_ids=request.label_ids,
        segment=int(segments[enter.choice // max(request.n, 1)]) if segments.size else 0,
    )


def step_to_wire(plan: StepPlan, epoch: int) -> worker_pb2.Step:
    """Return the Step message of a plan. `request.payload` of entering sequences is their queue_pb2.Request."""
    step = worker_pb2.Step(
        epoch=epoch,
        id=plan.id,
        free_slots=pack(plan.free_slots),
        swap_out_gpu=pack(plan.swap_out_gpu),
        swap_out_host=pack(plan.swap_out_host),
        swap_in_host=pack(plan.swap_in_host),
        swap_in_gpu=pack(plan.swap_in_gpu),
        enters=[_enter(enter) for enter in plan.enters],
        append_slots=pack(plan.append_slots),
        append_blocks=pack(plan.append_blocks),
        chunk_slots=pack(plan.chunk_slots),
        chunk_starts=pack(plan.chunk_starts),
        chunk_lengths=pack(plan.chunk_lengths),
    )
    for adapter in plan.adapters:
        step.adapters.add(number=adapter.number, digest=adapter.digest)
    for peer in plan.peers:
        step.peers.add(number=peer.number, host_tier=peer.host_tier, host_blocks=peer.host_blocks, run=peer.run)
    if plan.swap_in_peers.size:
        step.swap_in_peers = pack(plan.swap_in_peers)
    if plan.keep.size:
        step.keep = pack(plan.keep)
    if plan.drafts.size:
        step.chunk_drafts, step.drafts = pack(plan.chunk_drafts), pack(plan.drafts)
    return step


def _prompt_logprobs(result: worker_pb2.Result) -> list[PromptLogprobs]:
    """Return the log-probabilities of prompts. Raises ValueError when a column has a wrong length."""
    slots, firsts, counts = unpack(result.prompt_slots), unpack(result.prompt_firsts), unpack(result.prompt_counts)
    records = result.prompt_logprobs
    if not slots.size == firsts.size == counts.size or (counts < 1).any() or (slots < 0).any():
        raise ValueError(f"prompt_logprobs: columns of {slots.size}, {firsts.size} and {counts.size} numbers")
    sizes = unpack(result.prompt_sizes)
    if sizes.size != slots.size or (sizes < 1).any() or int((sizes.astype("i8") * counts).sum()) != len(records):
        raise ValueError(f"prompt_logprobs: {len(records)} bytes do not fit {counts.sum()} tokens")
    found, at = [], 0
    for slot, first, count, size in zip(slots.tolist(), firsts.tolist(), counts.tolist(), sizes.tolist(), strict=True):
        found.append(PromptLogprobs(slot, first, count, records[at : at + count * size]))
        at += count * size
    return found


def _forced_tokens(result: worker_pb2.Result) -> tuple[Int32, Int32, Int32]:
    """Return slots, counts and tokens of forced texts. Raises ValueError when a column has a wrong length."""
    slots, counts, tokens = unpack(result.forced_slots), unpack(result.forced_counts), unpack(result.forced_tokens)
    if slots.size != counts.size or (counts < 1).any() or int(counts.sum(dtype="i8")) != tokens.size:
        raise ValueError(f"forced_tokens: columns of {slots.size}, {counts.size} and {tokens.size} numbers")
    return slots, counts, tokens


def result_from_wire(result: worker_pb2.Result, replica: int = 0) -> StepResult:
    """Return the core's form of a Result. Raises ValueError when a column has a wrong length."""
    tokens, logprobs = unpack(result.tokens), None
    if result.logprobs:
        logprobs = split_records(result.logprobs, unpack(result.logprob_sizes), tokens.size)
    return StepResult(
        id=result.id,
        replica=replica,
        slots=unpack(result.slots),
        tokens=tokens,
        token_counts=unpack(result.token_counts) if result.token_counts else None,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(result) if result.prompt_slots else [],
        swap_out_acks=unpack(result.swap_out_acks) if result.swap_out_acks else EMPTY,
        swap_in_acks=unpack(result.swap_in_acks) if result.swap_in_acks else EMPTY,
        errors=[(error.slot, error.code[:64], error.message[:1000]) for error in result.errors],
        error=result.error,
        forced_tokens=_forced_tokens(result) if result.forced_slots else None,
        step_ns=result.timings.total_ns,
        swap_ns=result.timings.swap_ns,
        late=unpack(result.late_slots) if result.late_slots else EMPTY,
        adapter_acks=unpack(result.adapter_acks) if result.adapter_acks else EMPTY,
        peer_acks=unpack(result.peer_acks) if result.peer_acks else EMPTY,
        stale_peers=unpack(result.stale_peers) if result.stale_peers else EMPTY,
        kept_blocks=result.kept,
    )
