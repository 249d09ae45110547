"""A model in the shape of Llama-8B with random weights: steps of the engine, and transformers' continuous batching."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.engine.cases import Case, Driver, EngineSettings, run, work
from bench.gpu.context import Context
from bench.gpu.kernels import known_peaks
from bench.kernels.shapes import LLAMA_8B, QWEN_600M, TINY, Model
from services.worker.engine import Engine
from services.worker.parallel.state import ParallelState

STEPS = 100
LOOKAHEADS = (0, 1)
CASES = (
    Case("decode-64", 64, 1024),
    Case("decode-8", 8, 1024),
    Case("decode-1", 1, 1024),
    Case("mixed-32-512", 32, 1024, 512, 1),
    Case("prefill-512", 0, 0, 512, 1),
)
SMALL_CASES = (
    Case("small-decode-8", 8, 512),
    Case("small-mixed-8-96", 8, 512, 96, 1),
    Case("small-mixed-32-256", 32, 512, 256, 1),
    Case("small-mixed-32-1024", 32, 512, 1024, 1),
)
QUICK_CASES = (Case("decode-2", 2, 20), Case("mixed-2-20", 2, 20, 20, 1))
SEQUENCES, PROMPT = 64, 1024  # of transformers
TOKENS = (16, 80)  # that transformers generates in two runs: the difference holds no prefill


def engine(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield `models`, and `steps` with a row for each case and lookahead: of a large model and of a small one, in which
    the host's share shows."""
    peaks = known_peaks(context)
    chosen: tuple[tuple[Model, tuple[Case, ...]], ...] = ((LLAMA_8B, CASES), (QWEN_600M, SMALL_CASES))
    steps = 3 if context.quick else STEPS
    for model, cases in ((TINY, QUICK_CASES),) if context.quick else chosen:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(model)))
            begun = time.monotonic()
            made = started(Path(folder), context, cases, steps)
            about = {"dtype": str(made.dtype).removeprefix("torch."), "backend": made.info().backend}
            yield "models", [{**asdict(model), **about, "start_s": round(time.monotonic() - begun, 1)}]
        for case in cases:
            read_bytes, operations = work(made, case, steps)
            floor_us = peaks.floor_us(read_bytes, operations, made.dtype)
            for lookahead in LOOKAHEADS:
                row = timed(made, case, steps, lookahead)
                row |= {"floor_us": floor_us, "of_floor": floor_us / row["step_us"], "read_bytes": read_bytes}
                yield "steps", [row]
        del made  # before the next takes its memory


def config_of(model: Model) -> dict[str, Any]:
    """Return the config.json of a Llama of that shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def timed(engine: Engine, case: Case, steps: int, lookahead: int, adapters: Sequence[bytes] = ()) -> dict[str, Any]:
    """Return medians over `steps` iterations, with `lookahead` further ones in flight. adapters: see Driver."""
    results, walls = run(engine, Driver(engine, case, steps, adapters), steps, lookahead)
    engine.reset()
    timings = [result.timings for result in results[1:]]
    idle, busy = (sum(getattr(one, name) for one in timings) for name in ("idle_ns", "total_ns"))
    return {
        "case": case.name,
        "lookahead": lookahead,
        "step_us": median(walls[1:]) / 1000,
        "forward_us": median(one.forward_ns for one in timings) / 1000,
        "sample_us": median(one.sample_ns for one in timings) / 1000,
        "idle_share": idle / max(1, idle + busy),
    }


def started(
    folder: Path,
    context: Context,
    cases: tuple[Case, ...],
    steps: int,
    adapter_dir: Path | None = None,
    kernels: str = "",
    parallel: ParallelState | None = None,
) -> Engine:
    """Return an engine of the model in a folder, with made-up weights and room for the cases, warmed up.

    kernels: if not the device's own; parallel: which rank it is, if it is one of several.
    """
    tokens = max(max(case.context, case.prefill) for case in cases) + steps + 1
    settings: Any = EngineSettings(  # all that an engine reads of WorkerSettings
        model=folder,
        served_model_name="bench",
        device="cuda" if context.device == "cuda" else "cpu",
        kernels=kernels or context.device,
        dtype="bfloat16",
        load_format="dummy",
        max_seqs=max(case.sequences for case in cases),
        max_step_tokens=64 if context.quick else 8192,
        kv_blocks=max(case.sequences * case.blocks(16, steps) for case in cases) + 1,
        host_blocks=0,
        max_input_tokens=tokens,
        max_output_tokens=tokens,
        adapter_dir=adapter_dir,
    )
    made = Engine(settings, parallel=parallel)
    made.warm_up()
    return made


def continuous_batching(context: Context) -> Iterator[tuple[str, Any]]:
    """Yield step_us at 64 sequences of 1,024 tokens, or `skipped` if transformers is not installed."""
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, __version__
    except ImportError as error:
        yield "skipped", f"transformers cannot be imported: {error}"
        return
    yield "transformers", __version__
    if context.device != "cuda":
        yield "skipped", "it needs a GPU"
        return
    model = TINY if context.quick else LLAMA_8B
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = LlamaForCausalLM(LlamaConfig(**config_of(model))).train(False)
    generator = torch.Generator().manual_seed(20261120)
    prompts = torch.randint(2, model.vocab, (SEQUENCES, PROMPT), generator=generator).tolist()

    def run_s(tokens: int) -> float:
        wanted = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begun = time.perf_counter()
        made.generate_batch(inputs=prompts, generation_config=wanted)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    run_s(2)
    times = [run_s(tokens) for tokens in TOKENS]
    yield "runs_s", times
    yield "step_us", (times[1] - times[0]) / (TOKENS[1] - TOKENS[0]) * 1e6
