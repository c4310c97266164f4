"""Tests secrets that are read from the folder of secret files, and the password of Redis."""

from pathlib import Path

import pytest

from baton.config import (
    Settings,
    child_environment,
    load_settings,
    pinned_settings,
    to_environment,
)
from baton.errors import Invalid
from tests.unit.baton.config.config_files import remove_settings, write


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_settings(monkeypatch)


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of secret files, as Kubernetes mounts it."""
    folder = tmp_path / "secrets"
    (folder / "..data").mkdir(parents=True)
    monkeypatch.setenv("BATON_SECRETS_DIRECTORY", str(folder))
    return folder


def test_environment_over_secret_files_over_config_file(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "cluster_secret: a\nadmin_key: b\ntenant_secret: c\nport: 1\n")
    (secrets / "admin_key").write_text("from a file\n")
    (secrets / "tenant_secret").write_text("from a file")
    (secrets / "api_keys").write_text("key=tenant,other=tenant\n")
    monkeypatch.setenv("BATON_TENANT_SECRET", "from the environment")
    settings = load_settings(file)
    assert (settings.cluster_secret, settings.admin_key) == ("a", "from a file")
    assert settings.tenant_secret == "from the environment"
    assert settings.api_keys == {"key": "tenant", "other": "tenant"}
    assert settings.port == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cluster-secret", b"hunter2", "no setting 'cluster-secret'; did you mean cluster_secret"),
        ("port", b"hunter2", "port is wrong: input should be a valid integer"),
        ("drain_timeout_seconds", b"hunter2", "drain_timeout_seconds is wrong: input should be"),
        ("admin_key", b"hunter2\xff", "admin_key is not UTF-8 text"),
        ("admin_key", b"hunter2" * 10_000, "admin_key has more than 65536 bytes"),
        ("redis_password", b"hunter2", "redis_password is set, but redis_url is not"),
    ],
)
def test_errors_in_secret_files_show_no_values(
    secrets: Path, name: str, content: bytes, message: str
) -> None:
    (secrets / name).write_bytes(content)
    with pytest.raises(Invalid, match=message) as refused:
        load_settings()
    assert "hunter2" not in str(refused.value)


def test_a_missing_secrets_directory_is_reported(
    secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_SECRETS_DIRECTORY", str(secrets / "none"))
    with pytest.raises(Invalid, match=r"secrets directory .*No such file"):
        load_settings()


def test_child_processes_do_not_inherit_the_secrets_directory(secrets: Path) -> None:
    """A supervisor passes all settings to its child processes itself, so that they don't read the
    secret files a second time."""
    assert "BATON_SECRETS_DIRECTORY" not in child_environment({}, {})


def test_secret_files_reach_a_child_process_that_reads_the_same_config_file(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``up --detach`` passes the settings that are not in the config file to its child process,
    which has no secret files."""
    file = write(tmp_path, "redis_url: redis://cache:6379/0\napi_keys: {a: b}\nport: 1\n")
    values = {"cluster_secret": "c" * 32, "api_keys": "key=tenant", "redis_password": "hunter2"}
    for name, value in {**values, "drain_timeout_seconds": "3", "log_level": "debug"}.items():
        (secrets / name).write_text(value)
    parent = load_settings(file, warn=lambda message: None)
    for each in secrets.glob("[a-z]*"):
        each.unlink()  # what was loaded counts, not what is there now
    unpinned = Settings.model_fields.keys() - pinned_settings(parent)
    environment = child_environment(to_environment(parent, unpinned), {})
    assert {name for name in environment if name.startswith("BATON_")} == {
        "BATON_CLUSTER_SECRET", "BATON_API_KEYS", "BATON_REDIS_URL",
        "BATON_DRAIN_TIMEOUT_SECONDS", "BATON_LOG_LEVEL",
    }  # fmt: skip
    monkeypatch.delenv("BATON_SECRETS_DIRECTORY")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert load_settings(file).model_dump() == parent.model_dump()


@pytest.mark.parametrize(
    ("url", "full"),
    [
        ("redis://cache:6379/0", "redis://:p%40s%2F@cache:6379/0"),
        ("rediss://baton@cache:6379", "rediss://baton:p%40s%2F@cache:6379"),
        ("redis://[::1]:6379/0", "redis://:p%40s%2F@[::1]:6379/0"),
        ("unix:///run/redis.sock", "unix://:p%40s%2F@/run/redis.sock"),
        ("redis+sentinel://a:1,b/main", "redis+sentinel://:p%40s%2F@a:1,b/main"),
    ],
)
def test_the_redis_password_is_moved_into_the_url(url: str, full: str) -> None:
    settings = load_settings(redis_url=url, redis_password="p@s/")
    assert (settings.redis_url, settings.redis_password) == (full, None)


def test_two_redis_passwords_are_refused() -> None:
    with pytest.raises(Invalid, match="differs from the password in redis_url") as refused:
        load_settings(redis_url="redis://:hunter2@cache", redis_password="hunter3")
    assert "hunter" not in str(refused.value)


def test_a_malformed_redis_url_is_refused() -> None:
    with pytest.raises(Invalid, match=r"redis_url is wrong: it should be redis://HOST") as refused:
        load_settings(redis_url="redis://[hunter2", redis_password="hunter3")
    assert "hunter" not in str(refused.value)


def test_a_child_process_may_get_the_redis_password_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child gets its parent's URL, which contains the password, and reads the same config file,
    which sets the password, too."""
    file = write(tmp_path, "redis_url: redis://baton@cache:6379/0\nredis_password: p@s/\n")
    parent = load_settings(file)
    monkeypatch.setenv("BATON_REDIS_URL", to_environment(parent)["redis_url"])
    child = load_settings(file)
    assert (child.redis_url, child.redis_password) == (parent.redis_url, None)
