"""Tests the command line: exit codes, one-line errors, and that commands import torch only if they
need it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.states import Role, WorkerState
from command_line.bench import default_target
from command_line.status import engine_lines, settings_lines
from orchestrator.cluster_state import ClusterFolder, ClusterState, ProcessState
from tests.baton_command import Ask, ask

__all__ = ["ask"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "BATON_HOME": str(tmp_path)}


def baton(
    environment: dict[str, str], *arguments: str, **more: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "baton", *arguments],
        env={**environment, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status"], 1, "no cluster named 'default' is running here: start it with `baton up`"),
        (["scale", "prefill=2"], 1, "no cluster named 'default'"),
        (["scale", "prefill"], 2, "with N from 0 to 256, not 'prefill'"),
        (["scale", "decode=-1"], 2, "not 'decode=-1'"),
        (["up", "--on", "mars"], 2, "on is 'mars': input should be 'local' or 'ray'"),
        (["up", "--ray-address", "auto"], 2, "ray_address is 'auto', which needs --on ray"),
        (["up", "--on", "ray", "--ray-address", "x"], 2, "must be auto, or HOST:PORT"),
        (["up", "--prefill", "-1"], 2, "prefill is -1: input should be greater than or equal to 0"),
        (["up", "--prefill", "0"], 2, "prefill=0 decode=1 mixed=0 could not serve requests"),
        (["up", "--prefill", "0", "--decode", "0"], 2, "prefill, decode and mixed are all 0"),
        (["up", "--model", "./nowhere"], 2, "model is './nowhere'; it must be a directory"),
        (
            ["up", "--engine", "vllm", "--engine-python", "/nowhere"],
            2,
            "engine_python is '/nowhere'",
        ),
        (["generate"], 2, "generate needs --prompt TEXT or --prompt-file FILE"),
        (
            ["generate", "--prompt", "x", "--model", "/nowhere"],
            2,
            "model is '/nowhere'; it must be a directory",
        ),
        (["explain", "some-request"], 1, "no cluster named 'default'"),
    ],
)
def test_invalid_arguments_exit_with_one_line(
    environment: dict[str, str],
    arguments: list[str],
    code: int,
    message: str,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATON_HOME", environment["BATON_HOME"])
    found, out, err = ask(*arguments)
    assert found == code, err
    assert message in err
    assert len(err.splitlines()) == 1, err
    assert not out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "cook"], 2, "unknown role 'cook'; known roles: router, conductor"),
        (["serve", "conductor"], 2, "redis_url is not set; set it, e.g. BATON_REDIS_URL="),
        (["serve", "router", "--set", "prot=1"], 2, "did you mean port"),
        (["serve", "router", "--set", "port"], 2, "--set"),
        (["up", "--on", "ray", "--ray-address", "127.0.0.1:1"], 1, "can't be reached"),
        (["up", "--on", "ray", "--set", "ray_worker_cpus=9999"], 1, "2 workers need 19998 CPU"),
        (["up", "--engine", "vllm"], 2, "has no vLLM: set engine_python to"),
        (["up", "--engine-python", "python"], 2, "engine_python is only read with engine=vllm"),
        (["up", "--engine-args", "--seed 1"], 2, "engine_args is only read with engine=vllm"),
        (["up", "--redis", "http://x"], 2, "redis_url"),
        (["up", "--redis", "redis://127.0.0.1:1/0", "--port", "0"], 1, "127.0.0.1:1 failed"),
    ],
)
def test_programs_that_can_not_start_exit_with_one_line(
    environment: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    answer = baton(environment, *arguments)
    assert answer.returncode == code, answer.stderr
    assert message in answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert "Traceback" not in answer.stdout


@pytest.mark.parametrize("arguments", ["fly", "up --speed 9", "generate --top-p 7"])
def test_unknown_commands_and_options_print_the_usage(
    environment: dict[str, str], arguments: str
) -> None:
    answer = baton(environment, *arguments.split())
    assert answer.returncode == 2
    assert "Usage: baton" in answer.stderr


def test_down_without_a_running_cluster_succeeds(environment: dict[str, str]) -> None:
    answer = baton(environment, "down", "--name", "other")
    assert answer.returncode == 0
    assert answer.stdout == "no cluster named 'other' is running\n"


def test_port_in_use_is_reported_in_one_line(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        answer = baton(environment, "up", "--detach", "--port", port)
    assert answer.returncode == 1
    assert f"port {port} on 127.0.0.1 can't be used" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_unknown_environment_variable_is_reported_before_anything_starts(
    environment: dict[str, str],
) -> None:
    answer = baton(environment, "up", BATON_PREFIL="2")
    assert answer.returncode == 2
    assert "environment variable BATON_PREFIL" in answer.stderr


def test_light_commands_import_neither_torch_nor_grpc(environment: dict[str, str]) -> None:
    code = (
        "import sys; from command_line.main import app; "
        "from typer.testing import CliRunner; CliRunner().invoke(app, ['status']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'grpc', 'transformers')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert answer.returncode == 0


def test_status_json_has_no_secrets(environment: dict[str, str], tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "default")
    folder.acquire()
    processes = [ProcessState("prefill-0", "prefill", 7, "serving", "127.0.0.1:9")]
    folder.write_state(
        ClusterState(
            os.getpid(), "http://127.0.0.1:8000", "redis://x", "default",
            cluster_secret="hush", ready=True, processes=processes,
        )
    )  # fmt: skip
    answer = baton(environment, "status", "--json")
    folder.release()
    assert answer.returncode == 0
    assert "hush" not in answer.stdout
    status = json.loads(answer.stdout)
    assert (status["ready"], status["url"]) == (True, "http://127.0.0.1:8000")
    process = status["processes"][0]
    wanted = {"id": "prefill-0", "role": "prefill", "pid": 7, "state": "serving"}
    assert wanted.items() <= process.items()
    assert process["address"] == "127.0.0.1:9"


def test_status_describes_changed_settings() -> None:
    processes = [
        ProcessState(
            "router", "router", 7, "serving", settings={"changed": {"log_level": "debug"}}
        ),
        ProcessState("prefill-0", "prefill", 8, "serving"),
        ProcessState("decode-0", "decode", 9, "serving", settings={"restart_needed": ["model"]}),
        ProcessState("decode-1", "decode", 9, "serving", settings={"restart_needed": ["model"]}),
    ]
    rejected = {"rejected": "port is 'x'", "restart_needed": ["a", "b"]}
    state = ClusterState(1, "http://x", "redis://x", "default", settings=rejected)
    state.processes = processes
    assert settings_lines(state) == [
        "settings of router: log_level is now debug",
        "settings of decode-0, decode-1: restart needed: model",
        "settings of baton up: restart needed: a, b; config file rejected: port is 'x'",
    ]
    assert settings_lines(ClusterState(1, "http://x", "redis://x", "default")) == []


def test_status_says_what_computes_in_the_workers() -> None:
    def member(name: str, role: Role, computed_by: str = "") -> Member:
        return Member(
            WorkerId(name), role, "", Incarnation(1), WorkerState.READY, computed_by=computed_by
        )

    members = [
        member("prefill-1", Role.PREFILL, "vLLM 0.32.0"),
        member("prefill-0", Role.PREFILL, "vLLM 0.32.0"),
        member("decode-0", Role.DECODE, "torch"),
        member("router", Role.ROUTER),
    ]
    assert engine_lines({each.id: each for each in members}) == [
        "decode-0: torch",
        "prefill-0, prefill-1: vLLM 0.32.0",
    ]


def test_generate_json_prints_one_object_per_prompt(environment: dict[str, str]) -> None:
    arguments = ["--max-tokens", "5", "--json", "--prompt", "import ", "--prompt", "def f("]
    answer = baton(environment, "generate", *arguments)
    assert answer.returncode == 0, answer.stderr
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line.keys() >= {"prompt_token_ids", "token_ids", "text", "finish_reason"}
        assert (len(line["token_ids"]), line["finish_reason"]) == (5, "length")


def test_help_names_every_command(environment: dict[str, str]) -> None:
    answer = baton(environment, "--help")
    assert answer.returncode == 0
    for command in ("up", "down", "status", "serve", "generate", "scale", "drain", "explain"):
        assert command in answer.stdout


def test_doctor_reports_a_healthy_installation(environment: dict[str, str]) -> None:
    answer = baton(environment, "doctor")
    assert answer.returncode == 0, answer.stdout
    assert all(line.startswith("ok") for line in answer.stdout.splitlines())


def test_doctor_checks_the_python_that_should_have_vllm(environment: dict[str, str]) -> None:
    answer = baton(environment, "doctor", BATON_ENGINE="vllm")
    assert answer.returncode == 1
    assert "MISSING  vllm: engine is vllm, but " in answer.stdout


@pytest.mark.parametrize(
    ("ca", "trusted"), [(None, Path("/own.pem")), (Path("/ca.pem"), Path("/ca.pem"))]
)
def test_bench_targets_the_running_cluster_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ca: Path | None, trusted: Path
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert default_target(ca) == ("http://127.0.0.1:8000", ca)
    folder = ClusterFolder(tmp_path, "default")
    folder.acquire()
    folder.write_state(
        ClusterState(
            os.getpid(), "https://127.0.0.1:9000", "redis://x", "default", cluster_secret="s",
            ready=True, processes=[], tls_certificate="/own.pem",
        )
    )  # fmt: skip
    assert default_target(ca) == ("https://127.0.0.1:9000", trusted)
    folder.release()
