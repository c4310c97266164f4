"""Tests simulations in several processes: the same results as in one, what is simulated ahead, and
the end of the processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from baton.errors import BatonError, Invalid
from baton.traces.synthetic import TRACE_GENERATORS
from baton.traces.trace import Trace
from command_line.main import run_command_line
from simulator.cluster import SimulatedCluster
from simulator.cluster_config import ClusterConfig
from simulator.goodput import highest_rate
from simulator.rate_search import next_probes
from simulator.result import summarize
from simulator.simulated_hardware import SimulatedHardware
from simulator.simulation_pool import (
    MIN_REQUESTS_FOR_PROCESSES,
    Simulation,
    SimulationPool,
    choose_num_processes,
)

HARDWARE = SimulatedHardware(
    model="qwen3-8b", gpu="H100", gpus_per_worker=1, costs=None, link_gbytes=50.0,
    host_gbytes=50.0, device_tokens=None, node_tokens=None, hosts=0, order="deadline",
    report_seconds=0.0, conductors=1, ttft_slo=2.0, tbt_slo=0.05,
)  # fmt: skip


def short_trace() -> Trace:
    return TRACE_GENERATORS["chat"](20, 10.0, 3, 1.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return short_trace()


@pytest.fixture(scope="module")
def config() -> ClusterConfig:
    return HARDWARE.config(1, 1)


def ignore(text: str) -> None:
    """Show no progress."""


# -- what a search needs next --------------------------------------------------------------


def search_from(start: float, meets: Callable[[float], bool]) -> float:
    return highest_rate(meets, start, 1000.0)


def probes(known: Mapping[float, bool], most: int, *starts: float) -> list[float]:
    return next_probes([partial(search_from, start) for start in starts], known, most)


def test_first_probes_are_those_that_are_needed_now() -> None:
    """With 4 met, the search doubles; with 4 missed, it halves."""
    assert probes({}, 1, 4.0) == [4.0]
    assert probes({}, 3, 4.0) == [4.0, 2.0, 8.0]
    assert probes({4.0: True}, 4, 4.0) == [8.0, 32**0.5, 16.0, pytest.approx(4 * 2**0.25)]
    assert probes({4.0: True, 8.0: False}, 1, 4.0) == [32**0.5]


def test_searches_take_turns() -> None:
    """Nobody's assumption comes before what another search needs."""
    assert probes({}, 5, 4.0, 100.0) == [4.0, 100.0, 2.0, 50.0, 8.0]
    finished = {0.5**power: False for power in range(20)}
    assert probes(finished, 3, 1.0) == []
    assert probes(finished, 3, 1.0, 100.0) == [100.0, 50.0, 200.0]


@pytest.mark.parametrize("most", [1, 2, 7])
@pytest.mark.parametrize("limit", [0.0, 0.3, 3.0, 3.9, 4.0, 77.0, 5000.0])
def test_a_search_ahead_finds_what_the_search_finds(limit: float, most: int) -> None:
    """Each probe is asked for once, and one at a time needs no more than the search itself."""
    known: dict[float, bool] = {}
    while wanted := probes(known, most, 4.0):
        assert len(wanted) <= most and not known.keys() & set(wanted)
        known |= {rate: rate <= limit for rate in wanted}
    assert search_from(4.0, known.__getitem__) == search_from(4.0, lambda rate: rate <= limit)
    if most == 1:
        asked: dict[float, bool] = {}
        search_from(4.0, lambda rate: asked.setdefault(rate, rate <= limit))
        assert list(known) == list(asked)


# -- processes -----------------------------------------------------------------------------


def median_ttft(cluster: SimulatedCluster) -> tuple[int, float | None]:
    return os.getpid(), summarize(cluster).ttft_seconds["p50"]


def simulations(config: ClusterConfig) -> list[Simulation[tuple[int, float | None]]]:
    return [
        Simulation(label=f"run {rate}", config=config, judge=median_ttft, rate_rps=float(rate))
        for rate in (5, 1, 40, 20, 10)
    ]


def test_results_have_the_order_of_their_simulations(trace: Trace, config: ClusterConfig) -> None:
    shown: list[str] = []
    with SimulationPool(trace, 1) as here, SimulationPool(trace, 2) as there:
        expected = here.run_all(simulations(config), ignore)
        found = there.run_all(simulations(config), shown.append)
    assert [value for _, value in found] == [value for _, value in expected]
    assert len({value for _, value in found}) == 5
    assert {process for process, _ in expected} == {os.getpid()}
    assert os.getpid() not in {process for process, _ in found}
    assert shown == ["run 5", "run 1", "run 40", "run 20", "run 10"]
    assert multiprocessing.active_children() == []


def fail(cluster: SimulatedCluster) -> None:
    raise AssertionError("a request did not end")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_names_its_simulation(
    trace: Trace, config: ClusterConfig, num_processes: int
) -> None:
    with SimulationPool(trace, num_processes) as pool:
        with pytest.raises(AssertionError, match="a request did not end") as failed:
            pool.run_all([Simulation(label="3+5 workers", config=config, judge=fail)], ignore)
    assert failed.value.__notes__ == ["This happened in the simulation of 3+5 workers."]
    assert multiprocessing.active_children() == []


def die(cluster: SimulatedCluster) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_an_error_that_names_its_simulation(
    trace: Trace, config: ClusterConfig
) -> None:
    with SimulationPool(trace, 2) as pool:
        with pytest.raises(BatonError, match="a process that simulated 3\\+5 workers was killed"):
            pool.run_all([Simulation(label="3+5 workers", config=config, judge=die)], ignore)


def hang(cluster: SimulatedCluster) -> None:
    signal.pause()


def test_the_end_does_not_wait_for_what_nobody_needs(trace: Trace, config: ClusterConfig) -> None:
    """The search ends with its first result, while another simulation hangs."""
    judges = {"quick": median_ttft, "slow": hang}

    def simulation_of(key: str) -> Simulation[object]:
        return Simulation(label=key, config=config, judge=judges[key])

    with SimulationPool(trace, 2) as pool:
        found = pool.run_wanted(
            lambda known: [] if "quick" in known else ["slow", "quick"], simulation_of, ignore
        )
        assert list(found) == ["quick"]
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
from simulator.simulation_pool import SimulationPool
from tests.unit.simulator.test_simulation_pool import hanging_simulations, short_trace

with SimulationPool(short_trace(), 2) as pool:
    pool.run_all(hanging_simulations(sys.argv[1]), lambda label: None)
"""


def hang_visibly(folder: str, cluster: SimulatedCluster) -> None:
    Path(folder, str(os.getpid())).touch()
    signal.pause()


def hanging_simulations(folder: str) -> list[Simulation[None]]:
    judge, config = partial(hang_visibly, folder), HARDWARE.config(1, 1)
    return [Simulation(label=f"run {n}", config=config, judge=judge) for n in range(3)]


@contextmanager
def simulations_that_hang(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process whose children write files named by their process ids to ``folder``, and then
    hang. Whatever is left of them is killed at the end."""
    command = [sys.executable, "-c", CTRL_C, str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.timeout(60)
def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    """The terminal sends SIGINT to all of them, and only the parent handles it."""
    with simulations_that_hang(tmp_path) as process:
        while len(list(tmp_path.iterdir())) < 2:
            assert process.poll() is None
        children = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert err.count(b"Traceback") == err.count(b"KeyboardInterrupt") == 1
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_a_killed_parent_takes_its_processes_with_it(tmp_path: Path) -> None:
    with simulations_that_hang(tmp_path) as process:
        while len(list(tmp_path.iterdir())) < 2:
            assert process.poll() is None
        children = [psutil.Process(int(path.name)) for path in tmp_path.iterdir()]
        process.kill()
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_number_of_processes() -> None:
    assert choose_num_processes(3, 1) == 3
    assert choose_num_processes(None, MIN_REQUESTS_FOR_PROCESSES - 1) == 1
    assert choose_num_processes(None, MIN_REQUESTS_FOR_PROCESSES) >= 1
    with pytest.raises(Invalid, match="--processes is 257; it must be from 1 to 256"):
        choose_num_processes(257, 1)


def test_a_plan_is_the_same_with_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for num_processes in ("1", "3"):
        command = ["baton", "plan", "--gpus", "3", "--gpus-per-worker", "1", "--gpu", "L40S",
                   "--rate", "3", "--kind", "rag", "--requests", "100", "--json",
                   "--processes", num_processes]  # fmt: skip
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit, match="0"):
            run_command_line()
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert len({each["rate_rps"] for each in json.loads(outputs[0])["highest_rates"]}) == 3
