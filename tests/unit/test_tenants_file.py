"""The tenants file: what it may say, what is refused and how, and reading it again."""

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


def test_a_key_is_kept_as_its_digest() -> None:
    """Committed vectors: with another digest, every file would have to be written anew."""
    assert KEY == "sk-baton-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    text = "sha256:1a25f28a535bb1a75f5efba1d0bfddfa74f57044e89cf6e8f33ae38437b5c3ef"
    assert hash_api_key(KEY) == text
    assert parse_hashed_api_key(hash_api_key(KEY)) == api_key_digest(KEY)
    assert parse_hashed_api_key(text[:-1]) is None
    assert parse_hashed_api_key(text.upper()) is None


def test_what_a_file_may_say() -> None:
    roll = parse_tenants_file(
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
    assert roll.tenants == {
        "acme": Tenant(ACME, "shared", Priority.HIGH, 2.0, TenantLimits(120, 1000, 8), prices),
        "guest": Tenant(
            TenantId("guest"), priority=Priority.LOW, limits=TenantLimits(60, 1000), prices=prices
        ),
    }
    assert roll.keys == {api_key_digest(KEY): ACME}
    assert roll.needs_keys
    assert roll.is_shared


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be a mapping with `tenants`"),
        ("tenants: 5", "tenants is 5"),
        ("tenants: [", "not YAML"),
        ("more: 1\ntenants: {}", "there is no field 'more'"),
        ("tenants: {a: {limit: 1}}", "tenant 'a': there is no field 'limit'"),
        ("tenants: {a: }", "tenant 'a': what it gets is None"),
        ("tenants: {a b: {}}", "tenant 'a b': the name is 'a b'"),
        ("tenants: {a: {}, a: {}}", "'a' stands there twice, again at line 1"),
        ("tenants: {a: {keys: [plaintext]}}", "tenant 'a': keys.0 is wrong: must look like sha256"),
        ("tenants: {a: {salt: 5}}", "tenant 'a': salt is wrong"),
        ("tenants: {a: {priority: urgent}}", "priority is 'urgent': must be one of high, normal"),
        ("tenants: {a: {priority: [high]}}", "must be one of high, normal"),
        ("tenants: {a: {weight: 0}}", "tenant 'a': weight is 0"),
        ("tenants: {a: {weight: .inf}}", "tenant 'a': weight is inf"),
        ("tenants: {a: {limits: {requests_per_minute: 0}}}", "limits.requests_per_minute is 0"),
        ("tenants: {a: {limits: {requests_per_minute: '9'}}}", "limits.requests_per_minute is '9'"),
        ("tenants: {a: {prices: {input: -1}}}", "prices.input is -1"),
        ("defaults: {salt: x}\ntenants: {}", "there is no field 'defaults.salt'"),
    ],
)
def test_what_a_file_may_not_say(text: str, complaint: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_tenants_file(text.encode())
    assert complaint in str(refusal.value)
    assert "plaintext" not in str(refusal.value)


def test_a_key_has_one_tenant() -> None:
    text = (
        f"tenants: {{a: {{keys: ['{hash_api_key(KEY)}']}}, b: {{keys: ['{hash_api_key(KEY)}']}}}}"
    )
    with pytest.raises(Invalid, match="tenants 'a' and 'b' have the same key sha256:"):
        parse_tenants_file(text.encode())
    roll = parse_tenants_file(f"tenants: {{a: {{keys: ['{hash_api_key(KEY)}']}}}}".encode())
    assert roll.with_keys({KEY: "a"}).keys == roll.keys
    with pytest.raises(Invalid, match="have the same key"):
        roll.with_keys({KEY: "b"})


def test_a_file_without_keys_lets_nobody_in() -> None:
    assert parse_tenants_file(b"tenants: {}").needs_keys
    assert not TenantDirectory().needs_keys


class Watched:
    """A file that is watched, and who was let in by it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rolls: list[TenantDirectory] = []
        self.registry = CollectorRegistry()
        metrics = TenantMetrics(self.registry)
        self.file = TenantsFileWatcher(path, self.rolls.append, metrics, ManualClock())

    @property
    def failures(self) -> float | None:
        return self.registry.get_sample_value("baton_tenants_file_failures_total")

    @property
    def stale(self) -> float | None:
        return self.registry.get_sample_value("baton_tenants_file_stale")

    def names(self) -> list[str]:
        return list(self.rolls[-1].tenants)


async def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {a: {}}")
    watched = Watched(path)
    watched.file.read()
    await watched.file.look()
    assert len(watched.rolls) == 1
    path.write_text("tenants: {a: {}, b: {}}")
    await watched.file.look()
    assert watched.names() == ["a", "b"]
    new = tmp_path / "new.yaml"  # as editors do
    new.write_text("tenants: {a: {}, c: {}}")
    new.rename(path)
    await watched.file.look()
    assert watched.names() == ["a", "c"]
    assert len(watched.rolls) == 3


async def test_a_broken_file_changes_nothing_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: {a: {}}")
    watched = Watched(path)
    watched.file.read()
    path.write_text("tenants: {a: {weight: heavy}}")
    await watched.file.look()
    await watched.file.look()
    assert (len(watched.rolls), watched.failures, watched.stale) == (1, 1, 1)
    path.unlink()
    await watched.file.look()
    assert (len(watched.rolls), watched.failures, watched.stale) == (1, 2, 1)
    path.write_text("tenants: {b: {}}")
    await watched.file.look()
    assert (watched.names(), watched.failures, watched.stale) == (["b"], 2, 0)


async def test_a_mounted_secret_is_replaced_by_turning_a_link(tmp_path: Path) -> None:
    """As Kubernetes does: NAME → ..data/NAME, and ..data → a folder for each version."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tenants.yaml").write_text(f"tenants: {{{version}: {{}}}}")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "tenants.yaml").symlink_to("..data/tenants.yaml")
    watched = Watched(tmp_path / "tenants.yaml")
    watched.file.read()
    (tmp_path / "..turn").symlink_to("two")
    (tmp_path / "..turn").rename(tmp_path / "..data")
    await watched.file.look()
    assert [list(roll.tenants) for roll in watched.rolls] == [["one"], ["two"]]


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    with pytest.raises(Invalid, match=r"tenants.yaml: No such file"):
        load_tenants_file(path)
    path.write_bytes(b"\xff\x00")
    with pytest.raises(Invalid, match=r"tenants.yaml: not YAML"):
        load_tenants_file(path)
    os.truncate(path, 17 * 2**20)
    with pytest.raises(Invalid, match="larger than"):
        load_tenants_file(path)
