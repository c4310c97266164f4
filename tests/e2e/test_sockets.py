"""Tests that every listening socket of every process is in the table of docs/network.md. (For Ray's
sockets, see test_elastic.)"""

import json
from pathlib import Path

import pytest

from baton.system.portability import uses_linux
from testkit.local_cluster import LocalCluster, local_cluster
from tests import certificates
from tests.e2e.sockets import MEMORY_SOCKET, sockets_by_process

WORKER = {"grpc", "framed", "kv", MEMORY_SOCKET}


def test_the_sockets_of_a_default_cluster_are_documented(cluster: LocalCluster) -> None:
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert sockets_by_process(cluster) == {
        "supervisor": {"control"},
        "redis": {"redis"},
        "kvstore": {"grpc", "kv", "local_rpc", MEMORY_SOCKET},
        "conductor": {"grpc", "framed"},
        "router": {"http"},
    } | dict.fromkeys(workers, WORKER)


@pytest.mark.timeout(120)
def test_the_sockets_of_a_cluster_with_tls_and_a_fabric_are_documented(tmp_path: Path) -> None:
    files = {
        "rpc_tls_certificate": certificates.MEMBER_CERTIFICATE,
        "rpc_tls_key": certificates.MEMBER_KEY,
        "rpc_tls_ca": certificates.AUTHORITY,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {name: tmp_path / name for name in files} | {
        "cluster_secret": "s", "api_keys": "key=tenant", "ops_port": 0,
        **({"nixl_interfaces": "lo"} if uses_linux() else {}),
    }  # fmt: skip
    with local_cluster(settings=settings) as cluster:
        names = sockets_by_process(cluster)
        sockets = json.loads(cluster.baton("doctor", "--sockets", "--json").stdout)
    fabric = {"ucx"} if uses_linux() else set()
    assert names["prefill-0"] == WORKER | {"ops"} | fabric
    assert names["router"] == {"http", "ops"}
    authentication = {each["name"]: each["authentication"] for each in sockets}
    internal = dict.fromkeys(("grpc", "framed", "kv"), "mutual TLS and the cluster secret")
    assert {name: authentication[name] for name in internal} == internal
    assert authentication["http"] == "API keys"
    assert {authentication[name] for name in ("ops", *fabric)} == {"none"}
