"""The compared servers in every precision: command lines, and fields of their requests.

Pure, but for the environment that programs inherit. A server belongs to the class it declares; whether one of the
exact class keeps its place is decided by its answers (`bench/peers/table.py`). Called by `bench/peers/run.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import install

SLOTS = 32
CONTEXT = 2048
OURS = "orcinus"
SHORT_GAPS = "orcinus:tokens=model-30"  # steps of 30 ms instead of 100: other servers' steps are bounded too
EXACT, REDUCED, INT8 = "exact", "reduced", "int8"
CLASSES = {
    EXACT: "float32, the same greedy answers as transformers in float32",
    REDUCED: "16-bit arithmetic or weights",
    INT8: "8-bit weights",
}


@dataclass(frozen=True, slots=True)
class Server:
    """One row of the table. `command(port, scratch)` is its command line; `recipe` what must be installed."""

    name: str
    peer: str
    precision: str
    about: str
    recipe: str
    command: Callable[[int, Path], list[str]]
    model: str = "model"
    start_s: float = 120.0
    concurrency: tuple[int, ...] = (1, 8, 32)
    with_mix: bool = True
    env: dict[str, str] = field(default_factory=dict)


def orcinus(dtype: str, policy: str = "orcinus") -> Callable[[int, Path], list[str]]:
    """Return the command of the stack: Redis, gateway, scheduler, worker, started as by a user."""

    def command(port: int, scratch: Path) -> list[str]:
        words = [sys.executable, "-m", "services.cli", "up", "--stop-with-parent", "--model", str(install.MODEL)]
        words += ["--served-model-name", "model", "--port", str(port), "--run-dir", str(scratch / "run")]
        words += ["--device", "cpu", "--dtype", dtype, "--policy", policy]
        return [*words, "--prefix-cache", "off", "--log-level", "warning"]

    return command


def vllm(dtype: str) -> Callable[[int, Path], list[str]]:
    def command(port: int, _scratch: Path) -> list[str]:
        words = [str(install.python_of("vllm").parent / "vllm"), "serve", str(install.MODEL), "--dtype", dtype]
        words += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(2 * SLOTS)]
        return [*words, "--no-enable-prefix-caching", "--generation-config", "vllm"]

    return command


def openvino(precision: str) -> Callable[[int, Path], list[str]]:
    def command(port: int, _scratch: Path) -> list[str]:
        front = str(install.HERE / "openvino_front.py")
        tokenizer = str(install.MODEL / "tokenizer.json")
        return [str(install.python_of("openvino")), front, str(install.OPENVINO_MODEL), tokenizer, str(port), precision]

    return command


def llama(weights: str, *more: str) -> Callable[[int, Path], list[str]]:
    """Return the command of llama.cpp. All slots share `-c`; prompts are not cached between requests."""

    def command(port: int, _scratch: Path) -> list[str]:
        words = [
            str(install.LLAMA_SERVER),
            "-m",
            str(install.GGUF[weights]),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        words += ["-a", "model", "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-cb", "--no-cache-prompt"]
        return [*words, *more]

    return command


def transformers(dtype: str, batching: bool) -> Callable[[int, Path], list[str]]:
    """Return the command of transformers, with a bounded cache: its default takes a large share of memory."""

    def command(port: int, _scratch: Path) -> list[str]:
        words = [str(install.python_of("transformers").parent / "transformers"), "serve", str(install.MODEL)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", dtype]
        if batching:
            words += ["--continuous-batching", "--attn-implementation", "sdpa", "--cb-num-blocks", "1024"]
            words += ["--cb-block-size", "32", "--cb-max-batch-tokens", "512"]
        return words

    return command


# Both cores compute: by default one is kept for the front, which costs a third of the throughput on two.
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(1, (os.cpu_count() or 2) - 1)}",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

SERVERS = (
    Server("openvino f32", "openvino", EXACT, "compute and KV in f32", "openvino", openvino("f32")),
    Server("vllm float32", "vllm", EXACT, "both cores", "vllm", vllm("float32"), env=VLLM_ENV, start_s=300),
    Server(
        "llama.cpp F32",
        "llama.cpp",
        EXACT,
        "KV in f32, no flash attention",
        "llama",
        llama("f32", "-ctk", "f32", "-ctv", "f32", "-fa", "off"),
    ),
    Server(
        "transformers CB float32",
        "transformers",
        EXACT,
        "serve --continuous-batching, sdpa",
        "transformers",
        transformers("float32", True),
        model=str(install.MODEL),
    ),
    Server(
        "transformers serve float32",
        "transformers",
        EXACT,
        "serve, one request at a time",
        "transformers",
        transformers("float32", False),
        model=str(install.MODEL),
        concurrency=(1,),
        with_mix=False,
    ),
    Server("orcinus float32", OURS, EXACT, "the whole stack", "model", orcinus("float32")),
    Server(
        "orcinus float32, TBT 30 ms", OURS, EXACT, f"--policy {SHORT_GAPS}", "model", orcinus("float32", SHORT_GAPS)
    ),
    Server("openvino default", "openvino", REDUCED, "its own choice of precision", "openvino", openvino("default")),
    Server("vllm bfloat16", "vllm", REDUCED, "both cores", "vllm", vllm("bfloat16"), env=VLLM_ENV, start_s=300),
    Server("llama.cpp F16", "llama.cpp", REDUCED, "F16 weights, its default KV", "llama", llama("f16")),
    Server(
        "transformers CB bfloat16",
        "transformers",
        REDUCED,
        "serve --continuous-batching, sdpa",
        "transformers",
        transformers("bfloat16", True),
        model=str(install.MODEL),
    ),
    Server("orcinus bfloat16", OURS, REDUCED, "the whole stack", "model", orcinus("bfloat16")),
    Server(
        "orcinus bfloat16, TBT 30 ms", OURS, REDUCED, f"--policy {SHORT_GAPS}", "model", orcinus("bfloat16", SHORT_GAPS)
    ),
    Server("llama.cpp Q8_0", "llama.cpp", INT8, "Q8_0 weights, its default KV", "llama", llama("q8_0")),
)


def chosen(peers: list[str], classes: list[str]) -> list[Server]:
    """Return the servers of these peers and classes, and ours; empty means all. Raises KeyError for an unknown name."""
    known = {server.peer for server in SERVERS}
    for name in peers:
        if name not in known:
            raise KeyError(name)
    return [
        server
        for server in SERVERS
        if (not peers or server.peer in (*peers, OURS)) and (not classes or server.precision in classes)
    ]


def environment(server: Server) -> dict[str, str]:
    """Return the environment of the program: without our variables, and without downloads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORCINUS_", "OMP_", "VLLM_"))}
    kept.pop("PYTHONPATH", None)
    return {**kept, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **server.env}


def request(server: Server, prompt: str, tokens: int, stream: bool) -> dict[str, Any]:
    """Return the body of one greedy completion of exactly `tokens` tokens in this server's dialect."""
    fields: dict[str, Any] = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    fields["stream"] = stream
    if server.peer == "transformers":
        # It refuses fields that it does not know, counts usage unasked, and takes the rest as JSON in a string.
        fields["generation_config"] = f'{{"eos_token_id": -1, "do_sample": false, "max_new_tokens": {tokens}}}'
        return fields
    fields["ignore_eos"] = True
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if server.peer == "llama.cpp":
        fields["cache_prompt"] = False
    return fields
