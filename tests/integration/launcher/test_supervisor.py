"""The supervisor with real processes: order, restarts, errors, and that no process survives the launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.processes.listeners import listen
from shared.processes.supervisor import Service, ServiceSpec, describe_exit
from tests.support.launcher import ROOT, Stack, alive, clean_env
from tests.support.waiting import free_port, until

SERVE = "serve()\n"


def test_service_waits_until_the_one_before_it_is_ready(tmp_path: Path) -> None:
    slow = "note('alpha up')\ntime.sleep(0.5)\nnote('alpha ready')\nserve()\n"
    services = {"alpha": slow, "beta": "note('beta up')\nserve()\n"}
    with Stack(tmp_path, services, after={"beta": ["alpha"]}) as stack:
        stack.wait_ready()
        assert stack.notes() == ["alpha up", "alpha ready", "beta up"]
        assert "beta: waiting for alpha" in stack.text()


def test_killed_service_is_restarted_without_its_children_and_named(tmp_path: Path) -> None:
    source = """
if starts() == 1:
    print('beta says hello', flush=True)
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    (DIR / 'grandchild').write_text(str(child.pid))
else:
    time.sleep(0.5)
serve()
"""
    with Stack(tmp_path, {"alpha": SERVE, "beta": source}) as stack:
        before = stack.wait_ready()
        grandchild = int((tmp_path / "grandchild").read_text())
        assert alive(grandchild)
        os.kill(before["beta"], signal.SIGKILL)
        text = stack.wait_text("beta is ready again")
        after = stack.pids()
        assert "beta died (signal SIGKILL)" in text
        assert "beta | beta says hello" in text
        assert set(before) == {"alpha", "beta"} and after["alpha"] == before["alpha"]
        assert after["beta"] != before["beta"] and alive(after["beta"])
        for name, pid in after.items():
            assert (tmp_path / f"{name}.ready").read_text() == str(pid)  # the service's own, and of the new one
        until("the grandchild died too", lambda: not alive(grandchild))


def test_service_wakes_when_the_one_before_it_has_ended(tmp_path: Path) -> None:
    slow = """
note('alpha up')
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), note('alpha ended'), os._exit(0)))
ready()
while True:
    signal.pause()
"""
    stubborn = (
        "note('beta up')\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nwhile True:\n    signal.pause()\n"
    )
    services, awake = {"alpha": slow, "beta": stubborn, "gamma": SERVE}, tmp_path / "awake"
    models = {"alpha": "a", "beta": "b"}
    with Stack(tmp_path, services, models=models, awake=str(awake), stop_s=1.0) as stack:
        until("gamma runs, and nothing that may sleep", lambda: stack.pids().keys() == {"gamma"})
        assert "STACK READY" not in stack.text()
        awake.write_text("a")
        assert stack.wait_ready().keys() == {"alpha", "gamma"}
        awake.write_text("b")
        until("beta runs alone", lambda: stack.pids().keys() == {"beta", "gamma"} and "beta up" in stack.notes())
        assert stack.notes() == ["alpha up", "alpha ended", "beta up"]
        os.kill(stack.pids()["beta"], signal.SIGKILL)
        until("beta is back", lambda: stack.notes().count("beta up") == 2)  # its end was no wish of the placer
        awake.write_text("a")

        def alpha_is_back() -> bool:
            running = stack.pids().keys()
            assert not {"alpha", "beta"} <= running
            return "alpha" in running

        until("alpha runs again, behind beta's end", alpha_is_back)
        assert "beta sleeps" in stack.text()  # killed: it does not end by itself
        stack.wait_text("alpha is ready again")
        assert stack.pids().keys() == {"alpha", "gamma"}
        assert "died" not in stack.text().partition("beta restarted")[2]


ANSWERS = """
from shared.processes.listeners import listen
listener = listen("", 0, "port")
listener.setblocking(True)
while True:
    listener.accept()[0].sendall(b"hello")
"""


def test_clients_of_a_killed_service_wait_for_the_next_process() -> None:
    with listen("127.0.0.1", free_port(), "port") as held:
        service = Service(ServiceSpec("server", [sys.executable, "-c", ANSWERS], cwd=ROOT, sockets={"port": held}))
        for _ in range(2):
            with socket.create_connection(held.getsockname(), timeout=60) as client:  # while none runs
                service.start()
                assert client.recv(16) == b"hello"
            service.signal(signal.SIGKILL)
            until("it has ended", lambda: service.exit_code() is not None)


def test_service_that_ends_after_it_was_ready_is_restarted(tmp_path: Path) -> None:
    source = "count = starts()\nready()\nif count == 1:\n    time.sleep(0.4)\n    sys.exit(0)\nserve()\n"
    with Stack(tmp_path, {"alpha": source}) as stack:
        assert "alpha has ended (exit code 0)" in stack.wait_text("alpha is ready again")


@pytest.mark.parametrize("has_logs", [True, False])
def test_crash_loop_is_named_once_with_its_log(tmp_path: Path, has_logs: bool) -> None:
    source = "if starts() <= 6:\n    print('cannot go on', flush=True)\n    sys.exit(3)\nserve()\n"
    backoff = {"first_s": 0.01, "factor": 1.5, "cap_s": 0.1, "loop": 4, "window_s": 3600.0}
    with Stack(tmp_path, {"alpha": source}, backoff=backoff, has_logs=has_logs) as stack:
        stack.wait_ready()
        text = stack.text()
        assert text.count("crash loop") == 1
        assert "4 deaths" in text and (str(stack.run_dir / "logs" / "alpha.log") in text) == has_logs
        assert text.count("alpha died (exit code 3)") == 6


def test_configuration_error_at_first_start_stops_everything(tmp_path: Path) -> None:
    refusing = "print('error: --dtype=int3: no such type', file=sys.stderr, flush=True)\nsys.exit(2)\n"
    with Stack(tmp_path, {"alpha": SERVE, "beta": refusing}) as stack:
        assert stack.process is not None
        assert stack.process.wait(60) == 2
        text = stack.text()
        assert "beta refuses to start" in text and "error: --dtype=int3: no such type" in text
        assert "restart" not in text
        assert "ready" not in [path.name for path in stack.run_dir.iterdir()]
        assert not (stack.run_dir / "processes.json").exists()


@pytest.mark.parametrize(
    ("number", "to_group", "guard"),
    [(signal.SIGTERM, False, True), (signal.SIGINT, True, False), (signal.SIGHUP, False, False)],
)
def test_signal_stops_services_in_reverse_order(
    tmp_path: Path, number: signal.Signals, to_group: bool, guard: bool
) -> None:
    """A terminal sends Ctrl-C to all of the foreground group; it reaches services through the launcher only."""
    with Stack(tmp_path, {"redis": SERVE, "worker": SERVE, "gateway": SERVE}, guard=guard) as stack:
        pids = stack.wait_ready()
        assert stack.process is not None
        (os.killpg if to_group else os.kill)(stack.process.pid, number)
        assert stack.process.wait(60) == 0
        assert stack.notes() == ["stop gateway", "stop worker", "stop redis"]
        assert not any(alive(pid) for pid in pids.values())
        assert sorted(path.name for path in stack.run_dir.iterdir()) == ["logs"]


def test_services_share_a_session_and_have_groups_of_their_own(tmp_path: Path) -> None:
    """Linux compares priorities within a session. A terminal sends its signals to a group, and may stop others that
    read from it or write to it.
    """
    with Stack(tmp_path, {"redis": SERVE, "worker": SERVE}) as stack:
        pids = stack.wait_ready()
        assert stack.process is not None
        assert {os.getsid(pid) for pid in pids.values()} == {os.getsid(stack.process.pid)}
        for pid in pids.values():
            assert os.getpgid(pid) == pid
            ignored = re.search(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            assert ignored is not None
            assert all(int(ignored[1], 16) & 1 << (number - 1) for number in (signal.SIGTTIN, signal.SIGTTOU))


def test_signal_during_start_stops_the_services(tmp_path: Path) -> None:
    with Stack(tmp_path, {"alpha": "note('up')\nsignal.pause()\n", "beta": SERVE}) as stack:
        until("both started", lambda: "up" in stack.notes() and len(stack.pids()) == 2)
        pids = stack.pids()
        assert stack.stop() == 0
        assert not any(alive(pid) for pid in pids.values())


DEAF = "signal.signal(signal.SIGTERM, lambda *_: note('deaf'))\nready()\nwhile True:\n    time.sleep(60)\n"


@pytest.mark.parametrize("source", [DEAF, SERVE], ids=["deaf to SIGTERM", "stopped"])
def test_service_is_killed_after_its_deadline(tmp_path: Path, source: str) -> None:
    with Stack(tmp_path, {"alpha": source}, stop_s=0.5) as stack:
        pids = stack.wait_ready()
        if source == SERVE:
            os.kill(pids["alpha"], signal.SIGSTOP)
        assert stack.stop() == 0
        assert "alpha did not stop in" in stack.text()
        assert not alive(pids["alpha"])


def test_slow_stop_is_shown_and_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with Stack(tmp_path, {"alpha": DEAF}, stop_s=3600) as stack:
        pids = stack.wait_ready()
        process = stack.process
        assert process is not None
        process.send_signal(signal.SIGINT)
        text = stack.wait_text("of at most 3600 s")
        assert "stopping everything; Ctrl-C again kills what is left\nstopping alpha\nstopping alpha: " in text
        assert stack.stop(signal.SIGINT) == 0
        assert not alive(pids["alpha"])
        assert stack.notes() == ["deaf"]


def test_signals_within_a_moment_let_services_finish(tmp_path: Path) -> None:
    slow = "def stop(*_):\n    time.sleep(0.5)\n    note('finished')\n    sys.exit(0)\n"
    slow += "signal.signal(signal.SIGTERM, stop)\nready()\nwhile True:\n    signal.pause()\n"
    with Stack(tmp_path, {"alpha": slow}) as stack:
        stack.wait_ready()
        assert stack.process is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            stack.process.send_signal(number)
        assert stack.process.wait(60) == 0
        assert stack.notes() == ["finished"]


@pytest.mark.parametrize("guard", [False, True], ids=["pdeathsig", "guard"])
def test_sigkill_of_the_launcher_leaves_a_lock_and_no_child(tmp_path: Path, guard: bool) -> None:
    beta = "signal.signal(15, signal.SIG_IGN)\n" + SERVE
    with Stack(tmp_path, {"alpha": SERVE, "beta": beta}, guard=guard) as stack:
        stack.wait_ready()
        pids = [int((tmp_path / f"{name}.ready").read_text()) for name in ("alpha", "beta")]
        assert stack.stop(signal.SIGKILL) == -signal.SIGKILL
        until("the services died with the launcher", lambda: not any(alive(pid) for pid in pids))
        assert (stack.run_dir / "lock").exists()
    stack.output.unlink()
    with stack as again:  # that lock is ignored
        assert alive(again.wait_ready()["alpha"])


def test_second_launcher_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with Stack(tmp_path, {"alpha": SERVE}) as stack:
        pids = stack.wait_ready()
        assert stack.process is not None
        second = subprocess.run(stack.argv, cwd=ROOT, env=clean_env(), capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert f"pid {stack.process.pid}" in second.stderr
        assert stack.pids() == pids and alive(pids["alpha"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_make_alone_stops_everything(tmp_path: Path, number: int) -> None:
    stack = Stack(tmp_path, {"alpha": SERVE, "beta": SERVE}, stop_with_parent=True)
    (tmp_path / "Makefile").write_text(f"run:\n\t@exec {' '.join(stack.argv)}\n")
    with stack.output.open("ab") as output:
        make = subprocess.Popen(["make", "-C", str(tmp_path)], stdout=output, stderr=output, env=clean_env())
    try:
        pids = stack.wait_ready()
        launcher = int((stack.run_dir / "lock").read_text())
        assert launcher != make.pid
        make.send_signal(number)
        make.wait(60)
        until("everything is gone", lambda: not any(map(alive, [launcher, *pids.values()])))
        assert stack.notes() == ["stop beta", "stop alpha"]
        assert not (stack.run_dir / "lock").exists()
    finally:
        make.kill()
        make.wait()


@pytest.mark.parametrize("before", [[], ["nohup"]], ids=["", "nohup"])
def test_launcher_whose_terminal_is_closed_stops_in_order_or_survives(tmp_path: Path, before: list[str]) -> None:
    stack = Stack(tmp_path, {"alpha": SERVE, "beta": SERVE})
    launcher = subprocess.Popen(
        [*before, *stack.argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
        env=clean_env(), start_new_session=True,
    )  # fmt: skip
    try:
        until("both run", lambda: len(stack.pids()) == 2 and (tmp_path / "beta.ready").exists())
        pids = stack.pids()
        assert launcher.stdout is not None
        launcher.stdout.close()  # as `make run | head -1` does
        if before:
            launcher.send_signal(signal.SIGHUP)
        os.kill(pids["beta"], signal.SIGKILL)  # the launcher now has something to say
        until("beta is back", lambda: stack.pids().get("beta", pids["beta"]) != pids["beta"])
        until("beta serves", (tmp_path / "beta.ready").exists)
        launcher.send_signal(signal.SIGTERM if before else signal.SIGHUP)
        assert launcher.wait(60) == 0
        assert stack.notes() == ["stop beta", "stop alpha"]
        assert sorted(path.name for path in stack.run_dir.iterdir()) == ["logs"]
    finally:
        launcher.kill()
        launcher.wait()


def test_service_with_an_unwritable_log_is_tried_again(tmp_path: Path) -> None:
    with Stack(tmp_path, {"alpha": SERVE}) as stack:
        pids = stack.wait_ready()
        log = stack.run_dir / "logs" / "alpha.log"
        log.unlink()
        log.mkdir()
        os.kill(pids["alpha"], signal.SIGKILL)
        stack.wait_text("alpha cannot be started (")
        log.rmdir()
        stack.wait_text("alpha is ready again")


def test_command_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    service = Service(ServiceSpec("ghost", ["/nonexistent/orcinus-service"]), tmp_path / "ghost.log")
    service.start()
    assert until("it ended", service.exit_code) == 2
    assert "cannot start /nonexistent/orcinus-service" in service.tail()[-1]


def test_log_beyond_its_limit_is_moved(tmp_path: Path) -> None:
    log = tmp_path / "chatty.log"
    source = "import signal, sys\nfor line in sys.stdin: pass\nprint('x' * 5000, flush=True)\nsignal.pause()"
    service = Service(ServiceSpec("chatty", [sys.executable, "-c", source]), log)
    service.start()
    until("it wrote", lambda: log.stat().st_size > 5000)
    service.cut_log(limit_bytes=4096)
    assert (log.stat().st_size, service.tail()) == (0, [])
    assert (tmp_path / "chatty.log.1").stat().st_size > 5000
    service.signal_group(signal.SIGKILL)
    assert until("it ended", service.exit_code) == -signal.SIGKILL


def test_exits_are_described_by_code_or_signal_name() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal SIGKILL"
