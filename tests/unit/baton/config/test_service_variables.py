"""Tests that variables that Kubernetes sets for Services are no settings, and that all others
are."""

import pytest

from baton.config import load_settings
from baton.errors import Invalid

OF_ROUTER = {
    "BATON_ROUTER_SERVICE_HOST": "10.96.14.2",
    "BATON_ROUTER_SERVICE_PORT": "8000",
    "BATON_ROUTER_SERVICE_PORT_HTTP": "8000",
    "BATON_ROUTER_PORT": "tcp://10.96.14.2:8000",
    "BATON_ROUTER_PORT_8000_TCP": "tcp://10.96.14.2:8000",
    "BATON_ROUTER_PORT_8000_TCP_PROTO": "tcp",
    "BATON_ROUTER_PORT_8000_TCP_PORT": "8000",
    "BATON_ROUTER_PORT_8000_TCP_ADDR": "10.96.14.2",
}
"""Those of a Service ``baton-router`` with the port 8000, named ``http``."""

OF_SETTINGS_NAMES = {
    "BATON_SERVICE_HOST": "fd00::a",
    "BATON_SERVICE_PORT": "53",
    "BATON_PORT": "udp://[fd00::a]:53",
    "BATON_PORT_53_UDP_PROTO": "udp",
    "BATON_PORT_53_UDP_ADDR": "fd00::a",
    "BATON_OPS_PORT": "sctp://10.96.14.3:9000",
}
"""Those of Services ``baton`` and ``baton-ops``, of which two have the name of a setting."""


@pytest.mark.parametrize("variables", [OF_ROUTER, OF_SETTINGS_NAMES])
def test_variables_of_services_are_skipped(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    expected = load_settings()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load_settings() == expected


def test_setting_beside_variables_of_services_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SERVICE_HOST", "10.96.14.2")
    monkeypatch.setenv("BATON_PORT", "8123")
    assert load_settings().port == 8123


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("BATON_PROT", "8000", "there is no setting 'prot'; did you mean port?"),
        ("BATON_ROUTER_PORT", "8000", "there is no setting 'router_port'"),
        ("BATON_ROUTER_SERVICE_HOST", "router", "there is no setting 'router_service_host'"),
        ("BATON_ROUTER_SERVICE_PORT", "70000", "there is no setting 'router_service_port'"),
        ("BATON_PORT_8000_TCP_PROTO", "TCP", "there is no setting 'port_8000_tcp_proto'"),
        ("BATON_ROUTER_PORT_8000_TCP_NAME", "x", "there is no setting 'router_port_8000_tcp"),
        ("BATON_PORT", "tcp://10.96.14.2", "port is 'tcp://10.96.14.2'"),
        ("BATON_PORT", "http://10.96.14.2:80", "port is 'http://10.96.14.2:80'"),
        ("BATON_PORT", "tcp://router:80", "port is 'tcp://router:80'"),
        ("BATON_HOST", "10.96.14.2", "host is '10.96.14.2': listening beyond loopback"),
    ],
)
def test_other_variables_are_refused_as_before(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(Invalid) as refusal:
        load_settings()
    assert message in str(refusal.value)
