"""Tests with which arguments a worker starts a server."""

import json
from pathlib import Path

import pytest

from attached_worker import own_server
from attached_worker.own_server import UCX_TLS_ON_CPU, OwnServer
from attached_worker.vllm_protocol import CONNECTOR
from baton.config import Settings
from baton.core.states import Role

MODEL = Path("/models/m")


def arguments(role: Role, **settings: object) -> list[str]:
    server = OwnServer(Settings(engine="vllm", **settings), role)  # type: ignore[arg-type]
    return server._arguments(MODEL)


def value_of(flag: str, found: list[str]) -> str:
    (value,) = [each.partition("=")[2] for each in found if each.startswith(f"{flag}=")]
    return value


def test_a_mixed_worker_has_a_plain_server() -> None:
    found = arguments(Role.MIXED, model="/models/m", dtype="bfloat16")
    assert found[:3] == ["serve", "/models/m", "--host=127.0.0.1"]
    assert (value_of("--dtype", found), value_of("--served-model-name", found)) == ("bfloat16", "m")
    assert "--enable-prompt-tokens-details" in found
    assert not any(each.startswith("--kv-transfer-config") for each in found)


@pytest.mark.parametrize(
    ("device", "has_nvidia", "buffer"),
    [("auto", False, "cpu"), ("auto", True, None), ("cpu", True, "cpu")],
)
def test_a_prefill_worker_has_a_connector(
    device: str, has_nvidia: bool, buffer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = Path("/dev/null") if has_nvidia else Path("/nonexistent")
    monkeypatch.setattr(own_server, "NVIDIA_DEVICE", present)
    config = json.loads(value_of("--kv-transfer-config", arguments(Role.PREFILL, device=device)))
    assert config.pop("kv_buffer_device", None) == buffer
    assert config == CONNECTOR


@pytest.mark.parametrize(("device", "transports"), [("cpu", UCX_TLS_ON_CPU), ("cuda", None)])
def test_servers_on_cpus_are_told_their_transports(device: str, transports: str | None) -> None:
    server = OwnServer(Settings(engine="vllm", device=device), Role.PREFILL)
    assert server._environment().get("UCX_TLS") == transports


@pytest.mark.parametrize("own", ['--speculative-config \'{"method":"ngram"}\'', "-sc '{}'"])
def test_speculation_leaves_the_logits_processor_out(own: str) -> None:
    assert value_of("--logits-processors", arguments(Role.MIXED))
    found = arguments(Role.MIXED, engine_args=own)
    assert not any(each.startswith("--logits-processors") for each in found)


def test_the_operators_arguments_come_last() -> None:
    found = arguments(Role.MIXED, engine_args="--max-model-len 64 --dtype=float16", dtype="float32")
    assert found[-3:] == ["--max-model-len", "64", "--dtype=float16"]
