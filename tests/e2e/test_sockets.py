"""Every listening socket of every process is in docs/network.md's table. (Ray's: test_elastic.)"""

import json
from pathlib import Path

import pytest

from tests import certificates
from tests.e2e.sockets import documented
from tools.local_cluster import LocalCluster, local_cluster

WORKER = {"grpc", "line", "kv", "ucx_wakeup"}


def test_a_plain_cluster(cluster: LocalCluster) -> None:
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert documented(cluster) == {
        "supervisor": {"control"},
        "redis": {"redis"},
        "kvstore": {"grpc", "kv", "local_rpc", "ucx_wakeup"},
        "conductor": {"grpc", "line"},
        "router": {"http"},
    } | dict.fromkeys(workers, WORKER)


@pytest.mark.timeout(120)
def test_a_cluster_with_every_lock_and_a_fabric(tmp_path: Path) -> None:
    files = {
        "rpc_tls_certificate": certificates.MEMBER_CERTIFICATE,
        "rpc_tls_key": certificates.MEMBER_KEY,
        "rpc_tls_ca": certificates.AUTHORITY,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {name: tmp_path / name for name in files} | {
        "cluster_secret": "s", "api_keys": "key=tenant", "ops_port": 0, "nixl_interfaces": "lo",
    }  # fmt: skip
    with local_cluster(settings=settings) as cluster:
        names = documented(cluster)
        told = json.loads(cluster.baton("doctor", "--sockets", "--json").stdout)
    assert names["prefill-0"] == WORKER | {"ucx", "ops"}
    assert names["router"] == {"http", "ops"}
    locks = {each["name"]: each["authentication"] for each in told}
    members = dict.fromkeys(("grpc", "line", "kv"), "mutual TLS and the cluster secret")
    assert {name: locks[name] for name in members} == members
    assert (locks["http"], locks["ops"], locks["ucx"]) == ("API keys", "none", "none")
