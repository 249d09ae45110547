"""Processes that encode texts: short texts do not wait for long ones, and a fault of the machine is no text's fault."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.text import tokenizer as module
from shared.text.tokenizer import BoundedTokenizer, EncodersError, TokenizerError, encode, load_tokenizer
from tests.support.checkpoints.tokenizers import write_model
from tests.support.waiting import until

SPLIT = {"type": "Split", "pattern": {"Regex": "[a-z]+x?"}, "behavior": "Isolated", "invert": False}
"""Nothing is known of its time, so that all texts are encoded in processes apart."""
LONG = "abc ab " * 20_000
Load = Callable[[bool], BoundedTokenizer]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return a function that loads a tokenizer with two processes at most; is_ready: it has an unknown expression."""
    monkeypatch.setattr(module, "PROCESSES", 2)
    loaded: list[BoundedTokenizer] = []

    def call(is_ready: bool) -> BoundedTokenizer:
        path = write_model(tmp_path / "model") / "tokenizer.json"
        if is_ready:
            source = json.loads(path.read_text())
            source["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, source["pre_tokenizer"]]}
            path.write_text(json.dumps(source))
        loaded.append(load_tokenizer(path))
        return loaded[-1]

    yield call
    for one in loaded:
        one.encoders.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process hang."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def ids(tokenizer: BoundedTokenizer, text: str) -> list[int]:
    return encode(tokenizer.library, text, None, True)[0]


def begun(tokenizer: BoundedTokenizer) -> int:
    """Return the pid of the one process, which has encoded a text."""
    tokenizer.encode("a")
    return until("it runs", lambda: next(iter(tokenizer.encoders.pids()), 0))


def test_long_texts_leave_a_process_to_short_ones(load: Load, threads: ThreadPoolExecutor) -> None:
    loaded = load(True)
    twin = loaded.change(lambda source: source.update(post_processor=None))
    with contextlib.closing(twin.encoders):
        with stopped(begun(loaded)):
            long = [threads.submit(one.encode, LONG) for one in (loaded, loaded, loaded, twin)]
            until("one has a long text", lambda: loaded.encoders.pids(at_work=True))
            until("a next process is there", lambda: len(loaded.encoders.pids()) == 2)
            assert loaded.encode("hello") == ids(loaded, "hello")
            assert not any(one.done() for one in long) and not twin.encoders.pids()
        for one in long:
            assert one.result(60) == ids(loaded, LONG)


def test_short_text_finds_a_process_that_runs(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, known = load(True), load(False)
    known.encoders.make_ready()
    loaded.encoders.make_ready()
    pids = until("it is started beside this thread", loaded.encoders.pids)
    assert loaded.encode("hello") == ids(loaded, "hello")
    assert pids[0] in loaded.encoders.pids()
    for name, value in {"SECONDS": 0.001, "SECONDS_OF_BYTE": 0.0, "PATIENCE": 60_000}.items():
        monkeypatch.setattr(module, name, value)
    with pytest.raises(TokenizerError, match="send a shorter text") as raised:
        loaded.encode(LONG)
    assert not isinstance(raised.value, EncodersError)
    until("another one is started", loaded.encoders.pids)
    assert not known.encoders.pids() and known.encode("hello") and not known.encoders.pids()


def test_idle_processes_end_but_for_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    known, ready = load(False), load(True)
    for _ in range(2):  # the second text starts the process again
        assert known.encode(LONG) == ids(known, LONG)
        until("the idle one is gone", lambda: not known.encoders.pids())
    pid = begun(ready)
    until("the next one is gone", lambda: ready.encoders.pids() == [pid])


def test_memory_of_a_long_text_goes_back(load: Load) -> None:
    loaded = load(True)
    process = psutil.Process(begun(loaded))
    before = process.memory_info().rss
    loaded.encode("abc ab " * 30_000)
    until("it is back", lambda: process.memory_info().rss < before + (16 << 20))
    assert process.pid in loaded.encoders.pids()


def test_text_is_encoded_again_once_where_the_system_killed(load: Load, threads: ThreadPoolExecutor) -> None:
    loaded = load(False)
    loaded.encode(LONG)
    (pid,) = loaded.encoders.pids()
    with stopped(pid):
        answer = threads.submit(loaded.encode, LONG)
        psutil.Process(pid).kill()
        assert answer.result(60) == ids(loaded, LONG)
    answer = threads.submit(loaded.encode, LONG * 20)
    killed = set[int]()
    while not answer.done():
        for pid in loaded.encoders.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        wait([answer], 0.01)
    with pytest.raises(EncodersError, match="the process that encodes 2800000 bytes died"):
        answer.result()
    assert len(killed) in (2, 3), "the first one may have been killed before it was asked"


def test_closed_encoders_encode_no_more(load: Load, threads: ThreadPoolExecutor) -> None:
    loaded = load(True)
    pid = begun(loaded)
    with stopped(pid):
        answer = threads.submit(loaded.encode, "hello")
        until("it is asked, and a next one is there", lambda: len(loaded.encoders.pids()) == 2)
        loaded.encoders.close()
        with pytest.raises(EncodersError):
            answer.result(60)
    with pytest.raises(EncodersError, match="closed with its model"):
        loaded.encode("hello")
    until("none is left", lambda: not loaded.encoders.pids())


def test_process_that_does_not_start_is_no_fault_of_the_text(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    loaded = load(True)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", fail)
        with pytest.raises(EncodersError, match="no more processes"):
            loaded.encode("hello")
    assert loaded.encode("hello") == ids(loaded, "hello")


def test_hung_process_is_given_up_by_the_time_of_its_text(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "PATIENCE", 10_000)
        loaded = load(True)
    pid = begun(loaded)
    with stopped(pid), monkeypatch.context() as patched:
        patched.setattr(module, "SECONDS", 0.01)
        with pytest.raises(EncodersError, match="gave no answer"):
            loaded.encode("hello")
    assert not psutil.pid_exists(pid) and loaded.encode("hello") == ids(loaded, "hello")
