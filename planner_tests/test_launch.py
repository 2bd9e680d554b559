"""Ranks start, talk, agree; and however one of them ends, it is named and nothing is left behind."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from started import free_port
from torch.distributed.distributed_c10d import _get_default_store

from asa.errors import InvalidInputError, PreemptedError, UnavailableError, UsageError, WorkersFailedError
from asa.ir import control_groups
from asa.launch import (
    TorchrunRank,
    cuda_devices,
    devices,
    forking,
    join,
    launched,
    or_fail,
    run_ranks,
    tell,
    worker,
)
from asa.launch import ranks as starting
from asa.launch.blame import Outcome, culprit
from asa.launch.signals import take_sigterm
from asa.launch.torchrun import _meeting
from asa.launch.worker import Failure, failure, others_may_leave


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:  # it was gone in between
        return False


def _gone(pids: list[int]) -> bool:
    until = time.monotonic() + 60
    while any(_alive(p) for p in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _sum(rank: int, base: int) -> tuple[int, torch.Tensor, int]:
    value = torch.tensor([float(base + rank)])
    dist.all_reduce(value)
    return rank, value, torch.get_num_threads()


def test_results_come_by_rank_and_closures_work() -> None:
    found = run_ranks(3, _sum, 10, threads=1)
    assert [(r, v.item(), t) for r, v, t in found] == [(r, 33.0, 1) for r in range(3)]
    captured = [4, 5]
    assert run_ranks(2, lambda rank: captured[rank], timeout_s=120) == [4, 5]
    assert not dist.is_initialized(), "the parent is no member of the group"


def test_a_result_larger_than_a_pipe_and_a_slow_rank_do_not_block() -> None:
    def big(rank: int) -> torch.Tensor:
        if rank:
            time.sleep(0.3)
        value = torch.full((300_000,), float(rank))
        dist.all_reduce(value)
        return value

    assert all(torch.equal(v, torch.ones(300_000)) for v in run_ranks(2, big, threads=1, timeout_s=120))


def test_messages_arrive_in_order_while_ranks_run() -> None:
    heard: list[tuple[int, int]] = []

    def chatty(rank: int) -> None:
        for i in range(3):
            tell(i)

    run_ranks(2, chatty, threads=1, on_message=lambda rank, message: heard.append((rank, message)))
    assert sorted(heard) == [(r, i) for r in range(2) for i in range(3)]
    assert [i for r, i in heard if r == 1] == [0, 1, 2]
    tell("nobody listens here")


def test_standard_output_belongs_to_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    def loud(rank: int) -> None:
        print("from a rank")
        os.write(1, b"from a library")

    run_ranks(1, loud, threads=1)
    out, _ = capfd.readouterr()
    assert out == ""


def _steps_with_fault(rank: int, kind: str) -> None:
    tell(os.getpid())
    for step in range(4):
        if step == 2 and rank == 1:
            match kind:
                case "exit":
                    os._exit(3)
                case "sys.exit":
                    sys.exit(0)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "segfault":
                    faulthandler.disable()
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "raise":
                    raise ValueError("no such\n  thing")
                case "hang":
                    time.sleep(600)
                case "gil":
                    ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock: no Python thread runs
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exit", "exited with code 3"),
        ("sys.exit", "sys.exit(0)"),
        ("kill", "signal 9 (SIGKILL)"),
        ("segfault", "signal 11 (SIGSEGV)"),
        ("raise", "ValueError: no such thing"),
        ("hang", "hung"),
        ("gil", "hung"),
    ],
)
def test_the_rank_at_fault_is_named_and_all_end(kind: str, words: str) -> None:
    pids: list[int] = []
    # Of two ranks that have not reported in time, the first is named: there is only one beside the one that hangs.
    ranks, timeout_s = (2, 5.0) if words == "hung" else (3, 120.0)
    with pytest.raises(WorkersFailedError) as caught:
        run_ranks(
            ranks, _steps_with_fault, kind, threads=1, timeout_s=timeout_s, on_message=lambda _, pid: pids.append(pid)
        )
    assert caught.value.rank == 1
    assert str(caught.value).startswith(f"rank 1 of {ranks} ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(pids) == ranks
    assert _gone(pids)


@pytest.mark.parametrize(("losses", "told", "tries"), [(1, False, 2), (9, False, 2), (9, True, 1)])
def test_ranks_that_lose_each_other_in_coming_up_are_started_again_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int, told: bool, tries: int
) -> None:
    form_group, tried = worker.form_group, tmp_path / "tried"

    def losing(backend: str, store: dist.Store, rank: int, *args: object) -> None:
        if rank == 1:
            with tried.open("a") as out:
                out.write(".")
            if len(tried.read_text()) <= losses:
                raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:561] Connection closed by peer [::1]:1")
        form_group(backend, store, rank, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "form_group", losing)
    started = (lambda: None) if told else None
    if losses < tries:
        assert run_ranks(2, lambda rank: rank, timeout_s=120, once_started=started) == [0, 1]
    else:
        with pytest.raises(WorkersFailedError, match="connectFullMesh"):
            run_ranks(2, lambda rank: rank, timeout_s=120, once_started=started)
    assert len(tried.read_text()) == tries


def test_our_own_errors_pass_through_with_the_ranks_trace() -> None:
    def refuse(rank: int) -> None:
        raise InvalidInputError("data ends early", where="byte 7")

    with pytest.raises(InvalidInputError, match=r"^data ends early \(at byte 7\)") as caught:
        run_ranks(2, refuse, threads=1)
    assert "refuse" in "".join(caught.value.__notes__)


def test_a_limit_for_everything() -> None:
    with pytest.raises(WorkersFailedError, match="rank 0 of 1 was not done"):
        run_ranks(1, lambda rank: time.sleep(600), threads=1, limit_s=0.5)


def test_a_callback_that_raises_ends_the_ranks() -> None:
    pids: list[int] = []

    def forever(rank: int) -> None:
        tell(os.getpid())
        time.sleep(600)

    def interrupt(rank: int, pid: int) -> None:
        pids.append(pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, forever, threads=1, on_message=interrupt)
    assert _gone(pids)


def test_impossible_requests_are_refused() -> None:
    for ranks, threads in ((0, None), (1, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            run_ranks(ranks, _sum, 1, threads=threads)
    if cuda_devices() < 64:
        with pytest.raises(UnavailableError, match="64 nccl ranks need 64 CUDA devices"):
            run_ranks(64, _sum, 1, backend="nccl")


def test_ranks_may_open_as_many_files_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 4096]

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        limits[:] = wanted

    monkeypatch.setattr(starting.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(starting.resource, "setrlimit", set_limit)
    starting._allow_files(4)
    assert limits == [256, 4096], "its own limit is raised"
    starting._allow_files(200)
    assert limits == [4096, 4096], "up to what the system allows"
    limits[:] = [24, 24]
    with pytest.raises(UnavailableError, match="2 ranks need 40 open files a process, the limit is 24"):
        starting._allow_files(2)
    limits[:] = [starting.resource.RLIM_INFINITY] * 2
    starting._allow_files(2)
    assert limits == [starting.resource.RLIM_INFINITY] * 2


def _few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, limit: int, used: int) -> None:
    own, group = tmp_path / "cgroup", tmp_path / "pids" / "job"
    own.write_text("8:pids:/job\n0::/\n")
    group.mkdir(parents=True, exist_ok=True)
    (group / "pids.max").write_text(f"{limit}\n")
    (group / "pids.current").write_text(f"{used}\n")
    (group.parent / "pids.max").write_text("max\n")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", own)


def test_ranks_that_the_system_cannot_start_are_refused_with_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _few_processes(tmp_path, monkeypatch, limit=20, used=12)
    with pytest.raises(UnavailableError, match=r"2 ranks need 9 .* at least, 8 of 20 are left \(pids.max"):
        run_ranks(2, _sum, 1)
    _few_processes(tmp_path, monkeypatch, limit=42, used=12)
    with pytest.raises(UnavailableError, match=r"2 ranks need 31 .* at least, 30 of 42"):
        run_ranks(2, _sum, 1, watched=True)

    def without_threads(rank: int) -> None:
        raise RuntimeError("Resource temporarily unavailable" if rank else "can't start new thread")

    def aborts(rank: int) -> None:
        faulthandler.disable()
        os.abort()

    _few_processes(tmp_path, monkeypatch, limit=50, used=12)
    for function in (without_threads, aborts):
        with pytest.raises(UnavailableError, match=r"38 of 50 are left .*; 2 ranks need up to 50"):
            run_ranks(2, function, threads=1, timeout_s=60)
    _few_processes(tmp_path, monkeypatch, limit=5000, used=12)
    with pytest.raises(WorkersFailedError, match="SIGABRT"):
        run_ranks(2, aborts, threads=1, timeout_s=60)


def test_a_network_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with pytest.raises(UnavailableError, match=r"GLOO_SOCKET_IFNAME=none7: no such network interface.* this host has"):
        run_ranks(1, _sum, 1, threads=1, timeout_s=60)


def test_threads_that_would_hang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_fork_computes", lambda threads: False)
    with pytest.raises(UsageError, match=r"set_num_threads\(1\)"):
        run_ranks(1, _sum, 1, threads=2)
    monkeypatch.setattr(forking, "default_threads", lambda ranks: 8)
    assert run_ranks(1, _sum, 1)[0][2] == 1


def test_the_probe_tells_a_process_that_has_computed_with_threads() -> None:
    def probe(rank: int) -> tuple[bool, bool, bool]:
        forking._PROBE_S = 0.5
        before = forking._fork_computes(2)
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        return before, forking._fork_computes(2), forking._fork_computes(2)

    assert run_ranks(1, probe, threads=1) == [(True, False, False)]


def test_a_child_that_gets_hardly_any_time_of_a_core_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than one may sleep: on a busy machine a child that computes for a moment does."""

    def compute(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(forking, "_PROBE_S", 0.1)
    assert forking._child(lambda: compute(0.5)) == 0
    assert forking._child(lambda: time.sleep(600)) is None
    monkeypatch.setattr(forking, "_MOST_WORK_S", 0.2)
    assert forking._child(lambda: compute(600)) is None


@pytest.mark.parametrize(
    ("ends", "state"), [(lambda: os._exit(0), "Z"), (lambda: signal.raise_signal(signal.SIGSTOP), "T")]
)
def test_a_child_that_has_ended_or_was_stopped_does_not_sleep(ends: Callable[[], object], state: str) -> None:
    """A look at it that a busy machine has come late counts as much as many others."""
    with forking.fork_beside_threads():
        pid = os.fork()
    if pid == 0:
        ends()
        os._exit(1)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.001)
    rests, _ = forking._use_of_cores(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not rests


def _supervisor(mode: str, out: int) -> None:
    """Run two ranks that write their process ids to ``out``; exits as the command line would."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, as under nohup, it would be no signal at all

    def body(rank: int) -> None:
        stopped: list[int] = []
        if mode != "deaf":
            signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
            take_sigterm()
        tell(os.getpid())
        while not stopped:
            time.sleep(0.01)
        if mode == "stuck":
            tell(0)
            time.sleep(600)
        raise PreemptedError("saved")

    def hear(rank: int, pid: int) -> None:
        os.write(out, f"{pid}\n".encode())

    # A shell has its background jobs ignore interrupts, and so would this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        run_ranks(2, body, threads=1, forward_sigterm=mode != "deaf", on_message=hear)
    except PreemptedError as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    ("mode", "signals", "code"),
    [
        ("polite", [signal.SIGTERM], 75),
        ("stuck", [signal.SIGTERM, signal.SIGTERM], -signal.SIGTERM),
        ("deaf", [signal.SIGTERM], -signal.SIGTERM),
        ("polite", [signal.SIGKILL], -signal.SIGKILL),
        ("polite", [signal.SIGINT], 130),
        ("polite", [signal.SIGHUP], 75),
        ("deaf", [signal.SIGHUP], -signal.SIGHUP),
    ],
)
def test_no_signal_to_the_parent_leaves_an_orphan(mode: str, signals: list[signal.Signals], code: int) -> None:
    here, there = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_supervisor, args=(mode, there))
    with forking.fork_beside_threads():
        process.start()
    os.close(there)
    with open(here) as stream:
        pids = [int(stream.readline()) for _ in range(2)]
        for i, number in enumerate(signals):
            if i:
                assert [stream.readline().strip() for _ in range(2)] == ["0", "0"], "both have heard the first"
            os.kill(process.pid or 0, number)
        process.join(120)
    assert process.exitcode == code
    assert _gone(pids)


def test_a_group_that_exists_is_joined_and_left_alone() -> None:
    def inside(rank: int) -> tuple[TorchrunRank, bool]:
        with join() as place:
            pass
        return place, dist.is_initialized()

    assert run_ranks(2, inside, threads=1) == [
        (TorchrunRank(rank=r, num_ranks=2, local_rank=r), True) for r in range(2)
    ]


def test_a_launcher_is_obeyed() -> None:
    def as_launched(rank: int) -> tuple[TorchrunRank, float, bool, bool]:
        port = torch.zeros(1)
        if rank == 0:
            port[0] = free_port()
        dist.broadcast(port, 0)
        dist.destroy_process_group()
        os.environ.update(MASTER_PORT=str(int(port.item())), TORCHELASTIC_RESTART_COUNT="2")
        assert launched()
        with join(timeout_s=120) as place:
            value = torch.ones(1)
            dist.all_reduce(value)
            dist.barrier()
        left = not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # of the program's own
        return place, value.item(), left, worker.store_of_ranks() is _get_default_store()

    expected = [(TorchrunRank(rank=r, num_ranks=2, local_rank=r), 2.0, True, True) for r in range(2)]
    assert run_ranks(2, as_launched, threads=1, timeout_s=120) == expected


def test_ranks_that_meet_in_a_store_that_outlives_them_agree_on_a_new_name() -> None:
    store, names = dist.HashStore(), set()
    for ranks in (3, 2, 3, 1):
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(_meeting, store, r, ranks, 60.0) for r in range(1, ranks)]
            time.sleep(0.05)  # whoever would listen to what was left has done so
            name = _meeting(store, 0, ranks, 60.0)
            assert [other.result(60.0) for other in others] == [name] * (ranks - 1)
        names.add(name)
    assert len(names) == 4


def test_who_does_not_come_to_meet_is_named() -> None:
    with pytest.raises(dist.DistError, match=r"rank 1 did not come within 0\.05 s"):
        _meeting(dist.HashStore(), 0, 2, 0.05)


def _score(_rank: int = 0) -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


def test_where_memory_runs_out_a_rank_is_killed_before_its_launcher() -> None:
    assert run_ranks(1, _score, threads=1) == [min(1000, _score() + 500)]


def test_ranks_sent_to_the_store_of_an_agent_are_told_of_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", str(port.port)), ("TORCHELASTIC_USE_AGENT_STORE", "True")):  # fmt: skip
        monkeypatch.setenv(name, value)
    told = r"rank 1 did not come within 2 s.*start every torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(UnavailableError, match=told), join(timeout_s=2.0):
        pass


def test_a_launcher_that_talks_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="not under a launcher"), join():
        pass
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK=5 is not one of WORLD_SIZE=2"), join():
        pass
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UsageError, match="WORLD_SIZE='two' is not a number"), join():
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value, words in (
        ("MASTER_PORT", "abc", "MASTER_PORT='abc' is not a number"),
        ("LOCAL_WORLD_SIZE", "two", "LOCAL_WORLD_SIZE='two' is not a number"),
        ("LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE=3 ranks on this machine are not 1 to WORLD_SIZE=1"),
        ("LOCAL_RANK", "7", "LOCAL_RANK=7 is not one of 1 ranks on this machine"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1 is not one of 1 ranks"),
        ("TORCHELASTIC_RESTART_COUNT", "once", "TORCHELASTIC_RESTART_COUNT='once' is not a number"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(UsageError, match=words), join():
                pass
    with pytest.raises(UnavailableError, match="MASTER_ADDR"), join(timeout_s=1):
        pass


def test_a_report_is_one_line_and_tells_a_victim() -> None:
    inner = "Traceback (most recent call last):\n  File a\nValueError: cannot decode image 21\n"
    said = failure(ValueError(f"Caught ValueError in DataLoader worker process 0.\nOriginal {inner}"))
    words = "Caught ValueError in DataLoader worker process 0. ValueError: cannot decode image 21"
    assert said.line == f"failed with ValueError: {words}"
    gone = "another rank is gone: start all ranks again .* failed with RuntimeError: Connection closed"
    with pytest.raises(WorkersFailedError, match=gone) as caught, others_may_leave():
        raise RuntimeError("[/a/pair.cc:561] Connection closed by peer")
    assert failure(caught.value).collective
    assert not failure(WorkersFailedError("the loss is no longer finite")).collective
    with pytest.raises(RuntimeError, match="of its own"), others_may_leave():
        raise RuntimeError("of its own")


def test_blame_goes_by_evidence_not_by_arrival() -> None:
    victim = Outcome(failure=Failure(line="failed with RuntimeError: Connection closed by peer", collective=True))
    dead = Outcome.of_exit(-11, "gloo")
    fine = Outcome(result=1)
    assert culprit({0: fine, 1: fine}, 2, 5) is None
    assert culprit({0: victim, 2: dead, 1: victim}, 3, 5)[0] == 2  # type: ignore[index]
    assert culprit({0: victim, 2: fine}, 4, 5)[0] == 1  # type: ignore[index]
    assert culprit({1: victim, 0: victim}, 2, 5)[0] == 1  # type: ignore[index]
    watchdog = Outcome.of_exit(-signal.SIGABRT, "nccl")
    assert culprit({0: watchdog}, 2, 5)[0] == 1, "nccl aborts the rank that waits"  # type: ignore[index]
    assert PreemptedError.exit_code == 75


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota_us", "cores"), [(None, 8), (100_000, 2), (70_000, 2), (10_000, 1), (900_000, 8)])
def test_a_quota_of_processor_time_is_a_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, quota_us: int | None, cores: int
) -> None:
    own = tmp_path / "cgroup"
    own.write_text("3:cpuacct,cpu:/job/rank\n" if version == 1 else "0::/job/rank\n")
    folder = tmp_path / ("cpu/job" if version == 1 else "job")
    folder.mkdir(parents=True)
    if version == 1:
        (folder / "cpu.cfs_quota_us").write_text(f"{quota_us or -1}\n")
        (folder / "cpu.cfs_period_us").write_text("50000\n")
    else:
        (folder / "cpu.max").write_text(f"{quota_us or 'max'} 50000\n")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    control_groups.cores.cache_clear()
    try:
        assert devices.usable_cores() == cores
    finally:
        control_groups.cores.cache_clear()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinities here")
def test_a_rank_is_bound_to_a_core_where_there_is_one_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cores: bound.append(set(cores)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: bound[-1] if bound else {2, 5})
    monkeypatch.setattr(devices, "_shared", None)
    for rank, ranks in ((0, 1), (0, 3), (2, 4)):
        devices.bind_to_core(rank, ranks)
        assert (bound, devices.usable_cores()) == ([], 2), "with cores to spare, or too few, nothing is bound"
    devices.bind_to_core(1, 2)
    assert bound == [{5}]
    assert devices.usable_cores() == 2, "what is beside it still counts"


def test_devices_are_counted_by_torch_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_shows_devices", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_devices() == 3, "a driver may have other files than those that are looked for"


def test_an_error_in_a_thread_that_others_wait_for_ends_the_rank_at_once() -> None:
    def serve() -> None:
        raise TypeError("a handle of another kind")

    def on_rank(rank: int) -> None:
        if rank == 1:
            threading.Thread(target=or_fail(serve), daemon=True).start()
        time.sleep(300.0)

    with pytest.raises(WorkersFailedError, match=r"rank 1 of 2 failed with TypeError: a handle of another kind"):
        run_ranks(2, on_rank, threads=1)
