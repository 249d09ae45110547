"""Attention over the paged pool, one token a sequence and full chunks, beside torch's over contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Bench, Case, Maker, recorded
from bench.kernels.clock import Recorded, Thunk, error_of
from bench.kernels.kv import Paged
from bench.kernels.shapes import Plan, Prompt
from kernels.ops import Attention, Cache

CHECKED_ROWS = 64  # of a sequence; the last ones and as many all over it
MAX_PROMPT_LAYERS = 8

MakeCache = Callable[[Bench, Any], Cache]
"""Of a bench and a CacheShape; for pools that lie otherwise."""


def decodes(plan: Plan) -> list[Maker]:
    """Yield the decode cases: one new token for every sequence."""
    return [(f"attention {b} x {context}", partial(decode, b, context)) for b, context in plan.decodes]


def prompts(plan: Plan) -> list[Maker]:
    """Yield the prefill cases: chunks of prompts, some with earlier context."""
    return [(f"attention {prompt_shape(prompt)}", partial(prefill, prompt)) for prompt in plan.prompts]


def prompt_shape(prompt: Prompt) -> str:
    return f"{prompt.sequences} x {prompt.rows} of {prompt.context}"


def decode(
    sequences: int, context: int, bench: Bench, make_cache: MakeCache | None = None, op: str = "attention"
) -> Case:
    """Return a case with one token for each of `sequences` of `context` tokens, in more layers than any cache holds."""
    return _case(bench, op, f"{sequences} x {context}", Prompt(sequences, 1, context), make_cache)


def decode_alone(
    sequences: int, context: int, bench: Bench, make_cache: MakeCache | None = None, op: str = "attention"
) -> Case:
    """Return the same case without its peers, which another case has."""
    return replace(decode(sequences, context, bench, make_cache, op), peers={})


def prefill(prompt: Prompt, bench: Bench) -> Case:
    """Return a case of the last rows of each sequence, causal."""
    return _case(bench, "attention", prompt_shape(prompt), prompt, None)


def _case(bench: Bench, op: str, shape: str, prompt: Prompt, make_cache: MakeCache | None) -> Case:
    model, count, rows, context = bench.plan.model, prompt.sequences, prompt.rows, prompt.context
    kv_bytes = 2 * count * context * model.kv_heads * model.head_dim * bench.dtype.itemsize
    # A prompt multiplies more than it reads.
    layers = bench.plan.copies(kv_bytes) if rows == 1 else min(MAX_PROMPT_LAYERS, bench.plan.copies(kv_bytes))
    contexts = [context] * count
    cache = make_cache(bench, Paged.shape(bench, contexts, layers)) if make_cache else None
    paged = Paged(bench, contexts, layers, cache)
    attention = Attention(heads=model.heads, scale=model.head_dim**-0.5)
    work = queries(bench, paged, [rows] * count, attention)
    peers: dict[str, Callable[[], Sequence[Thunk]]] = {"SDPA": lambda: _sdpa(bench, count, rows, context)}
    if shape in bench.plan.flex:
        peers["FlexAttention"] = lambda: _flex(bench, count, rows, context)
    pairs = count * rows * (context - rows + (rows + 1) / 2)
    q_bytes = count * rows * model.heads * model.head_dim * bench.dtype.itemsize
    amounts = (kv_bytes + 2.0 * q_bytes, 4.0 * pairs * model.heads * model.head_dim)
    error = partial(error_of_attention, bench, paged, work, attention)
    return recorded(bench, op, shape, work, amounts, error, peers)


def queries(bench: Bench, paged: Paged, rows: Sequence[int], attention: Attention) -> Recorded:
    """Return attention of random queries for the last rows[s] tokens of each sequence, cycling through the layers."""
    q = bench.clock.random(sum(rows), attention.heads * bench.plan.model.head_dim, dtype=bench.dtype, seed=1)

    def attend(x: Tensor, prepared: Any, layer: int) -> Tensor:
        return bench.clock.ops.attention(x, attention, prepared, paged.cache, layer)

    return Recorded(attend, paged.last_rows(rows), paged.cache, paged.layers, q)


def error_of_attention(bench: Bench, paged: Paged, work: Recorded, attention: Attention) -> float:
    """Return the largest error of the first and the last layer, over rows of the sequences kept unpaged."""
    q, starts, head_dim = work.x, work.batch.query_start, bench.plan.model.head_dim
    if q is None:
        raise ValueError("attention needs queries")
    prepared = bench.clock.ops.prepare(work.batch, paged.cache)
    found = [work.run(q, prepared, layer) for layer in (0, paged.layers - 1)]

    def compare() -> float:
        worst = 0.0
        for sequence in paged.kept:
            count = int(starts[sequence + 1] - starts[sequence])
            chosen = _spread(count).to(q.device)
            at = int(starts[sequence]) + chosen
            positions = paged.contexts[sequence] - count + chosen
            exact = paged.attended(sequence, q[at].view(len(at), -1, head_dim), positions, attention).flatten(1)
            worst = max(worst, *(error_of(out[at], exact) for out in found if isinstance(out, Tensor)))
        return worst

    return bench.clock.compute(compare)


def _spread(count: int) -> Tensor:
    """Return some of `count` rows: the last ones, and others spread evenly."""
    step = max(1, count // CHECKED_ROWS)
    rows: Tensor = torch.cat([torch.arange(0, count, step), torch.arange(max(0, count - CHECKED_ROWS), count)]).unique()
    return rows


def _operands(bench: Bench, sequences: int, rows: int, context: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return queries [sequences, heads, rows, head_dim] and more pairs of contiguous K and V than any cache holds."""
    clock, model = bench.clock, bench.plan.model
    shape = (sequences, model.kv_heads, context, model.head_dim)
    bytes_each = 2 * sequences * model.kv_heads * context * model.head_dim * bench.dtype.itemsize
    copies = bench.plan.copies(bytes_each) if rows == 1 else 2
    q = clock.random(sequences, model.heads, rows, model.head_dim, dtype=bench.dtype)
    parts = [clock.random(*shape, dtype=bench.dtype, seed=seed) for seed in range(2 * copies)]
    return q, list(zip(parts[::2], parts[1::2], strict=True))


def _sdpa(bench: Bench, sequences: int, rows: int, context: int) -> list[Thunk]:
    from torch.nn.attention.bias import causal_lower_right  # with all of torch's compiler, which takes seconds

    q, pairs = _operands(bench, sequences, rows, context)
    how: dict[str, Any] = {"enable_gqa": True}
    if rows == context:
        how["is_causal"] = True
    elif rows > 1:
        how["attn_mask"] = causal_lower_right(rows, context)
        # The mask's own kernels know no grouped heads.
        wide = bench.plan.model.heads // bench.plan.model.kv_heads
        pairs = [(k.repeat_interleave(wide, 1), v.repeat_interleave(wide, 1)) for k, v in pairs]
        how["enable_gqa"] = False
    return [partial(F.scaled_dot_product_attention, q, k, v, **how) for k, v in pairs]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(bench: Bench, sequences: int, rows: int, context: int) -> list[Thunk]:
    from torch.nn.attention.flex_attention import create_block_mask

    q, pairs = _operands(bench, sequences, rows, context)
    before = context - rows

    def causal(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + before

    mask = None if rows == 1 else create_block_mask(causal, None, None, rows, context, device=str(q.device))
    attend = _compiled_flex()
    return [partial(attend, q, k, v, block_mask=mask, enable_gqa=True) for k, v in pairs]
