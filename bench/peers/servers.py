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
EXACT, REDUCED, INT8, INT4 = "exact", "reduced", "int8", "int4"
CLASSES = {
    EXACT: "float32, the same greedy answers as transformers in float32",
    REDUCED: "16-bit arithmetic or weights",
    INT8: "8-bit weights",
    INT4: "4-bit weights",
}


Command = Callable[[str, int, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Server:
    """One row of the table. `command(model, port, scratch)` is its command line for a model of `bench/peers/model.py`.

    `recipe` and the files of the model of the kind `files` must be there.
    """

    name: str
    peer: str
    precision: str
    about: str
    recipe: str
    files: str
    command: Command
    start_s: float = 120.0
    env: dict[str, str] = field(default_factory=dict)

    def recipes(self, model: str) -> list[str]:
        """Return what must be installed to serve the model of this name."""
        return [name for name in (self.recipe, model + self.files) if name]


def orcinus(dtype: str, policy: str = "orcinus", gguf: str = "") -> Command:
    """Return the command of the stack: Redis, gateway, scheduler, worker, started as by a user."""

    def command(model: str, port: int, scratch: Path) -> list[str]:
        source = install.gguf(model, gguf) if gguf else install.MODELS / model
        words = [sys.executable, "-m", "services.cli", "up", "--stop-with-parent", "--model", str(source)]
        words += ["--served-model-name", "model", "--port", str(port), "--run-dir", str(scratch / "run")]
        words += ["--device", "cpu", "--dtype", dtype, "--policy", policy]
        return [*words, "--prefix-cache", "off", "--log-level", "warning"]

    return command


def vllm(dtype: str) -> Command:
    def command(model: str, port: int, _scratch: Path) -> list[str]:
        words = [str(install.python_of("vllm").parent / "vllm"), "serve", str(install.MODELS / model), "--dtype", dtype]
        words += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(2 * SLOTS)]
        return [*words, "--no-enable-prefix-caching", "--generation-config", "vllm"]

    return command


def openvino(precision: str, width: str = "fp32") -> Command:
    def command(model: str, port: int, _scratch: Path) -> list[str]:
        folder, tokenizer = install.openvino_model(model, width), install.MODELS / model / "tokenizer.json"
        words = [install.python_of("openvino"), install.HERE / "openvino_front.py", folder, tokenizer, port, precision]
        return [str(word) for word in words]

    return command


def llama(weights: str, *more: str) -> Command:
    """Return the command of llama.cpp. All slots share `-c`; prompts are not cached between requests."""

    def command(model: str, port: int, _scratch: Path) -> list[str]:
        words = [str(install.LLAMA_SERVER), "-m", str(install.gguf(model, weights)), "--port", str(port)]
        words += ["--host", "127.0.0.1"]
        words += ["-a", "model", "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-cb", "--no-cache-prompt"]
        return [*words, *more]

    return command


# Both cores compute: by default one is kept for the front, which costs a third of the throughput on two.
VLLM_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{max(1, (os.cpu_count() or 2) - 1)}",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

SERVERS = (
    Server("openvino f32", "openvino", EXACT, "compute and KV in f32", "openvino", "-openvino", openvino("f32")),
    Server("vllm float32", "vllm", EXACT, "both cores", "vllm", "", vllm("float32"), 300, VLLM_ENV),
    Server(
        "llama.cpp F32",
        "llama.cpp",
        EXACT,
        "KV in f32, no flash attention",
        "llama",
        "-gguf",
        llama("f32", "-ctk", "f32", "-ctv", "f32", "-fa", "off"),
    ),
    Server("orcinus float32", OURS, EXACT, "the whole stack", "", "", orcinus("float32")),
    Server("orcinus float32, TBT 30 ms", OURS, EXACT, f"--policy {SHORT_GAPS}", "", "", orcinus("float32", SHORT_GAPS)),
    Server(
        "openvino default",
        "openvino",
        REDUCED,
        "its own choice of precision",
        "openvino",
        "-openvino",
        openvino("default"),
    ),
    Server("vllm bfloat16", "vllm", REDUCED, "both cores", "vllm", "", vllm("bfloat16"), 300, VLLM_ENV),
    Server("llama.cpp F16", "llama.cpp", REDUCED, "F16 weights, its default KV", "llama", "-gguf", llama("f16")),
    Server("orcinus bfloat16", OURS, REDUCED, "the whole stack", "", "", orcinus("bfloat16")),
    Server(
        "orcinus bfloat16, TBT 30 ms", OURS, REDUCED, f"--policy {SHORT_GAPS}", "", "", orcinus("bfloat16", SHORT_GAPS)
    ),
    Server(
        "openvino int8",
        "openvino",
        INT8,
        "weights of its exporter, the rest its own choice",
        "openvino",
        "-openvino",
        openvino("default", "int8"),
    ),
    Server("llama.cpp Q8_0", "llama.cpp", INT8, "Q8_0 file, its default KV", "llama", "-gguf", llama("q8_0")),
    Server("orcinus Q8_0", OURS, INT8, "the same file, bfloat16", "", "-gguf", orcinus("bfloat16", gguf="q8_0")),
    Server(
        "openvino int4",
        "openvino",
        INT4,
        "weights of its exporter, the rest its own choice",
        "openvino",
        "-openvino",
        openvino("default", "int4"),
    ),
    Server("llama.cpp Q4_0", "llama.cpp", INT4, "Q4_0 file, its default KV", "llama", "-gguf", llama("q4_0")),
    Server("orcinus Q4_0", OURS, INT4, "the same file, bfloat16", "", "-gguf", orcinus("bfloat16", gguf="q4_0")),
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
    fields: dict[str, Any] = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}
    fields["stream"] = stream
    fields["ignore_eos"] = True
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if server.peer == "llama.cpp":
        fields["cache_prompt"] = False
    return fields
