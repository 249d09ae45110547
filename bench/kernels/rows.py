"""Operations on single rows of an iteration, beside torch's for the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.case import Bench, Case, Maker, recorded
from bench.kernels.clock import Recorded, Thunk, error_of
from bench.kernels.kv import some_rows
from bench.kernels.shapes import BLOCK_SIZE, Plan
from kernels.ops import Attention, Cache, CacheShape, Groups, LowRankShape, Norm

EPS = 1e-5
ADAPTERS, RANK = 8, 16
"""Of add_low_rank: the rows of a step have them in turn."""
FEW, GROUP = (1, 8, 16), 128
"""Of packed matrices: rows as decode has them; inputs that share a scale, in 4 bits also a zero point, as in AWQ."""
PACKINGS = {"q4": "int4-128-mins", "fp8": "float8-128"}
"""Kind of a packed matrix -> Groups.group_format."""
Peers = dict[str, Callable[[], Sequence[Thunk]]]


def rows(plan: Plan, formats: Collection[str]) -> list[Maker]:
    """Return every operation at every number of rows. formats: of packed matrices, that the backend has kernels for."""
    kinds = {
        "embed": embed,
        "norm": norm,
        "add_norm": add_norm,
        "rope_and_write": rope_and_write,
        "act_and_mul": act_and_mul,
        "select": select,
        "add_low_rank": add_low_rank,
        "logits": logits,
    }
    cases = [(f"{op} {count}", partial(make, count)) for op, make in kinds.items() for count in plan.rows]
    products = [(f"linear {count}", partial(linear, count)) for count in plan.linear_rows]
    kinds_there = [kind for kind, name in PACKINGS.items() if name in formats]
    counts = sorted({*FEW, *plan.linear_rows})
    packed = [
        (f"linear_{kind} {count}", partial(linear_packed, kind, count)) for kind in kinds_there for count in counts
    ]
    return [*cases, *products, *packed]


def norm(count: int, bench: Bench) -> Case:
    hidden, weight = bench.plan.model.hidden, _norm(bench)
    x = _random(bench, count, hidden)
    work = _work(bench, x, 2 * x.nbytes, lambda x, _prepared, _i: bench.clock.ops.norm(x, weight))
    typed = weight.weight.to(bench.dtype)
    peers: Peers = {
        "F.rms_norm": lambda: [partial(F.rms_norm, y, (hidden,), typed, EPS) for y in _clones(bench, x, work.copies)]
    }
    return _case(bench, "norm", f"{count} x {hidden}", work, (2.0 * x.nbytes, 0.0), lambda x: _exact(x, weight), peers)


def add_norm(count: int, bench: Bench) -> Case:
    hidden, weight = bench.plan.model.hidden, _norm(bench)
    x = _random(bench, count, hidden)
    residuals = _clones(bench, x, bench.plan.copies(4 * x.nbytes))
    work = _work(bench, x, 4 * x.nbytes, lambda x, _prepared, i: bench.clock.ops.add_norm(x, residuals[i], weight))
    typed = weight.weight.to(bench.dtype)

    def eager(x: Tensor, residual: Tensor) -> Tensor:
        residual += x
        return F.rms_norm(residual, (hidden,), typed, EPS)

    def calls() -> list[Thunk]:
        xs = _clones(bench, x, work.copies)
        return [partial(eager, *pair) for pair in zip(xs, _clones(bench, x, work.copies), strict=True)]

    # The first residual is x itself, so that what is normed is 2 x.
    peers: Peers = {"torch add, F.rms_norm": calls}
    shape = f"{count} x {hidden}"
    return _case(bench, "add_norm", shape, work, (4.0 * x.nbytes, 0.0), lambda x: _exact(2 * x, weight), peers)


def act_and_mul(count: int, bench: Bench) -> Case:
    width = bench.plan.model.intermediate
    x = _random(bench, count, 2 * width)
    work = _work(bench, x, 1.5 * x.nbytes, lambda x, _prepared, _i: bench.clock.ops.act_and_mul(x, "silu"))

    def exact(x: Tensor) -> Tensor:
        gate, up = x.double().chunk(2, dim=-1)
        return F.silu(gate) * up

    def eager(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    peers: Peers = {"F.silu * up": lambda: [partial(eager, y) for y in _clones(bench, x, work.copies)]}
    return _case(bench, "act_and_mul", f"{count} x {width}", work, (1.5 * x.nbytes, 0.0), exact, peers)


def embed(count: int, bench: Bench) -> Case:
    """Return a case with rows spread over all of a table."""
    ops, hidden, vocab = bench.clock.ops, bench.plan.model.hidden, bench.plan.model.vocab
    batch, blocks = some_rows(count)
    batch.tokens[:] = (batch.tokens.astype("int64") * 7919 + 1) % vocab
    table = bench.clock.random(vocab, hidden, dtype=bench.dtype)
    copies = min(16, bench.plan.copies(table.nbytes))
    on_host = table.cpu()
    packed = [ops.pack_embedding(iter([on_host]), vocab, hidden) for _ in range(copies)]
    cache = _cache(bench, blocks)
    moved = 2.0 * count * hidden * bench.dtype.itemsize
    work = Recorded(lambda _x, prepared, i: ops.embed(prepared, packed[i]), batch, cache, copies)
    tokens = torch.from_numpy(batch.tokens).to(table.device)

    def error() -> float:
        found = ops.embed(ops.prepare(batch, cache), packed[0])
        return bench.clock.compute(lambda: error_of(found, table[tokens.long()]))

    peers: Peers = {"F.embedding": lambda: [partial(F.embedding, tokens, t) for t in _clones(bench, table, copies)]}
    return recorded(bench, "embed", f"{count} x {hidden}", work, (moved, 0.0), error, peers)


def select(count: int, bench: Bench) -> Case:
    """Return a case in which every row samples."""
    x = _random(bench, count, bench.plan.model.hidden)
    work = _work(bench, x, 2 * x.nbytes, lambda x, prepared, _i: bench.clock.ops.select(x, prepared))
    index = torch.arange(count, device=x.device)
    peers: Peers = {
        "index_select": lambda: [partial(torch.index_select, y, 0, index) for y in _clones(bench, x, work.copies)]
    }
    shape = f"{count} x {x.shape[1]}"
    return _case(bench, "select", shape, work, (2.0 * x.nbytes, 0.0), lambda x: x, peers)


def rope_and_write(count: int, bench: Bench) -> Case:
    """Return a case that rotates q and k and writes k and v; each call uses another layer."""
    ops, model = bench.clock.ops, bench.plan.model
    x = _random(bench, count, model.qkv)
    layers = bench.plan.copies(2 * x.nbytes)
    batch, blocks = some_rows(count)
    cache = _cache(bench, blocks, layers)
    angles = _angles(bench, max(count, model.context))
    attention = Attention(heads=model.heads, scale=1.0, rope=angles)

    def go(x: Tensor, prepared: Any, i: int) -> Tensor:
        return ops.rope_and_write(x, attention, prepared, cache, i)

    work = Recorded(go, batch, cache, layers, x)
    turned_width = (model.heads + model.kv_heads) * model.head_dim

    def error() -> float:
        found = go(bench.clock.compute(x.clone), ops.prepare(batch, cache), 0)
        exact = bench.clock.compute(lambda: _rotate(x[:, :turned_width].double(), angles[:count], model.head_dim))
        width = model.heads * model.head_dim
        q = bench.clock.compute(lambda: error_of(found, exact[:, :width]))
        block = cache.read_block(int(batch.tables[0, 0]))[0]  # [2, kv_heads, block_size, head_dim]
        written = min(count, BLOCK_SIZE)
        k, v = (part[:, :written].transpose(0, 1).flatten(1) for part in block)
        worst = max(error_of(k, exact[:written, width:].cpu()), error_of(v, x[:written, turned_width:].cpu()))
        return max(q, worst)

    peers: Peers = {"torch": lambda: _torch_rope(bench, x, angles, layers)}
    return recorded(bench, "rope_and_write", f"{count} x {model.qkv}", work, (2.0 * x.nbytes, 0.0), error, peers)


def add_low_rank(count: int, bench: Bench) -> Case:
    """Return a case of adapters beside the MLP's first matrix, of both its parts."""
    ops, size, model = bench.clock.ops, bench.dtype.itemsize, bench.plan.model
    inputs, width = model.hidden, model.intermediate
    numbers = 1 + np.arange(count, dtype=np.int32) % ADAPTERS
    used = min(count, ADAPTERS)
    weight_bytes = used * 2 * RANK * (inputs * size + width * 4)
    copies = max(2, min(16, bench.plan.copies(weight_bytes)))
    x, base = _random(bench, count, inputs), _random(bench, count, 2 * width)
    downs = [bench.clock.random(2, RANK, inputs, dtype=bench.dtype, seed=at) for at in range(used)]
    ups = [bench.clock.random(2, width, RANK, dtype=torch.float32, seed=at) for at in range(used)]
    rows = ops.new_rows_by_adapter()
    rows.reserve(count, ADAPTERS)
    rows.set(numbers)
    pairs = [ops.new_low_rank_pairs(LowRankShape(inputs, (width, width), (0, 1), bench.dtype)) for _ in range(copies)]
    for one in pairs:
        one.reserve(ADAPTERS, RANK, count)
        for at in range(used):
            one.set(at + 1, dict(enumerate(downs[at].cpu())), dict(enumerate(ups[at].cpu())))

    def go(x: Tensor, prepared: Any, i: int) -> Tensor:
        out = ops.blank(prepared, 2 * width, bench.dtype)
        ops.add_low_rank(x, out, pairs[i], rows)
        return out

    of_adapters = [torch.arange(at, count, ADAPTERS, device=x.device) for at in range(used)]

    def exact() -> Tensor:
        wide = base.double()
        for at, these in enumerate(of_adapters):
            inner = torch.einsum("ni,pri->npr", x[these].double(), downs[at].double())
            wide[these] += torch.einsum("npr,por->npo", inner, ups[at].double()).flatten(1)
        return wide

    def error() -> float:
        found = bench.clock.compute(base.clone)
        ops.add_low_rank(x, found, pairs[0], rows)
        return bench.clock.compute(lambda: error_of(found, exact()))

    def eager(x: Tensor, out: Tensor, downs: Sequence[Tensor], ups: Sequence[Tensor]) -> None:
        for these, down, up in zip(of_adapters, downs, ups, strict=True):
            inner = (x[these] @ down.flatten(0, 1).t()).view(-1, 2, RANK).transpose(0, 1)
            out.index_add_(0, these, torch.bmm(inner, up.transpose(1, 2)).transpose(0, 1).flatten(1))

    def calls() -> list[Thunk]:
        out = bench.clock.compute(base.clone)

        def turn() -> Thunk:
            return partial(eager, x, out, [down.clone() for down in downs], [up.to(bench.dtype) for up in ups])

        return [bench.clock.compute(turn) for _ in pairs]

    batch, blocks = some_rows(count)
    work = Recorded(go, batch, _cache(bench, blocks), copies, x)
    amounts = (weight_bytes + x.nbytes + 2.0 * base.nbytes, 4.0 * count * RANK * (inputs + width))
    shape = f"{count} of {used}: {2 * width} x {RANK} x {inputs}"
    return recorded(bench, "add_low_rank", shape, work, amounts, error, {"torch, one by one": calls})


def linear(count: int, bench: Bench) -> Case:
    """Return a case of the MLP's first matrix."""
    model = bench.plan.model
    return _product(bench, "linear", count, 2 * model.intermediate, model.hidden)


def logits(count: int, bench: Bench) -> Case:
    """Return a case of the head, with results in float32."""
    return _product(bench, "logits", count, bench.plan.model.vocab, bench.plan.model.hidden)


def _product(bench: Bench, op: str, count: int, outputs: int, inputs: int) -> Case:
    ops, size = bench.clock.ops, bench.dtype.itemsize
    weight_bytes = outputs * inputs * size
    copies = max(2, min(32, bench.plan.copies(weight_bytes)))
    x = _random(bench, count, inputs)
    weights = [bench.clock.random(outputs, inputs, dtype=bench.dtype, seed=i) for i in range(min(2, copies))]
    on_host = [weight.cpu() for weight in weights]
    packed = [ops.pack_linear(iter([on_host[i % 2]]), outputs, inputs, None) for i in range(copies)]
    do = ops.linear if op == "linear" else ops.logits
    batch, blocks = some_rows(count)
    work = Recorded(lambda x, _prepared, i: do(x, packed[i]), batch, _cache(bench, blocks), copies, x)
    out_size = size if op == "linear" else 4
    amounts = (weight_bytes + count * (inputs * size + outputs * out_size), 2.0 * count * outputs * inputs)

    def error() -> float:
        found = do(x, packed[0])
        return bench.clock.compute(lambda: error_of(found[:64], x[:64].double() @ weights[0].double().T))

    def calls() -> list[Thunk]:
        plain = _clones(bench, weights[0], copies)
        return [partial(F.linear, x, weight) for weight in plain]

    def prepacked() -> list[Thunk]:
        matrices = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in _clones(bench, weights[0], copies)]
        return [partial(torch.ops.mkldnn._linear_pointwise, x, matrix, None, "none", [], "") for matrix in matrices]

    peers: Peers = {"F.linear": calls}
    if x.device.type == "cpu" and torch_packs(bench.dtype):
        peers["oneDNN, reordered"] = prepacked
    return recorded(bench, op, f"{count}: {outputs} x {inputs}", work, amounts, error, peers)


def linear_packed(kind: str, count: int, bench: Bench) -> Case:
    """Return a case of the MLP's first matrix, packed, beside torch's product of the same weights unpacked."""
    ops, size, model = bench.clock.ops, bench.dtype.itemsize, bench.plan.model
    outputs, inputs = 2 * model.intermediate, model.hidden
    generator = torch.Generator().manual_seed(count)
    part = _groups(kind, outputs, inputs, generator)
    weight_bytes = part.numbers.numel() * part.bits // 8 + part.scales.nbytes * (1 if part.mins is None else 2)
    copies = max(2, min(32, bench.plan.copies(weight_bytes)))
    x = _random(bench, count, inputs)
    packed = [ops.pack_groups(iter([part]), outputs, inputs, None) for _ in range(copies)]
    batch, blocks = some_rows(count)
    work = Recorded(lambda x, _prepared, i: ops.linear(x, packed[i]), batch, _cache(bench, blocks), copies, x)
    amounts = (weight_bytes + count * (inputs + outputs) * size, 2.0 * count * outputs * inputs)

    def plain(dtype: torch.dtype) -> Tensor:
        made = bench.clock.empty(outputs, inputs, dtype=dtype)
        bench.clock.compute(lambda: made.copy_(part.plain()))
        return made

    def error() -> float:
        found, weight = ops.linear(x, packed[0]), plain(torch.float64)
        return bench.clock.compute(lambda: error_of(found[:64], x[:64].double() @ weight.T))

    def calls() -> list[Thunk]:
        weight = plain(bench.dtype)
        return [partial(F.linear, x, one) for one in _clones(bench, weight, copies)]

    shape = f"{count}: {outputs} x {inputs}"
    return recorded(bench, f"linear_{kind}", shape, work, amounts, error, {"F.linear, unpacked": calls})


def _groups(kind: str, outputs: int, inputs: int, generator: torch.Generator) -> Groups:
    scales = (torch.rand((outputs, -(-inputs // GROUP)), generator=generator) / 8).half().float()
    if kind == "fp8":
        codes = torch.randn((outputs, inputs), generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        return Groups(8, GROUP, codes, scales, table="float8")
    numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    return Groups(4, GROUP, numbers, scales, scales * 7)


def torch_packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed matrices of this type here: bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(1, 1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def _case(
    bench: Bench,
    op: str,
    shape: str,
    work: Recorded,
    amounts: tuple[float, float],
    exact: Callable[[Tensor], Tensor],
    peers: Peers,
) -> Case:
    def error() -> float:
        x = work.x
        if x is None:
            raise ValueError(f"{op} needs rows")
        prepared = bench.clock.ops.prepare(work.batch, work.cache)
        found = work.run(bench.clock.compute(x.clone), prepared, 0)
        if not isinstance(found, Tensor):
            raise TypeError(f"{op} returned no tensor")
        return bench.clock.compute(lambda: error_of(found, exact(x)))

    return recorded(bench, op, shape, work, amounts, error, peers)


def _work(bench: Bench, x: Tensor, call_bytes: float, run: Callable[[Tensor, Any, int], object]) -> Recorded:
    batch, blocks = some_rows(len(x))
    return Recorded(run, batch, _cache(bench, blocks), bench.plan.copies(call_bytes), x)


def _cache(bench: Bench, blocks: int, layers: int = 1) -> Cache:
    model = bench.plan.model
    shape = CacheShape(blocks, 0, layers, model.kv_heads, BLOCK_SIZE, model.head_dim, bench.dtype)
    cache: Cache = bench.clock.ops.new_cache(shape)
    return cache


def _random(bench: Bench, *shape: int) -> Tensor:
    return bench.clock.random(*shape, dtype=bench.dtype)


def _clones(bench: Bench, x: Tensor, count: int) -> list[Tensor]:
    return [bench.clock.compute(x.clone) for _ in range(count)]


def _norm(bench: Bench) -> Norm:
    return Norm(bench.clock.random(bench.plan.model.hidden, dtype=torch.float32, seed=9), None, EPS)


def _exact(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


def _angles(bench: Bench, positions: int) -> Tensor:
    """Return [positions, head_dim] float32: cosines, then sines."""
    half = bench.plan.model.head_dim // 2
    turns = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    table = torch.cat([turns.cos(), turns.sin()], dim=-1)
    made = bench.clock.empty(*table.shape, dtype=torch.float32)
    bench.clock.compute(lambda: made.copy_(table))
    return made


def _rotate(x: Tensor, angles: Tensor, head_dim: int) -> Tensor:
    """Return x [N, heads * head_dim] with row n rotated by angles[n]."""
    cos, sin = angles.to(x.dtype)[:, None].chunk(2, dim=-1)
    a, b = x.view(len(x), -1, head_dim).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(1)


def _torch_rope(bench: Bench, x: Tensor, angles: Tensor, layers: int) -> list[Thunk]:
    """Rotate and write to contiguous memory: the least work without pages."""
    model, count = bench.plan.model, len(x)
    width = (model.heads + model.kv_heads) * model.head_dim
    kv = model.kv_heads * model.head_dim
    index = torch.randperm(count).to(x.device)
    pools = [[bench.clock.empty(count, kv, dtype=bench.dtype) for _ in range(2)] for _ in range(layers)]

    def turn_and_write(keys: Tensor, values: Tensor) -> Tensor:
        turned = _rotate(x[:, :width], angles[:count], model.head_dim)
        keys.index_copy_(0, index, turned[:, -kv:])
        values.index_copy_(0, index, x[:, width:])
        return turned

    return [partial(turn_and_write, *pool) for pool in pools]
