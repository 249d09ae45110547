"""Step times of a model on a device, from data sheets: the simulator's model of a worker.

`Roofline.step_ns` is called once per simulated step, so it is four products of precomputed floats. A step never gets
shorter with more tokens or more context. `orcinus simulate` and `orcinus fleet` read SHAPES and DEVICES.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1_000_000_000
QUERY_TILE = 128  # queries that share one read of the keys in a flash-attention kernel


@dataclass(slots=True, frozen=True)
class Shape:
    """A decoder as its `config.json` describes it. `gated` means SwiGLU with three matrices, else the MLP has two."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False  # the output projection is the embedding

    @property
    def layer_parameters(self) -> int:
        """Return the number of weights in the linear layers of all decoder layers, without norms and biases
        (below 0.1 %)."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.intermediate * (3 if self.gated else 2)
        return self.layers * (attention + mlp)

    @property
    def read_parameters(self) -> int:
        """Return the number of weights that one step reads: all layers and the output projection.

        Of the embedding a step reads single rows, which are not counted.
        """
        return self.layer_parameters + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of weights in memory."""
        return self.read_parameters + (0 if self.tied else self.vocab * self.hidden)


@dataclass(slots=True, frozen=True)
class Device:
    """Peaks of the public data sheet, and the assumed share of each that a good kernel reaches (see DEVICES)."""

    flops: float  # dense bf16 FLOP/s
    bandwidth: float  # memory, bytes/s
    memory_bytes: int
    link: float  # to the host, bytes/s per direction
    host_bytes: int  # host memory given to swapped blocks (assumed)
    gemm_share: float
    attention_share: float
    bandwidth_share: float
    link_share: float
    step_overhead_ns: float  # assumed: launch, sampling, return of the result
    layer_overhead_ns: float  # assumed: sum of the tails of a layer's kernels


#                     layers hidden heads kv  dim  inter  vocab
SHAPES: dict[str, Shape] = {
    "demo": Shape(4, 256, 4, 2, 64, 688, 4096, tied=True),  # assets/demo-model/config.json
    "gpt2-xl": Shape(48, 1600, 25, 25, 64, 6400, 50257, gated=False, tied=True),  # openai-community/gpt2-xl
    "qwen-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),  # Qwen/Qwen2.5-7B
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32000),  # mistralai/Mistral-7B-v0.1
    "llama-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),  # meta-llama/Meta-Llama-3-8B
    "llama-13b": Shape(40, 5120, 40, 40, 128, 13824, 32000),  # meta-llama/Llama-2-13b-hf
    "llama-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),  # meta-llama/Meta-Llama-3-70B
}

# Peaks: NVIDIA's data sheets of H100 (SXM5), H200 (SXM), A100 (80 GB SXM) and L4, dense figures (half of those "with
# sparsity"), PCIe in one direction. h100x4 is four H100 with tensor parallelism; its smaller shares contain the cost of
# communication (9.8 % for two ranks in one article). cpu-2core: AVX-512 with two FMA units (64 fp32 FLOP a cycle and
# core) at 2.5 GHz, a share of two channels of DDR4-3200; its link is a copy inside that memory.
# Shares: a good GEMM on Hopper reaches 0.7 to 0.8 of the peak, FlashAttention-3 0.4 to 0.6 of it at a head dimension
# of 128, a copy 0.9 of the bandwidth; an A100 moves 25 GB/s of its PCIe 4's 32.
DEVICES: dict[str, Device] = {
    # flops, bandwidth, memory, link, host; shares of gemm, attention, bandwidth, link; overheads of step and layer
    "h100": Device(989.4e12, 3.35e12, 80 * GB, 64e9, 64 * GB, 0.70, 0.45, 0.85, 0.80, 300e3, 6e3),
    "h100x4": Device(3957.6e12, 13.4e12, 320 * GB, 256e9, 256 * GB, 0.58, 0.40, 0.70, 0.80, 400e3, 20e3),
    "h200": Device(989.4e12, 4.8e12, 141 * GB, 64e9, 64 * GB, 0.70, 0.45, 0.85, 0.80, 300e3, 6e3),
    "a100": Device(312e12, 2.039e12, 80 * GB, 32e9, 64 * GB, 0.75, 0.50, 0.85, 0.78, 300e3, 8e3),
    "l4": Device(121e12, 300e9, 24 * GB, 32e9, 32 * GB, 0.60, 0.40, 0.85, 0.78, 300e3, 8e3),
    "cpu-2core": Device(320e9, 25.6e9, 8 * GB, 10e9, 4 * GB, 0.50, 0.25, 0.60, 0.80, 300e3, 30e3),
}


class Roofline:
    """Step times of `shape` on `device`, with `dtype_bytes` for each number of weights and KV.

    shape, device: a value, or a name in SHAPES and DEVICES.

    t = overhead + max(weights / bandwidth, 2 * layer parameters * tokens / FLOP/s)
        + decode_context * KV bytes a token / bandwidth
        + prefill_context * max(4 * heads * head_dim * layers / FLOP/s, KV bytes a token / 128 / bandwidth)

    (Williams, Waterman and Patterson: Roofline, CACM 2009.) The output projection counts as bytes, not as FLOPs: it
    runs for sampled tokens only. Raises KeyError for an unknown name.
    """

    __slots__ = (
        "_context_ns",
        "_fixed_ns",
        "_pair_ns",
        "_token_ns",
        "_weights_ns",
        "device",
        "dtype_bytes",
        "kv_bytes_per_token",
        "shape",
        "swap_bytes_s",
    )

    def __init__(self, shape: Shape | str, device: Device | str, dtype_bytes: int = 2) -> None:
        self.shape = SHAPES[shape] if isinstance(shape, str) else shape
        self.device = DEVICES[device] if isinstance(device, str) else device
        self.dtype_bytes = dtype_bytes
        of, on = self.shape, self.device
        self.kv_bytes_per_token = 2 * of.layers * of.kv_heads * of.head_dim * dtype_bytes
        self.swap_bytes_s = on.link * on.link_share  # per direction
        bytes_ns = on.bandwidth * on.bandwidth_share / 1e9
        self._fixed_ns = on.step_overhead_ns + on.layer_overhead_ns * of.layers
        self._weights_ns = of.read_parameters * dtype_bytes / bytes_ns
        self._token_ns = 2 * of.layer_parameters / (on.flops * on.gemm_share / 1e9)
        self._context_ns = self.kv_bytes_per_token / bytes_ns
        self._pair_ns = max(
            4 * of.heads * of.head_dim * of.layers / (on.flops * on.attention_share / 1e9),
            self.kv_bytes_per_token / QUERY_TILE / bytes_ns,
        )

    def step_ns(self, tokens: int, decode_context: float, prefill_context: float) -> float:
        """Return the time of one step in ns.

        tokens: of all sequences, decodes included. decode_context: sum of the context lengths of the decodes.
        prefill_context: sum over chunks of length * (start + (length + 1) / 2), the pairs of query and key.
        """
        linear = tokens * self._token_ns
        if linear < self._weights_ns:
            linear = self._weights_ns
        return self._fixed_ns + linear + decode_context * self._context_ns + prefill_context * self._pair_ns

    def kv_blocks(self, block_size: int, memory_fraction: float = 0.9) -> int:
        """Return how many blocks of `block_size` tokens fit beside the weights. Raises ValueError if none fits."""
        free = self.device.memory_bytes * memory_fraction - self.shape.parameters * self.dtype_bytes
        blocks = int(free // (block_size * self.kv_bytes_per_token))
        if blocks < 1:
            raise ValueError(
                f"{self.shape.parameters * self.dtype_bytes / 1e9:.1f} GB of weights leave no room for a KV block in "
                f"{memory_fraction:.0%} of {self.device.memory_bytes / 1e9:.0f} GB; take a larger device"
            )
        return blocks

    def host_blocks(self, block_size: int, host_bytes: int | None = None) -> int:
        """Return how many blocks fit in `host_bytes` of host memory; None uses the figure of the device."""
        given = self.device.host_bytes if host_bytes is None else host_bytes
        return given // (block_size * self.kv_bytes_per_token)
