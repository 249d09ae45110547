"""The emulated device: what it puts off, in which orders, and that missing waits show on it."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import Tensor

from kernels.cuda import calls, loader
from kernels.cuda.calls import BF16, Call
from kernels.cuda.device import Device
from kernels.emulator import device as emulated
from kernels.emulator.device import EmulatedDevice
from kernels.emulator.program import EmulatorError
from tests.kernels.cuda.programs import DEVICE, GPU, device_of
from tests.support.compiler import needs_compiler

LAZY = 3
"""A seed that puts off all that it can."""

orders = pytest.mark.parametrize("order", [None, *range(4), *([DEVICE] if GPU else [])])


def ones(device: Device, *shape: int) -> Tensor:
    made = device.empty(shape, torch.bfloat16)
    device.main.run(lambda: made.fill_(1))
    return made


def add(x: Tensor, residual: Tensor) -> Call:
    return calls.add(BF16, *x.shape, x.data_ptr(), residual.data_ptr())


def test_without_a_seed_all_is_done_at_once() -> None:
    device, seen = EmulatedDevice(), []
    device.main.run(lambda: seen.append("main"))
    device.copies.run(lambda: seen.append("copies"))
    assert seen == ["main", "copies"] and device.main.record().done()


def test_with_a_seed_work_is_put_off_until_it_is_waited_for() -> None:
    device, seen = EmulatedDevice(LAZY), []
    device.main.run(lambda: seen.append(1))
    event = device.main.record()
    device.main.run(lambda: seen.append(2))
    assert seen == []
    event.wait()
    assert seen == [1]
    device.close()
    assert seen == [1, 2]


def test_asking_often_enough_shows_the_end() -> None:
    device = EmulatedDevice(LAZY)
    for _ in range(20):
        device.main.run(lambda: None)
    event = device.main.record()
    asked = [event.done() for _ in range(400)]
    assert asked[-1] and asked == sorted(asked) and not asked[0]


def interleaving(seed: int, wait: bool) -> str:
    """m and c of each stream's ten pieces of work as they were done; wait: copies begins after main's fifth."""
    device, done = EmulatedDevice(seed), []
    for number in range(10):
        device.main.run(lambda: done.append("m"))
        if number == 4 and wait:
            device.copies.wait_for(device.main.record())
    for _ in range(10):
        device.copies.run(lambda: done.append("c"))
    for stream in (device.main, device.copies):
        stream.record().wait()
    assert done.count("m") == done.count("c") == 10
    return "".join(done)


def test_streams_run_in_any_order_beside_each_other() -> None:
    found = {interleaving(seed, wait=False) for seed in range(40)}
    assert "m" * 10 + "c" * 10 in found and any(order.startswith("c" * 10) for order in found)
    assert any("cm" in order and "mc" in order for order in found), "and both by turns"


def test_a_stream_that_waits_for_an_event_begins_behind_it() -> None:
    found = [interleaving(seed, wait=True) for seed in range(40)]
    assert all(order.startswith("mmmmm") for order in found)
    assert any(order.startswith("mmmmmc") for order in found), "and not behind all of the other stream"


@pytest.mark.parametrize("order", [None, LAZY])
def test_memory_is_garbage_before_it_is_written(order: int | None) -> None:
    device = EmulatedDevice(order)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert device.empty((3, 5), dtype).isnan().all()
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert (device.empty((3,), dtype) > torch.iinfo(dtype).max * 0.99).all()
    assert device.empty((7,), torch.uint8).shape == (7,) and device.empty((0, 4), torch.int32).numel() == 0
    assert all(device.empty((size,), torch.uint8).data_ptr() % 256 == 0 for size in (1, 100, 1000))
    assert (device.pinned((2, 3), torch.float32) == 0).all()


@needs_compiler
@pytest.mark.parametrize("touched", [True, False])
def test_tensor_that_kernel_touches_is_kept_until_it_has_run(touched: bool) -> None:
    device = EmulatedDevice(LAZY)
    x, residual = ones(device, 1, 64), ones(device, 1, 64)
    device.main.record().wait()
    device.main.launch(add(x, residual), *([x] if touched else []))
    del x
    device.close()
    assert residual.isnan().all() != touched
    assert not touched or (residual == 2).all()


@needs_compiler
@orders
def test_a_launch_has_the_numbers_of_when_it_was_given(order: int | None) -> None:
    device = device_of(order)
    x, residual = ones(device, 2, 64), ones(device, 2, 64)
    call = add(x, residual)
    device.main.launch(call, x, residual)
    call.params["x"] = 0
    device.close()
    assert (residual == 2).all()


@needs_compiler
def test_a_kernel_that_no_source_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "sources", lambda: [loader.SOURCES / "activations.cu"])
    with pytest.raises(KeyError, match="has a kernel 'nothing'"):
        EmulatedDevice(LAZY).main.launch(calls.add(BF16, 1, 8, 0, 0)._replace(name="nothing"))


@needs_compiler
def test_error_of_deferred_work_is_raised_once_at_the_wait() -> None:
    device = EmulatedDevice(LAZY)
    x, residual = ones(device, 1, 64), ones(device, 1, 64)
    device.main.launch(add(x, residual)._replace(shared=1 << 20))
    device.main.launch(add(x, residual))
    event = device.main.record()
    with pytest.raises(EmulatorError, match=r"stream main, add_bf16: .*1048576"):
        event.wait()
    event.wait()
    assert event.done() and (residual == 2).all()


def test_error_of_torch_is_named_after_function_that_was_given() -> None:
    device = EmulatedDevice(LAZY)

    def wrong_sizes() -> None:
        torch.add(torch.ones(2), torch.ones(3))

    device.copies.run(wrong_sizes)
    with pytest.raises(EmulatorError, match=r"stream copies, .*wrong_sizes: The size of tensor a"):
        device.close()


@needs_compiler
@orders
def test_a_recording_repeats_what_was_given(order: int | None) -> None:
    device = device_of(order)
    x, total = ones(device, 1, 64), ones(device, 1, 64)
    call = add(x, total)

    def work() -> None:
        device.main.launch(call, x, total)
        device.main.run(lambda: total.mul_(2))

    replay = device.capture(work)
    call.params["x"] = 0
    device.close()
    assert (total == 1).all(), "a recording does nothing by itself"
    replay()
    device.main.run(lambda: x.fill_(3))
    replay()
    device.close()
    assert (total == ((1 + 1) * 2 + 3) * 2).all()


@pytest.mark.parametrize("order", [None, *range(4)])
def test_calls_come_between_the_parts_of_a_recording(order: int | None) -> None:
    device = EmulatedDevice(order)
    total, read = device.empty((4,), torch.float32), []

    def work() -> None:
        inside = device.empty((4,), torch.float32)
        device.main.run(lambda: inside.fill_(3))

        def call() -> None:
            device.main.record().wait()
            read.append(float(inside[0]))
            device.main.run(lambda: inside.add_(len(read)))

        device.cut(call)
        device.main.run(lambda: total.copy_(inside))

    replay = device.capture(work)
    assert not read and not device.is_recording
    for expected in (4.0, 5.0):
        replay()
        device.main.record().wait()
        assert (total == expected).all()
    assert read == [3.0, 3.0]
    with pytest.raises(EmulatorError, match="cut where there is none"):
        device.cut(lambda: None)
    device.close()


@pytest.mark.parametrize("order", [None, *range(4)])
def test_recordings_share_their_memory(order: int | None) -> None:
    device = EmulatedDevice(order)
    results = []

    def work() -> None:
        result = device.empty((4,), torch.float32)
        device.main.run(lambda: result.fill_(1))
        results.append(result)

    replays = [device.capture(work), device.capture(work)]
    replays[0]()
    device.close()
    assert (results[0] == 1).all()
    replays[1]()
    device.close()
    assert (results[1] == 1).all() and results[0].isnan().all()


def test_nothing_is_waited_for_in_a_recording() -> None:
    device = EmulatedDevice(LAZY)
    event = device.main.record()
    for what in (device.main.record, event.wait, event.done, lambda: device.main.wait_for(event)):
        with pytest.raises(EmulatorError, match="in a recording"):
            device.capture(what)
    with pytest.raises(EmulatorError, match="given to copies in a recording"):
        device.capture(lambda: device.copies.run(lambda: None))
    event.wait()


def test_only_one_piece_of_one_type_is_copied() -> None:
    device = EmulatedDevice(LAZY)
    target = device.empty((4, 4), torch.float32)
    for source in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4).T):
        with pytest.raises(ValueError, match="a copy of"):
            device.main.copy(target, source)


def test_host_memory_that_is_not_pinned_is_not_copied() -> None:
    device = EmulatedDevice(LAZY)
    here, there = device.pinned((4, 4), torch.float32), device.empty((4, 4), torch.float32)
    device.main.copy(there[1:3], here.view(2, 8)[0].view(2, 4))
    for pair in ((there, torch.zeros(4, 4)), (torch.zeros(4, 4), there), (here.clone(), there)):
        with pytest.raises(ValueError, match="host memory that is not pinned"):
            device.main.copy(*pair)
    device.close()
    assert (there[1:3] == 0).all() and there[0].isnan().all()


@orders
def test_pinned_memory_of_some_megabytes_goes_to_device_and_back(order: int | None) -> None:
    device = device_of(order)
    sent, read = (device.pinned((3, 1 << 18), torch.float32) for _ in range(2))
    there = device.empty((3, 1 << 18), torch.float32)
    sent.copy_(torch.arange(sent.numel()).view(sent.shape))
    device.copies.wait_for(device.main.record())
    device.copies.copy(there, sent)
    device.main.wait_for(device.copies.record())
    device.main.run(lambda: there.neg_())
    device.main.copy(read, there)
    device.main.record().wait()
    assert torch.equal(read, -sent)


def test_time_passes_between_events() -> None:
    device = EmulatedDevice(LAZY)
    start, end = device.main.record(), device.main.record()
    with pytest.raises(EmulatorError, match="not passed yet"):
        device.elapsed_ns(start, end)
    end.wait()
    assert device.elapsed_ns(start, end) > 0


def test_memory_is_counted_and_bounded() -> None:
    device = EmulatedDevice(memory_bytes=1000)
    kept, other = device.empty((100,), torch.int32), device.empty((300,), torch.uint8)
    assert device.free_bytes() == (300, 1000)
    view = other[7:]
    del other
    assert device.free_bytes() == (300, 1000), "a view holds its memory"
    del view
    assert device.free_bytes() == (600, 1000) and device.peak_bytes(reset=True) == 700
    assert device.peak_bytes() == 400 and kept.numel() == 100
    with pytest.raises(torch.OutOfMemoryError, match="601 bytes are asked for, 600 of 1000 are free"):
        device.empty((601,), torch.uint8)


@pytest.mark.parametrize("order", range(3))
def test_one_thread_gives_work_while_another_waits(order: int) -> None:
    device = EmulatedDevice(order)
    numbers = device.empty((1,), torch.int64)
    device.main.run(lambda: numbers.fill_(0))
    given: list[tuple[emulated.EmulatedEvent, Tensor]] = []
    ready, found = threading.Semaphore(0), []

    def collect() -> None:
        for number in range(200):
            assert ready.acquire(timeout=60)
            event, result = given[number]
            event.wait()
            found.append(int(result))

    thread = threading.Thread(target=collect)
    thread.start()
    for _ in range(200):
        result = device.pinned((1,), torch.int64)
        device.main.run(lambda: numbers.add_(1))
        device.main.copy(result, numbers)
        given.append((device.main.record(), result))
        ready.release()
    thread.join(60)
    assert found == list(range(1, 201))


def test_tensors_of_inference_mode_are_written_by_any_wait() -> None:
    device = EmulatedDevice(LAZY)
    with torch.inference_mode():
        made = ones(device, 4)
        source = device.pinned((4,), torch.bfloat16)
        device.main.copy(made, source)
    device.close()
    assert (made == 0).all()


def test_waiting_threads_do_one_piece_of_work_at_a_time() -> None:
    device, count = EmulatedDevice(LAZY), [0]

    def work() -> None:
        before = count[0]
        sum(range(100))
        count[0] = before + 1

    for _ in range(3000):
        device.main.run(work)
    event, failed = device.main.record(), []

    def wait() -> None:
        try:
            event.wait()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert count == [3000] and failed == []
