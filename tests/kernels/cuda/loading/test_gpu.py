"""CudaDevice asks torch and CuPy for the right things. Both are replaced: no GPU can be had here."""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call, create_autospec

import pytest
import torch

from kernels.cuda import calls, gpu, loader
from kernels.cuda.gpu import CudaDevice, CudaError

CALL = calls.add(calls.BF16, 1, 8, 0, 0)


class Torch:
    """torch with a GPU: torch.cuda has the signatures of the real one and only notes what it is asked."""

    version = SimpleNamespace(cuda="13.0")
    __version__ = "2.0"
    device = torch.device
    from_numpy = staticmethod(torch.from_numpy)

    def __init__(self) -> None:
        self.cuda = create_autospec(torch.cuda)
        self.cuda.device_count.return_value = 1
        self.cuda.get_device_capability.return_value = (9, 0)
        self.cuda.get_device_name.return_value = "a GPU"
        self.cuda.get_device_properties.return_value = SimpleNamespace(multi_processor_count=132)
        self.cuda.Stream.side_effect = [
            SimpleNamespace(cuda_stream=number, wait_event=MagicMock()) for number in (7, 8)
        ]
        self.cuda.graph_pool_handle.return_value = (0, 1)
        self.cuda.cudart.return_value.cudaError.success = 0
        self.cuda.cudart.return_value.cudaHostRegister.return_value = 0
        self.pinned: list[tuple[int, ...]] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        return torch.empty(shape, dtype=dtype)

    def zeros(self, shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        self.pinned.append(shape)
        return torch.zeros(shape, dtype=dtype)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(gpu, "torch", made)
    monkeypatch.setattr(gpu, "cuda", made.cuda)
    monkeypatch.setattr(gpu, "entered", threading.local())
    monkeypatch.setattr(loader, "Program", lambda source: MagicMock(kernels=(f"{source.stem}_kernel", "add_bf16")))
    monkeypatch.setitem(__import__("sys").modules, "cupy", SimpleNamespace())
    return made


def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refusing(name: str, *rest: Any) -> Any:
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refusing)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda made: setattr(made, "version", SimpleNamespace(cuda=None)), "a build without CUDA; run make install"),
        (
            lambda made: setattr(made.cuda.init, "side_effect", RuntimeError("driver too old")),
            "driver too old; run `orcinus doctor`",
        ),
        (lambda made: setattr(made.cuda.device_count, "return_value", 0), "GPU 0 is asked for, 0 are here"),
        (lambda made: setattr(made.cuda.get_device_capability, "return_value", (7, 5)), r"capability 7\.5.*need 8\.0"),
    ],
)
def test_gpu_that_cannot_be_used_is_refused_with_a_remedy(
    fake: Torch, broken: Callable[[Torch], None], message: str
) -> None:
    broken(fake)
    with pytest.raises(CudaError, match=message):
        CudaDevice()


def test_a_missing_cupy_is_named(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    without_cupy(monkeypatch)
    with pytest.raises(CudaError, match=r"CuPy is not installed \(.*\); run make install DEVICE=cuda"):
        CudaDevice()


def test_kernels_are_loaded_at_start_and_use_the_calls_stream(fake: Torch) -> None:
    device = CudaDevice()
    assert {f"{source.stem}_kernel" for source in loader.sources()} < device.programs.keys()
    device.main.launch(CALL)
    device.copies.launch(CALL)
    assert device.programs["add_bf16"].launch.mock_calls == [call(*CALL, 7), call(*CALL, 8)]
    with pytest.raises(KeyError, match="nothing"):
        device.main.launch(CALL._replace(name="nothing"))
    assert (device.name, device.processors, device.has_wgmma) == ("a GPU", 132, True)


def test_kernels_of_another_architecture_are_left_out(fake: Torch) -> None:
    fake.cuda.get_device_capability.return_value = (12, 0)
    device = CudaDevice()
    assert not device.has_wgmma
    assert {name for name in device.programs if "sm90" in name} == set()
    assert {f"{source.stem}_kernel" for source in loader.sources("sm_120")} < device.programs.keys()


def test_main_is_made_the_current_stream_once_in_each_thread(fake: Torch) -> None:
    device = CudaDevice()
    assert not fake.cuda.set_stream.called, "a caller that only asks for its memory goes on as before"
    for _ in range(3):
        device.main.launch(CALL)
        device.empty((2,), torch.int32)
    thread = threading.Thread(target=lambda: [device.main.run(lambda: None) for _ in range(3)])
    thread.start()
    thread.join()
    assert fake.cuda.set_stream.mock_calls == [call(device.main.stream)] * 2
    assert fake.cuda.set_device.mock_calls[-2:] == [call(torch.device("cuda", 0))] * 2


def test_second_device_of_a_thread_takes_and_returns_its_stream(fake: Torch) -> None:
    first = CudaDevice()
    first.main.run(lambda: None)
    fake.cuda.Stream.side_effect = [SimpleNamespace(cuda_stream=number) for number in (9, 10)]
    second = CudaDevice()
    second.main.run(lambda: None)
    first.main.run(lambda: None)
    streams = [made.args[0] for made in fake.cuda.set_stream.mock_calls]
    assert streams == [first.main.stream, second.main.stream, first.main.stream]


def test_only_work_on_copies_switches_streams(fake: Torch) -> None:
    device, within = CudaDevice(), []
    device.main.run(lambda: within.append(fake.cuda.stream.return_value.__enter__.called))
    device.copies.run(lambda: within.append(fake.cuda.stream.return_value.__enter__.called))
    assert within == [False, True] and fake.cuda.stream.mock_calls[0] == call(device.copies.stream)


def test_memory_of_main_that_copies_uses_is_held(fake: Torch) -> None:
    device = CudaDevice()
    target, source, host = (MagicMock(is_cuda=on_gpu) for on_gpu in (True, True, False))
    device.main.copy(target, source)
    assert target.copy_.mock_calls == [call(source, non_blocking=True)] and not target.record_stream.called
    device.copies.copy(target, host)
    device.copies.launch(CALL, source)
    assert target.record_stream.mock_calls == source.record_stream.mock_calls == [call(device.copies.stream)]
    assert not host.record_stream.called


def test_events_are_recorded_waited_for_and_timed(fake: Torch) -> None:
    events = [MagicMock() for _ in range(2)]
    fake.cuda.Event.side_effect = events
    device = CudaDevice()
    start, end = device.main.record(), device.copies.record()
    assert fake.cuda.Event.mock_calls == [call(enable_timing=True, blocking=True)] * 2
    assert events[0].record.mock_calls == [call(device.main.stream)]
    device.main.wait_for(end)
    assert device.main.stream.wait_event.mock_calls == [call(events[1])]
    events[0].query.return_value, events[0].elapsed_time.return_value = False, 1.25
    end.wait()
    assert not start.done() and events[1].synchronize.called
    assert device.elapsed_ns(start, end) == 1_250_000 and events[0].elapsed_time.mock_calls == [call(events[1])]


def test_recording_is_graph_of_main_that_others_may_work_beside(fake: Torch) -> None:
    device, inside = CudaDevice(), []
    replay = device.capture(lambda: inside.append(fake.cuda.graph.return_value.__enter__.called))
    graph = fake.cuda.CUDAGraph.return_value
    assert inside == [True] and not graph.replay.called
    assert fake.cuda.graph.mock_calls[0] == call(
        graph, pool=(0, 1), stream=device.main.stream, capture_error_mode="thread_local"
    )
    replay()
    replay()
    assert graph.replay.call_count == 2


def test_a_recording_that_is_cut_is_several_graphs(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    device, told = CudaDevice(), []
    numbers = itertools.count()

    class Graph:
        def __init__(self) -> None:
            self.number = next(numbers)

        def replay(self) -> None:
            told.append(f"graph {self.number}")

    @contextmanager
    def graph(recorded: Graph, **_: Any) -> Iterator[None]:
        told.append(f"begin {recorded.number}")
        yield
        told.append(f"end {recorded.number}")

    monkeypatch.setattr(fake.cuda, "graph", graph)
    monkeypatch.setattr(fake.cuda, "CUDAGraph", Graph)
    replay = device.capture(lambda: device.cut(lambda: told.append("call")))
    assert told == ["begin 0", "end 0", "begin 1", "end 1"] and not device.is_recording
    told.clear()
    replay()
    assert told == ["graph 0", "call", "graph 1"]
    with pytest.raises(CudaError, match="cut where there is none"):
        device.cut(lambda: None)


def test_recordings_share_a_pool_while_one_of_them_exists(fake: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replay = staticmethod(lambda: None)

    pools = []

    def graph(recorded: object, pool: tuple[int, int], **_: Any) -> nullcontext[None]:
        pools.append(pool)
        return nullcontext()

    monkeypatch.setattr(fake.cuda, "graph", graph)  # which, unlike a mock, keeps no recording
    monkeypatch.setattr(fake.cuda, "CUDAGraph", Graph)
    fake.cuda.graph_pool_handle.side_effect = [(0, 1), (0, 2)]
    device = CudaDevice()
    replays = [device.capture(lambda: None), device.capture(lambda: None)]
    del replays[0]
    replays.append(device.capture(lambda: None))
    replays.clear()
    replays.append(device.capture(lambda: None))
    assert pools == [(0, 1)] * 3 + [(0, 2)], "torch refuses the first again while a tensor of it lives"


def test_large_pinned_memory_is_exactly_as_large_and_given_back(fake: Torch) -> None:
    device, runtime = CudaDevice(), fake.cuda.cudart.return_value
    assert device.pinned((10, 3), torch.int32).shape == (10, 3) and fake.pinned == [(10, 3)]
    large = device.pinned((3, 1 << 20), torch.bfloat16)
    assert (large == 0).all() and fake.pinned == [(10, 3)]
    assert runtime.cudaHostRegister.mock_calls == [call(large.data_ptr(), 6 << 20, 2)]
    address, view = large.data_ptr(), large[1]
    del large
    assert not runtime.cudaHostUnregister.called, "a view holds it"
    del view
    assert runtime.cudaHostUnregister.mock_calls == [call(address)]
    assert fake.cuda.synchronize.mock_calls == [call(torch.device("cuda", 0))], "a copy may be under way"
    runtime.cudaHostRegister.return_value = 2
    with pytest.raises(CudaError, match=r"0\.5 GiB of main memory cannot be pinned .2.; lower --host-blocks"):
        device.pinned((1 << 29,), torch.uint8)


def test_foreign_memory_is_registered_by_its_use_and_given_back(
    fake: Torch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = MagicMock(CUDARuntimeError=type("CUDARuntimeError", (Exception,), {}))
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    device, memory = CudaDevice(), torch.arange(100, dtype=torch.uint8)
    fake.cuda.set_device.reset_mock()
    own, read = device.registered(memory), device.registered(memory, read_only=True)
    fake.cuda.set_device.assert_called_with(torch.device("cuda", 0))
    assert own.data_ptr() == read.data_ptr() == memory.data_ptr()
    assert runtime.hostRegister.mock_calls == [call(memory.data_ptr(), 100, 2), call(memory.data_ptr(), 100, 10)]
    del own
    assert runtime.hostUnregister.mock_calls == [call(memory.data_ptr())]
    assert fake.cuda.synchronize.called, "a copy may be under way"
    runtime.hostRegister.side_effect = runtime.CUDARuntimeError("no")
    assert device.registered(memory, read_only=True) is memory
    assert "cannot be pinned (no): copies from it make the worker wait" in caplog.text
    with pytest.raises(CudaError, match=r"cannot be pinned .no.; lower --host-blocks"):
        device.registered(memory)


def test_memory_that_torch_keeps_for_itself_is_given_back_and_free(fake: Torch) -> None:
    device = CudaDevice()
    fake.cuda.mem_get_info.side_effect = lambda _: (500 + 300 * fake.cuda.empty_cache.called, 1000)
    assert device.free_bytes() == (800, 1000)
    fake.cuda.max_memory_allocated.return_value = 300
    assert device.peak_bytes() == 300 and not fake.cuda.reset_peak_memory_stats.called
    assert device.peak_bytes(reset=True) == 300 and fake.cuda.reset_peak_memory_stats.called
