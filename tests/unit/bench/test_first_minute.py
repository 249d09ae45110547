"""The recorder of the first minute: the times that it judges, and the settings of pip that a container gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.studies.first_minute import Start, pip_settings


@pytest.mark.parametrize(
    ("times", "answer_s", "silence"), [([1.0, 3.0, 4.0], 0.5, 2.0), ([6.0, 7.0], 0.5, 6.0), ([1.0, 2.0], 7.5, 7.5)]
)
def test_silence_counts_from_the_command_to_the_answer(times: list[float], answer_s: float, silence: float) -> None:
    assert Start([(at, "a line") for at in times], "{}", answer_s).silence == silence


def test_container_gets_the_settings_of_pip_and_what_they_name(tmp_path: Path) -> None:
    wheels, bundle = tmp_path / "wheels", tmp_path / "ca.crt"
    wheels.mkdir()
    bundle.touch()
    mounts, env = pip_settings(
        {"PIP_FIND_LINKS": f"{wheels} https://links.invalid", "PIP_CERT": str(bundle), "PIP_RETRIES": "3", "HOME": "/"}
    )
    assert mounts.keys() >= {str(wheels), str(bundle)}
    assert env["PIP_FIND_LINKS"] == f"{mounts[str(wheels)]} https://links.invalid"
    assert env["PIP_CERT"] == mounts[str(bundle)] != str(bundle)
    assert env["PIP_RETRIES"] == "3" and env["PIP_NO_CACHE_DIR"] == "1" and "HOME" not in env
