"""Tests the tenants file: valid and invalid contents, and reloading."""

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.core.api_key import api_key_digest, hash_api_key, new_api_key, parse_hashed_api_key
from baton.core.ids import TenantId
from baton.core.priority import Priority
from baton.errors import Invalid
from router.tenants.metrics import TenantMetrics
from router.tenants.tenant import Tenant, TenantLimits, TokenPrices
from router.tenants.tenant_directory import TenantDirectory
from router.tenants.tenants_file import load_tenants_file, parse_tenants_file
from router.tenants.tenants_file_watcher import TenantsFileWatcher

KEY = new_api_key(bytes(32))
ACME = TenantId("acme")


def test_keys_are_stored_as_digests() -> None:
    """Keys and digests are compared with committed test vectors: with other digests, every tenants
    file would have to be rewritten."""
    assert KEY == "sk-baton-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    text = "sha256:1a25f28a535bb1a75f5efba1d0bfddfa74f57044e89cf6e8f33ae38437b5c3ef"
    assert hash_api_key(KEY) == text
    assert parse_hashed_api_key(hash_api_key(KEY)) == api_key_digest(KEY)
    assert parse_hashed_api_key(text[:-1]) is None
    assert parse_hashed_api_key(text.upper()) is None


def test_valid_tenants_file() -> None:
    directory = parse_tenants_file(
        f"""
defaults:
  priority: low
  limits: {{requests_per_minute: 60, tokens_per_minute: 1000}}
  prices: {{input: 1, cached: 0.1, output: 4}}
tenants:
  acme:
    keys: ["{hash_api_key(KEY)}"]
    salt: shared
    priority: high
    weight: 2
    limits: {{requests_per_minute: 120, concurrent_requests: 8}}
  guest: {{}}
""".encode()
    )
    prices = TokenPrices(1.0, 0.1, 4.0)
    assert directory.tenants == {
        "acme": Tenant(ACME, "shared", Priority.HIGH, 2.0, TenantLimits(120, 1000, 8), prices),
        "guest": Tenant(
            TenantId("guest"), priority=Priority.LOW, limits=TenantLimits(60, 1000), prices=prices
        ),
    }
    assert directory.keys == {api_key_digest(KEY): ACME}
    assert directory.needs_keys
    assert directory.is_shared


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the file must be a mapping with `tenants`"),
        ("tenants: 5", "tenants is 5"),
        ("tenants: [", "the file is not valid YAML"),
        ("more: 1\ntenants: {}", "unknown field 'more'"),
        ("tenants: {a: {limit: 1}}", "tenant 'a': unknown field 'limit'"),
        ("tenants: {a: }", "tenant 'a': the entry is None"),
        ("tenants: {a b: {}}", "tenant 'a b': the name is 'a b'"),
        ("tenants: {a: {}, a: {}}", "the name 'a' occurs twice in one mapping, the second time at"),
        ("tenants: {a: {keys: [plaintext]}}", "tenant 'a': keys.0 is wrong: an API key must look"),
        ("tenants: {a: {salt: 5}}", "tenant 'a': salt is wrong"),
        ("tenants: {a: {priority: urgent}}", "priority is 'urgent': a priority must be one of"),
        ("tenants: {a: {priority: [high]}}", "must be one of high, normal"),
        ("tenants: {a: {weight: 0}}", "tenant 'a': weight is 0"),
        ("tenants: {a: {weight: .inf}}", "tenant 'a': weight is inf"),
        ("tenants: {a: {limits: {requests_per_minute: 0}}}", "limits.requests_per_minute is 0"),
        ("tenants: {a: {limits: {requests_per_minute: '9'}}}", "limits.requests_per_minute is '9'"),
        ("tenants: {a: {prices: {input: -1}}}", "prices.input is -1"),
        ("tenants: {a: {strict_fields: 'yes'}}", "strict_fields is 'yes'"),
        ("defaults: {salt: x}\ntenants: {}", "unknown field 'defaults.salt'"),
    ],
)
def test_invalid_tenants_files_are_rejected(text: str, complaint: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_tenants_file(text.encode())
    assert complaint in str(refusal.value)
    assert "plaintext" not in str(refusal.value)


def test_key_belongs_to_one_tenant() -> None:
    text = (
        f"tenants: {{a: {{keys: ['{hash_api_key(KEY)}']}}, b: {{keys: ['{hash_api_key(KEY)}']}}}}"
    )
    with pytest.raises(Invalid, match="tenants 'a' and 'b' have the same key sha256:"):
        parse_tenants_file(text.encode())
    directory = parse_tenants_file(f"tenants: {{a: {{keys: ['{hash_api_key(KEY)}']}}}}".encode())
    assert directory.with_keys({KEY: "a"}).keys == directory.keys
    with pytest.raises(Invalid, match="have the same key"):
        directory.with_keys({KEY: "b"})


def test_tenants_file_without_keys_admits_no_request() -> None:
    assert parse_tenants_file(b"tenants: {}").needs_keys
    assert not TenantDirectory().needs_keys


class FileWatch:
    """A watched file, and the tenant directories that were loaded from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directories: list[TenantDirectory] = []
        self.registry = CollectorRegistry()
        metrics = TenantMetrics(self.registry)
        self.file = TenantsFileWatcher(path, self.directories.append, metrics, ManualClock())

    @property
    def failures(self) -> float | None:
        return self.registry.get_sample_value("baton_tenants_file_failures_total")

    @property
    def stale(self) -> float | None:
        return self.registry.get_sample_value("baton_tenants_file_stale")

    def names(self) -> list[str]:
        return list(self.directories[-1].tenants)


async def test_changed_file_is_reloaded(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {a: {}}")
    watch = FileWatch(path)
    watch.file.load()
    await watch.file.reload_if_changed()
    assert len(watch.directories) == 1
    path.write_text("tenants: {a: {}, b: {}}")
    await watch.file.reload_if_changed()
    assert watch.names() == ["a", "b"]
    new = tmp_path / "new.yaml"  # editors save files like this
    new.write_text("tenants: {a: {}, c: {}}")
    new.rename(path)
    await watch.file.reload_if_changed()
    assert watch.names() == ["a", "c"]
    assert len(watch.directories) == 3


async def test_invalid_file_changes_nothing_until_it_is_fixed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {a: {}}")
    watch = FileWatch(path)
    watch.file.load()
    path.write_text("tenants: {a: {weight: heavy}}")
    await watch.file.reload_if_changed()
    await watch.file.reload_if_changed()
    assert (len(watch.directories), watch.failures, watch.stale) == (1, 1, 1)
    path.unlink()
    await watch.file.reload_if_changed()
    assert (len(watch.directories), watch.failures, watch.stale) == (1, 2, 1)
    path.write_text("tenants: {b: {}}")
    await watch.file.reload_if_changed()
    assert (watch.names(), watch.failures, watch.stale) == (["b"], 2, 0)


async def test_mounted_secret_is_reloaded_when_its_link_changes(tmp_path: Path) -> None:
    """Kubernetes mounts a secret as a link NAME → ..data/NAME; ..data is a link to a new folder for
    each version."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tenants.yaml").write_text(f"tenants: {{{version}: {{}}}}")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    watch = FileWatch(tmp_path / "tenants.yaml")
    watch.file.load()
    (tmp_path / "..turn").symlink_to("two")
    (tmp_path / "..turn").rename(tmp_path / "..data")
    await watch.file.reload_if_changed()
    assert [list(directory.tenants) for directory in watch.directories] == [["one"], ["two"]]


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    with pytest.raises(Invalid, match=r"tenants.yaml: No such file"):
        load_tenants_file(path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(Invalid, match=r"tenants.yaml: the file is not valid YAML"):
        load_tenants_file(path)
    path.write_text("tenants: {a: {}, a: {}}")
    with pytest.raises(Invalid, match=r"tenants\.yaml: the name 'a' occurs twice"):
        load_tenants_file(path)
    os.truncate(path, 17 * 2**20)
    with pytest.raises(Invalid, match=r"tenants\.yaml: the file is larger than"):
        load_tenants_file(path)
