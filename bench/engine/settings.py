"""The settings of an engine without the classes that read them from the command line and the environment.

`bench.gpu` runs where pydantic is not. Names and defaults are those of shared.settings.WorkerSettings, which a test
compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class EngineSettings:
    """What `services.worker.engine.Engine` reads."""

    model: Path
    served_model_name: str = ""
    worker_id: str = "worker-0"
    device: str = "auto"
    dtype: str = "auto"
    kernels: str = "auto"
    quantize: str = "none"
    deterministic: bool = False
    load_format: str = "auto"
    block_size: int = 16
    max_seqs: int = 256
    max_input_tokens: int = 0
    max_output_tokens: int = 0
    max_step_tokens: int = 2048
    kv_memory_fraction: float | None = None
    kv_blocks: int = 0
    host_blocks: int | None = None
    worker_role: str = "both"
    kv_share_dir: Path | None = None
    threads: int = 0
    step_timeout_s: float = 0.0
    step_log: Path | None = None
