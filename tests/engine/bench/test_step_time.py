"""The steps that the study of step times draws are such as the engine takes, and both clocks see them."""

from __future__ import annotations

from bench.studies.step_time import DECODES, PROMPT, run
from shared.settings import DEMO_MODEL
from tests.engine.driver import make_engine


def test_engine_takes_the_steps_of_the_study() -> None:
    engine = make_engine(
        DEMO_MODEL, block_size=16, max_seqs=DECODES + 1, max_step_tokens=DECODES + PROMPT, kv_blocks=4160
    )
    seen = run(engine, 1, 300)
    assert all(one.measured_ns > 0 for rows in seen.values() for one in rows)
    assert {bool(one.prompt_tokens) for one in seen["cpu"]} == {True, False}
