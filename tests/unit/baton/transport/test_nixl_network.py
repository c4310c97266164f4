"""Tests that NIXL opens no network sockets by default, since UCX would let anyone who can connect
to them write to any memory of the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.clock import SystemClock
from baton.config import load_settings
from baton.errors import Invalid
from baton.transport import nixl
from baton.transport.host_memory import HostMemory
from baton.transport.nixl import LOCAL_NAME, NixlTransport, check_interfaces
from baton.transport.selection import LOCAL_ONLY, choose_transport, open_transports

SIZE = 1 << 16


@contextmanager
def opened(*interfaces: str) -> Iterator[NixlTransport]:
    memory = HostMemory("region", SIZE)
    (transport,) = open_transports(
        ["nixl"], owner="here", generation=1, region=memory.region, clock=SystemClock(),
        listen_host="127.0.0.1", nixl_interfaces=interfaces,
    ).values()  # fmt: skip
    assert isinstance(transport, NixlTransport)
    try:
        yield transport
    finally:
        transport.close()


def network_sockets() -> set[Any]:
    return set(psutil.Process().net_connections("inet"))


@pytest.mark.parametrize("tls", ["", "tcp", "all"])
def test_nixl_without_an_interface_opens_no_sockets(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL opens no network sockets, whatever the environment variable UCX_TLS is set to."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    before = network_sockets()
    with opened() as transport:
        assert network_sockets() - before == set()
        assert transport.capabilities().local_only
        assert transport.export().transport == LOCAL_NAME
    assert os.environ.get("UCX_TLS", "") == tls


@pytest.mark.parametrize(
    ("on_device", "has_gpu", "tls"),
    [
        (False, False, "posix,cma,self"),
        (False, True, "posix,cma,self,cuda_copy"),
        (True, True, "posix,cma,self,cuda"),
    ],
)
def test_nixl_on_a_host_with_a_gpu_gets_the_transports_that_it_requires(
    on_device: bool, has_gpu: bool, tls: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(nixl, "GPU_FILE", tmp_path if has_gpu else tmp_path / "none")
    assert nixl._ucx_settings((), on_device) == {"UCX_TLS": tls}


def test_nixl_with_an_interface_listens_only_there() -> None:
    before = network_sockets()
    with opened("lo") as transport:
        hosts = {each.laddr.ip for each in network_sockets() - before}
        assert hosts == {"127.0.0.1"}
        assert not transport.capabilities().local_only
        assert transport.export().transport == "nixl"


def test_memory_files_of_ucx_are_private() -> None:
    with opened():
        links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        files = [path for path in links if "ucx_shm" in str(path.readlink())]
        assert files
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_local_only_nixl_is_not_chosen_between_hosts() -> None:
    ours = ("shm", LOCAL_NAME, "grpc")
    assert LOCAL_NAME in LOCAL_ONLY
    assert choose_transport(ours, ours, same_host=False) == "grpc"
    assert choose_transport(ours[1:], ours[1:], same_host=True) == LOCAL_NAME
    networked = ("shm", "nixl", "grpc")
    assert choose_transport(networked, networked, same_host=False) == "nixl"
    assert choose_transport(networked, ours, same_host=False) == "grpc"


def test_unknown_interface_is_reported() -> None:
    with pytest.raises(Invalid, match=r"no network device 'fabric7:1'; it has .*lo"):
        check_interfaces(["lo", "fabric7:1"])


@pytest.mark.parametrize("lock", [{}, {"cluster_secret": "s"}])
def test_nixl_network_needs_explicit_permission(lock: dict[str, str]) -> None:
    with pytest.raises(Invalid, match="Any machine on that network can read prompts and answers"):
        load_settings(nixl_interfaces="mlx5_0:1", **lock)
    settings = load_settings(nixl_interfaces="mlx5_0:1,eth1", nixl_private_network=True, **lock)
    assert settings.nixl_interfaces == ("mlx5_0:1", "eth1")
    assert load_settings(nixl_interfaces="lo").nixl_interfaces == ("lo",)
