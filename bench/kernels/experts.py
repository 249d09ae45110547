"""A layer's mixture of experts at several numbers of rows, beside torch's grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Bench, Case, Maker, recorded
from bench.kernels.clock import Recorded, Thunk, error_of
from bench.kernels.kv import some_rows
from bench.kernels.shapes import BLOCK_SIZE, MIXTRAL, QWEN_30B, SMALL_MIXTURE, Mixture
from kernels.ops import CacheShape, Routing

MAX_COPIES = 12
CHECKED = 64
"""Rows of which the error is looked for."""


ROWS = (1, 8, 64, 512, 4096)


def mixtures(quick: bool) -> list[Maker]:
    """Return a case for each mixture and number of rows."""
    chosen = [(SMALL_MIXTURE, (1, 5, 33))] if quick else [(QWEN_30B, ROWS), (MIXTRAL, ROWS)]
    return [(f"experts {one.name} {count}", partial(experts, one, count)) for one, rows in chosen for count in rows]


def experts(mixture: Mixture, count: int, bench: Bench) -> Case:
    """Return a case in which each call has other rows, and so other experts where these are few."""
    ops, size, hidden, inner = bench.clock.ops, bench.dtype.itemsize, mixture.hidden, mixture.intermediate
    gate_up = bench.clock.random(mixture.experts, 2 * inner, hidden, dtype=bench.dtype, seed=1)
    down = bench.clock.random(mixture.experts, hidden, inner, dtype=bench.dtype, seed=2)
    bench.clock.compute(lambda: (gate_up.mul_(hidden**-0.5), down.mul_(inner**-0.5)))
    packed = ops.pack_experts(
        [ops.pack_linear([one], 2 * inner, hidden, None) for one in gate_up.cpu()],
        [ops.pack_linear([one], hidden, inner, None) for one in down.cpu()],
    )
    routing = Routing(mixture.top_k, True, "silu")
    of_rows = min(mixture.experts, count * mixture.top_k) * 3 * inner * hidden * size
    copies = min(MAX_COPIES, bench.plan.copies(of_rows))
    x = bench.clock.random(count, hidden, dtype=bench.dtype)
    logits = [bench.clock.random(count, mixture.experts, dtype=torch.float32, seed=seed) for seed in range(copies)]

    def choice(of: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.sort(of, dim=-1, descending=True, stable=True)
        return torch.softmax(best.values[:, : mixture.top_k], -1), best.indices[:, : mixture.top_k]

    chosen = bench.clock.compute(lambda: [choice(one)[1] for one in logits])
    touched = sum(len(one.unique()) for one in chosen) / copies
    pairs = count * mixture.top_k
    weight_bytes = touched * 3 * inner * hidden * size
    amounts = (weight_bytes + 2.0 * x.nbytes + 2.0 * pairs * (hidden + inner) * size, 6.0 * pairs * inner * hidden)

    def error() -> float:
        found = ops.experts(x, logits[0], packed, routing)

        def exact() -> Tensor:
            rows = x[:CHECKED].double()
            weights, best = choice(logits[0][:CHECKED].double())
            out = torch.zeros_like(rows)
            for expert in best.unique().tolist():
                these, ranks = (best == expert).nonzero(as_tuple=True)
                gate, up = (rows[these] @ gate_up[expert].double().t()).chunk(2, -1)
                given = (F.silu(gate) * up) @ down[expert].double().t()
                out.index_add_(0, these, given * weights[these, ranks, None])
            return out

        return bench.clock.compute(lambda: error_of(found[:CHECKED], exact()))

    def grouped(logits: Tensor) -> Tensor:
        """Do all of it with torch, nothing on the host."""
        weights, best = choice(logits)
        order = best.flatten().argsort(stable=True)
        ends = torch.zeros(mixture.experts, dtype=torch.int32, device=x.device)
        ends.scatter_add_(0, best.flatten(), torch.ones_like(order, dtype=torch.int32))
        ends = ends.cumsum(0).to(torch.int32)
        rows = order // mixture.top_k
        gate, up = F.grouped_mm(x[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        given = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, rows, given * weights.flatten()[order, None].to(x.dtype))

    def calls() -> Sequence[Thunk]:
        return [partial(grouped, one) for one in logits]

    batch, blocks = some_rows(count)
    model = bench.plan.model
    cache = ops.new_cache(CacheShape(blocks, 0, 1, model.kv_heads, BLOCK_SIZE, model.head_dim, bench.dtype))
    work = Recorded(lambda x, _prepared, i: ops.experts(x, logits[i], packed, routing), batch, cache, copies, x)
    shape = f"{mixture.name}, {count} rows"
    return recorded(bench, "experts", shape, work, amounts, error, {"torch, grouped": calls})
