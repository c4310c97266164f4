"""Tests that `baton up` soon exits with a one-line error if a setting prevents its workers from
running."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.network.free_port import free_port
from testkit.local_cluster import BATON
from tests.vllm.e2e.vllm_cluster import vllm_settings

pytestmark = pytest.mark.timeout(300)


def failed_start(home: Path, model: Path, **settings: object) -> str:
    """Run `baton up` in the foreground, which must fail. Return the last line of its stderr."""
    given = vllm_settings(**settings)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BATON_")},
        **{f"BATON_{name.upper()}": str(value) for name, value in given.items()},
        "BATON_HOME": str(home),
    }
    command = [*BATON, "up", "--model", str(model), "--port", str(free_port())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "is ready" not in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "engine_python is '/nowhere/python': [Errno 2] No such file"),
        (sys.executable, "engine is vllm, but this Python has no vLLM: set engine_python"),
    ],
)
def test_wrong_python(python: str, message: str, models: dict[str, Path], tmp_path: Path) -> None:
    assert message in failed_start(tmp_path, models["llama"], engine_python=python)


def test_a_model_that_vllm_does_not_know(models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["llama"], model)
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["UnheardOfForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    assert "UnheardOfForCausalLM" in failed_start(tmp_path / "home", model)


def test_a_wrong_argument(models: dict[str, Path], tmp_path: Path) -> None:
    line = failed_start(tmp_path, models["llama"], engine_args="--no-such-flag")
    assert "engine_args: unrecognized arguments: --no-such-flag" in line
