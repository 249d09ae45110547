"""The operations of the model's forward pass, each defined once: shapes, dtypes, meaning.

A backend (reference, cpu) subclasses `Ops`, registers under its name and is chosen by the worker at start. N is the
number of tokens of an iteration, all sequences one after another and nothing padded; S the number of sequences in it;
R the rows that sample. Integers cross this border as numpy int32, tensors lie on `Ops.device`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.formats import FLOAT8, TABLES, W8A8, GroupFormat

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""gelu is the exact one (erf); gelu_tanh is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), also called gelu_new."""

GATED_ACTIVATIONS = (*ACTIVATIONS, "clamped_swiglu")
"""Of act_and_mul. clamped_swiglu is gpt-oss's: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7) and up u within -7
and 7."""

STATUS_FINE, STATUS_NOT_FINITE, STATUS_NOTHING_ALLOWED = 0, 1, 2


ResultT = TypeVar("ResultT")


class Pending(ABC, Generic[ResultT]):
    """A result that a device may still be computing."""

    @abstractmethod
    def ready(self) -> bool:
        """Return whether `wait` returns at once."""

    @abstractmethod
    def wait(self) -> ResultT:
        """Return the result, once it is there. May be called again, and by several threads."""


class Done(Pending[ResultT]):
    """A result that was complete from the start."""

    def __init__(self, result: ResultT) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def wait(self) -> ResultT:
        return self._result


MAX_CODE = {"int8": 127, "fp8": 448}
"""The largest number that a code of K and V in 8 bits stands for, by CacheShape.kv_dtype."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Size of a paged KV cache. A backend may order the axes as it likes; one block is one unit of copying."""

    blocks: int
    host_blocks: int
    layers: int
    kv_heads: int
    block_size: int  # tokens
    head_dim: int
    dtype: torch.dtype
    kv_dtype: str = "auto"
    """auto is `dtype`. K and V in 8 bits, of MAX_CODE, are rounded as they are written.
    With x the head_dim numbers of a token and KV head, of K or of V: scale = max |x| / MAX_CODE[kv_dtype] in float32,
    code = x / scale rounded to nearest even among the integers (int8) or the numbers of e4m3fn (fp8), and attention
    reads code * scale as `dtype`."""

    @property
    def is_8bit(self) -> bool:
        return self.kv_dtype != "auto"

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block's numbers: all layers, K and V. A backend may take more: Ops.block_bytes."""
        vector = self.head_dim + 4 if self.is_8bit else self.head_dim * self.dtype.itemsize
        return 2 * self.layers * self.kv_heads * self.block_size * vector

    def demand_kv_dtype(self, backend: str, *kv_dtypes: str) -> None:
        """Raise ValueError for another type than these, all that a backend has kernels for."""
        if self.kv_dtype not in kv_dtypes:
            raise ValueError(
                f"KV in {self.kv_dtype}: the {backend} backend has no kernels for it; give --kv-dtype auto"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one iteration, on the host. Sequence s owns rows query_start[s]:query_start[s + 1].

    Its rows are consecutive positions and end at context[s] - 1; the KV of positions 0 .. context[s] - 1 lies, after
    this iteration's writes, in blocks tables[s, : ceil(context[s] / block_size)].
    """

    tokens: Int32  # [N]; ~s (below zero) is the token that Ops.sample_later drew last for slot s
    positions: Int32  # [N]
    query_start: Int32  # [S + 1]
    context: Int32  # [S]
    tables: Int32  # [S, at least the blocks of the longest]
    write_blocks: Int32  # [N] block that row's K and V go to
    write_offsets: Int32  # [N] and its place inside the block
    sample_rows: Int32  # [R] rows with logits wanted
    scored: int = field(default=0, kw_only=True)
    """How many of these, the last ones, are rows before prompt tokens to score: the pass is not a compiled one."""


W8A8_INPUTS = (2**31 - 1) // (127 * 128)
"""With more, a sum of products may not fit into 32 bits."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Some rows of a weight in 2, 4, 6 or 8 bits. Each `group` inputs of an output share a scale and perhaps a minimum.

    A weight is scale * number - min where there are minima, else scale * (number - 2^(bits - 1)); in float32 with
    one rounding. Where there are minima each scale * number is exact, as with scales of at most 24 - bits
    significant bits, so that a multiply-add rounds like a product and a difference. With a `table` it is
    scale * TABLES[table][number]; with FLOAT8 the bytes are themselves numbers of E4M3FN, none of them a NaN.

    With `rounds_rows` (W8A8: 8 bits, a row is one group, no minima) a row x of activations is rounded, too. In float32,
    s = max |x| / 127 and c = x / s, to the nearest integer, ties to even, from -127 to 127. An output is
    float32(sum of c * (number - 128)) * scale * s + bias: the sum is an integer, each of the other operations is
    rounded, and the result once more to the model's type. All c are 0 where s is 0; a row with a number that is
    infinite or NaN gives NaN.
    """

    bits: int
    group: int
    numbers: Tensor  # [rows, inputs] uint8, contiguous, below 2^bits
    scales: Tensor  # [rows, ceil(inputs / group)] float32, contiguous
    mins: Tensor | None = None  # as scales
    table: str = ""  # of TABLES, or FLOAT8
    rounds_rows: bool = False

    @property
    def group_format(self) -> str:
        """Return the name of the format; a backend may have no kernels for it (Ops.group_formats)."""
        if self.rounds_rows:
            return W8A8
        return GroupFormat(self.bits, self.group, self.mins is not None, self.table).name

    def plain(self) -> Tensor:
        """Return the weights, [rows, inputs] float32."""
        inputs = self.numbers.shape[1]
        scales = self.scales.repeat_interleave(self.group, 1)[:, :inputs]
        if self.table == FLOAT8:
            return self.numbers.view(torch.float8_e4m3fn).float() * scales
        if self.table:
            return torch.tensor(TABLES[self.table])[self.numbers.int()] * scales
        if self.mins is None:
            return (self.numbers.float() - (1 << self.bits - 1)) * scales
        return self.numbers.float() * scales - self.mins.repeat_interleave(self.group, 1)[:, :inputs]


class Prepared:
    """A Batch as a backend wants it; made once per iteration, read by every layer. Backends subclass it."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over the last axis; mean and variance in float32.

    RMSNorm: x / sqrt(mean(x^2) + eps) * weight; LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias.
    """

    weight: Tensor  # [hidden] float32, as it is multiplied (Gemma's 1 + w is added up when it is loaded)
    bias: Tensor | None  # [hidden] float32
    eps: float
    layer_norm: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer, without its sizes."""

    heads: int
    scale: float
    rope: Tensor | None = None  # [positions, rotary] float32: cosines, then sines; only the first `rotary` numbers turn
    q_norm: Norm | None = None  # RMSNorm of each head's head_dim numbers before the rotation (Qwen3)
    k_norm: Norm | None = None
    window: int = 0  # the latest `window` positions are seen, including the row's position; 0: all
    slopes: Tensor | None = None  # [heads] float32, ALiBi: slope * (key's - row's position) is added to a score
    sinks: Tensor | None = None  # [heads] float32: each row's softmax has one more score, this, with a value of zeros
    softcap: float = 0.0  # a scaled score s becomes softcap * tanh(s / softcap) (Gemma 2); 0: it stays
    causal: bool = True  # False: each row sees all positions of its sequence; then without window and slopes


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows are given to experts: to those of the `top_k` largest logits, the lower index first among equals.

    The weight of an expert is its softmax over all logits, in float32.
    """

    top_k: int
    normalize: bool  # the weights of a row are divided by their sum
    activation: str  # of GATED_ACTIVATIONS, of the experts


class RowsByAdapter:
    """Which rows of the iteration at hand have which adapter. A compiled pass looks whenever it runs."""

    def __init__(self) -> None:
        self.set(np.zeros(0, np.int32))

    def reserve(self, rows: int, adapters: int) -> None:
        """Take memory for passes with at most so many rows and adapters, before any that has adapters."""

    def set(self, numbers: Int32) -> None:
        """Take the number of each row's adapter, [N], 0 for none."""
        counts = np.bincount(numbers, minlength=1)
        self.order = np.argsort(numbers, kind="stable")[counts[0] :].astype(np.int32)
        counts[0] = 0
        self.adapters = np.flatnonzero(counts).astype(np.int32)  # [A] numbers, ascending
        self.starts = np.zeros(len(self.adapters) + 1, np.int32)  # those of adapter i: order[starts[i] : starts[i + 1]]
        np.cumsum(counts[self.adapters], out=self.starts[1:])


@dataclass(frozen=True, slots=True)
class LowRankShape:
    """The matrices of an adapter beside a weight, the outputs of which are parts, one under the other.

    Each part has an up matrix and reads one of the down matrices.
    """

    inputs: int
    outputs: tuple[int, ...]  # of each part
    reads: tuple[int, ...]  # of each part: the number of its down matrix, from 0 on
    dtype: torch.dtype  # of the model: of x and of the down matrices

    @property
    def downs(self) -> int:
        """Return how many down matrices there are."""
        return max(self.reads) + 1


@dataclass(frozen=True, slots=True)
class Up:
    """An up matrix of an adapter: these outputs of the weight, from these of all ranks."""

    matrix: Any  # packed
    outputs: range
    ranks: range


class LowRankPairs:
    """The products that adapters add to x @ weight.T of a weight: up(down(x)), by the adapter's number (LoRA, arXiv
    2106.09685)."""

    def __init__(self, ops: AnyOps, shape: LowRankShape) -> None:
        self.shape = shape
        self.by_number: dict[int, tuple[Any, Any]] = {}
        """All down matrices as one, packed, and the up matrices, each an Up."""
        self._ops = ops

    def reserve(self, adapters: int, rank: int, rows: int) -> None:
        """Take memory before the first is set: for the numbers 1 .. adapters, each down matrix with at most so many
        ranks, and for products of at most so many rows."""

    def set(self, number: int, downs: Mapping[int, Tensor], ups: Mapping[int, Tensor]) -> None:
        """Take the matrices of an adapter, which has none yet, on the CPU.

        downs: [rank, inputs] by number, in the model's dtype; to the parts of one that is missing nothing is added.
        ups: [outputs, rank] in float32, by the number of the part.
        """
        ends = np.cumsum([down.shape[0] for down in downs.values()]).tolist()
        ranks = {at: range(end - down.shape[0], end) for (at, down), end in zip(downs.items(), ends, strict=True)}
        down = self._pack(torch.cat(list(downs.values())))
        up_dtype = self._ops.up_dtype(self.shape.dtype)
        made: list[Up] = []
        first = 0
        for reads, parts in groupby(range(len(self.shape.reads)), self.shape.reads.__getitem__):
            these = list(parts)
            outputs = range(first, first + sum(self.shape.outputs[part] for part in these))
            first = outputs.stop
            if reads in ranks:
                matrix = torch.cat([ups[part].to(up_dtype) for part in these])
                made.append(Up(self._pack(matrix), outputs, ranks[reads]))
        self.by_number[number] = (down, made)

    def remove(self, number: int) -> None:
        self.by_number.pop(number, None)

    def _pack(self, matrix: Tensor) -> Any:
        outputs, inputs = matrix.shape
        return self._ops.pack_linear([matrix], outputs, inputs, None)


class Cache(ABC):
    """A paged KV pool and its host tier. All memory is taken in the constructor."""

    shape: CacheShape
    layout: str
    """How a block's numbers lie in its bytes: where it and the shape are the same, one cache's blocks are another's."""

    @abstractmethod
    def copy_out(self, blocks: Int32, host_blocks: Int32) -> None:
        """Copy block g to host block h, pair by pair, all layers; complete when it returns."""

    @abstractmethod
    def copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> None:
        """Copy host block h, of this tier or of another's (`host_tier`), to block g, pair by pair; complete when
        it returns."""

    @abstractmethod
    def host_tier(self, memory: Tensor) -> Tensor:
        """Return the host tier of another cache of this layout as `copy_in` takes it. Valid while the tensor lives.

        memory: its bytes, [host blocks * bytes of a block] uint8 from the beginning of a page on; only read.
        """

    def start_copy_out(self, blocks: Int32, host_blocks: Int32) -> Pending[int]:
        """Begin a copy_out that may go on beside what the device is given later; the result is the ns that it took.

        It begins when all that the device was given before is done, and copies keep their order among themselves.
        Both blocks of each pair must be left alone until it is complete.
        """
        began = time.monotonic_ns()
        self.copy_out(blocks, host_blocks)
        return Done(time.monotonic_ns() - began)

    def start_copy_in(self, host_blocks: Int32, blocks: Int32, tier: Tensor | None = None) -> Pending[int]:
        """Begin a copy_in, as start_copy_out; `tier` is to be kept alive until it is complete."""
        began = time.monotonic_ns()
        self.copy_in(host_blocks, blocks, tier)
        return Done(time.monotonic_ns() - began)

    @abstractmethod
    def read_block(self, block: int) -> Tensor:
        """Return [layers, 2 (K, V), kv_heads, block_size, head_dim], a copy on the host. For tests and transfer."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """(row, id, value) triples; rows index the sampling batch. `values` is None where only membership counts."""

    rows: Int64
    ids: Int64
    values: Float32 | None = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each of R rows is sampled. Absent features are None, so that a backend can skip them as a whole.

    Applied in this order: bias is added, banned ids and ids outside the allow-bitmask are removed, penalties
    (repetition over prompt and output; presence, frequency over output), division by temperature, top-k, top-p of what
    is left, min-p, Gumbel-max. A token that equals the last one kept by top-k or top-p is kept too. Temperature 0 takes
    the largest logit after the penalties, the smallest id among equals.

    The noise of token t in row r: Philox4x32-10 with key (seed & 0xffffffff, seed >> 32) and counter
    (t >> 2, position & 0xffffffff, position >> 32, 0), output word x number t & 3;
    u = min((float32(x) + 0.5) * 2**-32, 1 - 2**-24), noise = -log(-log1p(-u)), all in float32.
    """

    temperature: Float32  # [R]
    top_k: Int32  # [R] 0 is off
    top_p: Float32  # [R] 1 is off
    min_p: Float32  # [R] 0 is off
    seed: UInt64  # [R]
    position: Int64  # [R] index, in its sequence, of the token to be drawn
    want_logprob: Bool  # [R]
    likely: Int32 | None = None  # [R] how many most likely tokens are wanted beside it; None where no row wants any
    bias: Sparse | None = None
    banned: Sparse | None = None
    mask_rows: Int64 | None = None  # [m] rows with an allow-bitmask
    mask_words: UInt32 | None = None  # [m, ceil(V / 32)] bit i of word w allows id 32 w + i
    # Tokens of the rows with a penalty; value 1 for outputs, 0 for the prompt; an id ~s as in Batch.tokens.
    history: Sparse | None = None
    presence: Float32 | None = None  # [R], these three given together with history
    frequency: Float32 | None = None
    repetition: Float32 | None = None  # 1 is off

    @property
    def is_plain_greedy(self) -> bool:
        """Return whether every row is an argmax of the untouched logits and no log-probability is wanted."""
        return (
            self.bias is None
            and self.banned is None
            and self.mask_rows is None
            and self.history is None
            and not np.count_nonzero(self.temperature)
            and not np.count_nonzero(self.want_logprob)
        )


@dataclass(frozen=True, slots=True)
class Likely:
    """ids [R, K] int32, logprobs [R, K] float32 of each row's most likely tokens, under the model's distribution.
    K is the most that a row wants; equal ones come in any order; rows that want none mean nothing."""

    ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens, status [R] on the host; status is STATUS_*, tokens of rows that are not fine mean nothing; logprobs [R].

    A log-probability is that of the sampled token under the model's distribution (softmax of the given logits);
    NaN in rows that did not ask, and None when no row asked.
    """

    tokens: Int64
    status: Int64
    logprobs: Float32 | None
    likely: Likely | None = None  # where some row wants one


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of R given tokens under the model's distribution, on the host: [R] columns, and [R, K] of the
    most likely.

    ranks: how many ids have a logit at least as large as the token's. status: STATUS_*; other numbers of rows that are
    not fine mean nothing. ids are -1 where the vocabulary has fewer than K; equal ones come in any order.
    """

    logprobs: Float32
    ranks: Int32
    status: Int32
    ids: Int32
    best: Float32

    @classmethod
    def blank(cls, rows: int, likely: int) -> Scored:
        """Return the room for so many rows."""
        return cls(
            logprobs=np.empty(rows, np.float32),
            ranks=np.empty(rows, np.int32),
            status=np.empty(rows, np.int32),
            ids=np.empty((rows, likely), np.int32),
            best=np.empty((rows, likely), np.float32),
        )

    def put(self, first: int, part: Scored) -> None:
        """Write rows from `first` on."""
        for name in ("logprobs", "ranks", "status", "ids", "best"):
            column = getattr(part, name)
            getattr(self, name)[first : first + len(column)] = column


SCORED_BYTES = 32 << 20
"""Logits of the rows that are scored at once, at most; one row has any size."""
FORCED = 1e30
"""A bias that lets no other token be the largest."""


PreparedT = TypeVar("PreparedT", bound=Prepared)
CacheT = TypeVar("CacheT", bound=Cache)


class Ops(ABC, Generic[PreparedT, CacheT]):
    """One backend. Float tensors have the model's dtype unless a line says otherwise."""

    name: str
    device: torch.device
    overlaps: bool = False
    """Whether the forward pass and sample_later return before the device is done, so that the next iteration can be
    given to it meanwhile. Only then may ids be below zero (Batch.tokens)."""
    weight_formats: frozenset[str] = frozenset()
    """Formats of pack_linear beside the model's type; kernels/cpu/src/formats/ says what each is."""
    group_formats: frozenset[str] = frozenset()
    """Formats of pack_groups (Groups.group_format): int4-32, int8-128-mins and so on."""
    packs_experts: bool = True
    """Whether pack_experts takes what pack_groups gives, where there is such a thing."""
    packs_tables: bool = True
    """Whether `embed` and `logits` take what pack_groups gives, where there is such a thing."""

    def group_numerics(self, dtype: torch.dtype) -> str:
        """Return what the numerics of a model of this type say more where matrices of it are packed from Groups.

        Empty where products then have the bits of unpacked weights.
        """
        return ""

    def block_bytes(self, shape: CacheShape) -> int:
        """Return the bytes of one block as this backend's caches hold it."""
        return shape.block_bytes

    @abstractmethod
    def new_cache(self, shape: CacheShape, host: Tensor | None = None) -> CacheT:
        """Take the memory of a cache, host tier included.

        host: memory of the host tier that is there already, [host blocks * bytes of a block] uint8 of zeros from the
        beginning of a page on.
        """

    @abstractmethod
    def prepare(self, batch: Batch, cache: CacheT) -> PreparedT:
        """Make device metadata of host metadata, once per iteration."""

    @abstractmethod
    def pack_linear(
        self, parts: Iterable[Tensor], outputs: int, inputs: int, bias: Tensor | None, weight_format: str = ""
    ) -> Any:
        """Return a matrix [outputs, inputs] as `linear` of this backend takes it. Called at load only.

        parts: [any number of rows, inputs], contiguous, on the CPU, one under the other; they are read from the
        checkpoint as they are asked for, so one that is let go before the next keeps the peak of memory low.
        bias: [outputs] float32. weight_format: how the numbers are held; empty means in the parts' type. Raise
        ValueError for a format that the backend has no kernel for (`demand_format`).
        """

    def demand_format(self, weight_format: str) -> None:
        """Raise ValueError for a weight format that this backend cannot multiply."""
        if weight_format and weight_format not in self.weight_formats:
            raise ValueError(f"weight format {weight_format}: the {self.name} backend has no kernels for it")

    def pack_groups(self, parts: Iterable[Groups], outputs: int, inputs: int, bias: Tensor | None) -> Any:
        """Return a matrix as pack_linear, of parts that are all of one of the backend's group_formats.

        `linear` multiplies it as a matrix of `Groups.plain` in float32. On a CPU the product has the bits of that
        matrix's product, unless `group_numerics` is not empty. With rounds_rows all backends give the same bits.
        """
        raise ValueError(f"weights in groups: the {self.name} backend has no kernels for them")

    def stack(self, packed: Sequence[Any]) -> Any:
        """Return matrices of several weight formats, one under the other, as one for `linear`."""
        raise ValueError(f"weights in several formats: the {self.name} backend has one")

    @abstractmethod
    def pack_embedding(self, parts: Iterable[Tensor], tokens: int, hidden: int) -> Any:
        """Return a matrix [tokens, hidden] as `embed` takes it."""

    def numerics(self, dtype: torch.dtype) -> str:
        """Return what decides the numbers of a forward pass besides the model: equal where they are equal."""
        return self.name

    def pack_tied(self, parts: Iterable[Tensor], tokens: int, hidden: int, bias: Tensor | None) -> Any:
        """Return a tied model's matrix [tokens, hidden] for both `embed` and `logits`; here, what pack_linear makes.

        See pack_linear for `parts` and `bias`.
        """
        return self.pack_linear(parts, tokens, hidden, bias)

    @abstractmethod
    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """Return x [N, in] -> [N, out] = x @ weight.T + bias."""

    @abstractmethod
    def logits(self, x: Tensor, packed: Any) -> Tensor:
        """Return x [R, in] -> [R, V] float32 = x @ weight.T + bias, not rounded to the model's dtype if possible."""

    @abstractmethod
    def batch_sizes(self, dtype: torch.dtype, most: int) -> list[int]:
        """Return the numbers of rows up to `most` that cost time and memory when they are seen first, ascending.

        The worker runs each once before it is ready. Empty where every number of rows is alike.
        """

    @abstractmethod
    def embed(
        self, prepared: PreparedT, table: Any, scale: float = 1.0, position_embeddings: Tensor | None = None
    ) -> Tensor:
        """Return [N, hidden]: each token's row of `table` times scale, plus its position's of `position_embeddings`.

        position_embeddings [positions, hidden] are in the model's dtype.
        """

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of x [N, hidden] -> [N, hidden]."""

    @abstractmethod
    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Add x to residual in place, return norm(residual)."""

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add x to residual in place."""

    @abstractmethod
    def blank(self, prepared: PreparedT, width: int, dtype: torch.dtype) -> Tensor:
        """Return [N, width] of whatever was there."""

    def exchange(self, x: Tensor, call: Callable[[Tensor], object]) -> None:
        """Run call(x) after all earlier operations and before all later ones; it may read and overwrite x.

        The ranks of a replica meet in it; it is also the place of computations that have no operation yet. On a CPU
        `call` may run other operations, at once; on CUDA it may not. Like any operation it is called again with each
        batch, also for a compiled pass.
        """
        call(x)

    def up_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which add_low_rank has the up matrices beside a model of this type."""
        return torch.float32

    def new_rows_by_adapter(self) -> RowsByAdapter:
        """Return what add_low_rank takes."""
        return RowsByAdapter()

    def new_low_rank_pairs(self, shape: LowRankShape) -> LowRankPairs:
        """Return what add_low_rank takes."""
        return LowRankPairs(self, shape)

    @abstractmethod
    def add_low_rank(self, x: Tensor, out: Tensor, pairs: LowRankPairs, rows: RowsByAdapter) -> None:
        """Add up(down(x)) of each row's adapter to out, in place: x [N, in], out [N, out]; other rows keep their bits.

        The products are in float32 and the sum is rounded once.
        """

    @abstractmethod
    def select(self, x: Tensor, prepared: PreparedT) -> Tensor:
        """Return the rows that sample: x [N, width] -> [R, width]."""

    @abstractmethod
    def rope_and_write(
        self, qkv: Tensor, attention: Attention, prepared: PreparedT, cache: CacheT, layer: int
    ) -> Tensor:
        """Norm and rotate q and k as `attention` says and write k and v of every row into its block.

        qkv [N, (heads + 2 kv_heads) * head_dim] in the order q, k, v and may be overwritten. Element i < rotary / 2 is
        paired with i + rotary / 2: (a, b) -> (a cos - b sin, b cos + a sin). Return q [N, heads * head_dim].
        """

    @abstractmethod
    def attention(self, q: Tensor, attention: Attention, prepared: PreparedT, cache: CacheT, layer: int) -> Tensor:
        """Return the paged attention, each row over its sequence's positions up to the row's, or all (`causal`).

        q [N, heads * head_dim] -> [N, heads * head_dim]; query head h reads KV head h // (heads / kv_heads).
        """

    @abstractmethod
    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return [N, 2 I] -> activation(first half) * second half, [N, I]; or what GATED_ACTIVATIONS says of it."""

    @abstractmethod
    def activate(self, x: Tensor, activation: str) -> Tensor:
        """Return [N, I] -> activation(x), perhaps in place. Activations: ACTIVATIONS."""

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(logits / cap), [R, V] float32, perhaps in place."""
        raise ValueError(f"capped logits: the {self.name} backend has no kernels for it")

    def pack_experts(self, gate_up: Sequence[Any], down: Sequence[Any]) -> Any:
        """Return a layer's experts as `experts` takes them, of what pack_linear, pack_groups or stack gave for each.

        gate_up: [2 I, hidden] each; down: [hidden, I]; both of any format and perhaps with biases.
        """
        raise ValueError(f"a mixture of experts: the {self.name} backend has no kernels for it")

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        packed: Any,
        routing: Routing,
        shared: Tensor | None = None,
        shared_logits: Tensor | None = None,
    ) -> Tensor:
        """Return what the experts of each row give, weighted and summed: x [N, hidden] -> [N, hidden].

        logits [N, experts] float32 are the router's. An expert gives down @ act_and_mul(gate_up @ row). The sum is in
        float32, from the largest weight to the smallest, then sigmoid(shared_logits) * shared, and is rounded once.
        shared [N, hidden]; shared_logits [N, 1] float32.
        """
        raise ValueError(f"a mixture of experts: the {self.name} backend has no kernels for it")

    @abstractmethod
    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Sample from logits [R, V] float32, which may be overwritten. See SamplingRows for the meaning."""

    def score(self, logits: Tensor, tokens: Int32, likely: int) -> Scored:
        """Return what tokens[r] has in row r of logits [R, V] float32, which may be overwritten, and others."""
        count = len(tokens)
        ranks = self.ranks(logits, tokens)
        rows = SamplingRows(
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            seed=np.zeros(count, np.uint64),
            position=np.zeros(count, np.int64),
            want_logprob=np.ones(count, np.bool_),
            likely=np.full(count, likely, np.int32) if likely else None,
            # The sampler takes the token itself, and tells its log-probability under the logits without the bias.
            bias=Sparse(np.arange(count), tokens.astype(np.int64), np.full(count, FORCED, np.float32)),
        )
        sampled = self.sample(logits, rows)
        found = sampled.likely
        return Scored(
            logprobs=np.zeros(0, np.float32) if sampled.logprobs is None else sampled.logprobs,
            ranks=ranks,
            status=sampled.status.astype(np.int32),
            ids=np.zeros((count, 0), np.int32) if found is None else found.ids.cpu().numpy(),
            best=np.zeros((count, 0), np.float32) if found is None else found.logprobs.cpu().numpy(),
        )

    def ranks(self, logits: Tensor, tokens: Int32) -> Int32:
        """Return [R] how many ids of row r of logits [R, V] have at least the logit of tokens[r]."""
        return ranks_of(logits, torch.from_numpy(tokens.astype(np.int64))).numpy()

    def sample_later(self, logits: Tensor, rows: SamplingRows, slots: Int32) -> Pending[Sampled]:
        """Sample with results, on the CPU, that may come later; row r's token becomes the last one of slot slots[r].

        A row that is not fine leaves some token of the vocabulary there.
        """
        return Done(self.sample(logits, rows))

    def mark(self) -> Any:
        """Return a point in the device's time, after all that it was given so far."""
        return time.monotonic_ns()

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Return the ns between two marks, when the device has passed the second."""
        return int(end - start)

    def compile(
        self,
        forward: Callable[[Any], Tensor],
        cache: CacheT,
        max_tokens: int,
        max_samples: int,
        least: Callable[[list[int]], list[int]] = list,
    ) -> Callable[[PreparedT], Tensor]:
        """Return a faster `forward`, a function of Prepared made of this backend's operations alone; here, itself.

        `forward` must call the same operations with the same weights whatever the batch holds. The result is called
        with at most max_tokens rows, at most max_samples of which sample; the tensor it returns holds until the next
        call. least: returns the smallest first, second, ... number of all ranks that `exchange` with each other.
        """
        return forward


def ranks_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [R] int32 as Ops.ranks, on the device of both; tokens [R] int64."""
    return (logits >= logits.gather(1, tokens[:, None])).sum(1, dtype=torch.int32)


AnyOps = Ops[Any, Any]
_factories: dict[str, Callable[[torch.device], AnyOps]] = {}


def register(name: str, factory: Callable[[torch.device], AnyOps]) -> None:
    """Make a backend known under a name."""
    _factories[name] = factory


def names() -> list[str]:
    """Return the backends that were registered, sorted."""
    return sorted(_factories)


def create(name: str, device: torch.device) -> AnyOps:
    """Return the backend of that name. Raise KeyError, naming those that exist, for any other."""
    if name not in _factories:
        raise KeyError(f"no kernel backend {name!r}; registered: {', '.join(names())}")
    return _factories[name](device)
