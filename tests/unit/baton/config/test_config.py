"""Tests settings: precedence (flag, environment, file, default), validation, and error messages."""

from pathlib import Path

import pytest
import yaml

from baton.config import (
    DEMO_MODEL,
    SettingWarning,
    baton_home,
    child_environment,
    config_version,
    load_settings,
    thread_environment,
    to_environment,
)
from baton.errors import Invalid
from tests.unit.baton.config.config_files import remove_settings, write


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    remove_settings(monkeypatch)


def test_defaults_are_local_and_small() -> None:
    settings = load_settings()
    assert (settings.port, settings.prefill, settings.decode) == (8000, 1, 1)
    assert settings.model == str(DEMO_MODEL)
    assert settings.host == settings.grpc_host == "127.0.0.1"
    assert settings.transports == ()
    assert settings.model_name == "demo"


def test_only_mixed_workers_are_started_if_no_others_are_asked_for() -> None:
    def pools(**flags: int) -> tuple[int, int, int]:
        settings = load_settings(**flags)
        return settings.prefill, settings.decode, settings.mixed

    assert pools(mixed=2) == (0, 0, 2)
    assert pools(mixed=0) == (1, 1, 0)
    assert pools(mixed=1, prefill=2) == (2, 1, 1)
    assert pools(mixed=1, prefill=0, decode=0) == (0, 0, 1)
    with pytest.raises(Invalid, match="prefill, decode and mixed are all 0"):
        load_settings(prefill=0, decode=0)
    with pytest.raises(Invalid, match="prefill=0 decode=1 mixed=1 could not serve requests"):
        load_settings(prefill=0, mixed=1)


def test_each_attached_server_gets_a_worker() -> None:
    def pools(attach: str) -> tuple[int, int, int]:
        settings = load_settings(attach=attach)
        return settings.prefill, settings.decode, settings.mixed

    assert pools("mixed=http://a:1,mixed=http://b:1") == (0, 0, 2)
    assert pools("prefill=http://a:1,decode=http://b:1,decode=http://c:1") == (1, 2, 0)
    # The one server of a worker whose cluster has others elsewhere.
    assert pools("prefill=http://a:1") == pools("decode=http://a:1") == (1, 1, 0)


def test_pools_of_a_detached_cluster_are_those_of_its_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = load_settings(mixed=1, prefill=1, decode=1)
    for name, value in to_environment(settings).items():
        monkeypatch.setenv(f"BATON_{name.upper()}", value)
    again = load_settings()
    assert (again.prefill, again.decode, again.mixed) == (1, 1, 1)


def test_flag_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "port: 1\nprefill: 2\ndecode: 3\n")
    monkeypatch.setenv("BATON_PREFILL", "20")
    monkeypatch.setenv("BATON_DECODE", "30")
    settings = load_settings(file, decode=300)
    assert (settings.port, settings.prefill, settings.decode) == (1, 20, 300)


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("true", True), ("false", False), ("0", False)]
)
def test_admission_is_true_false_or_auto(
    text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings().admission == "auto"
    monkeypatch.setenv("BATON_ADMISSION", text)
    settings = load_settings()
    assert settings.admission is value or settings.admission == value == "auto"
    monkeypatch.setenv("BATON_ADMISSION", to_environment(settings)["admission"])
    assert load_settings().admission == settings.admission


def test_unset_flags_do_not_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "9")
    assert load_settings(port=None).port == 9


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", "70000", "port is '70000': input should be less than or equal to 65535"),
        ("port", "http", "port is 'http': input should be a valid integer"),
        ("prefill", "-1", "prefill is '-1': input should be greater than or equal to 0"),
        ("dtype", "int4", "dtype is 'int4': input should be 'auto', 'float32', 'bfloat16'"),
        ("device", "tpu", "device is 'tpu'"),
        ("transports", "shm,pigeon", "transports is .*auto, or .* of shm,cuda_ipc,nixl,grpc"),
        ("pool_bytes", "lots", "pool_bytes is 'lots'"),
        ("heartbeat_interval_seconds", "nan", "heartbeat_interval_seconds is 'nan'"),
        ("cluster", "My Cluster", "cluster is 'My Cluster'"),
        ("log_level", "loud", "log_level is 'loud'"),
        ("prefill_order", "best", "prefill_order is 'best': it must be one of fcfs, cached_first"),
        ("slo_ttft_seconds", "-1", "slo_ttft_seconds is '-1'"),
        ("slo_itl_seconds", "0", "slo_itl_seconds is '0'"),
        ("admission", "perhaps", "admission"),
        ("slo_itl_seconds", "inf", "slo_itl_seconds is 'inf'"),
        ("trace_endpoint", "collector:4317", "trace_endpoint .*like http://collector:4317"),
        ("trace_endpoint", "http://collector/v1/traces", "trace_endpoint .*OTLP/gRPC collector"),
        ("response_ttl_seconds", "-1", "response_ttl_seconds is '-1'"),
        ("response_ttl_seconds", "inf", "response_ttl_seconds is 'inf'"),
        ("response_ttl_seconds", "nan", "response_ttl_seconds is 'nan'"),
        ("tenant_response_bytes", "0", "tenant_response_bytes is '0'"),
        ("trace_sample", "10", "trace_sample is '10': input should be less than or equal to 1"),
    ],
)
def test_invalid_value_error_names_key_value_and_constraint(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Invalid, match=message):
        load_settings(**{name: value})
    monkeypatch.setenv(f"BATON_{name.upper()}", value)
    with pytest.raises(Invalid, match=message):
        load_settings()


def test_several_invalid_values_are_reported_together() -> None:
    with pytest.raises(Invalid, match=r"port is -1.*; .*prefill is -2"):
        load_settings(port=-1, prefill=-2)


def test_unknown_settings_are_rejected_with_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Invalid, match="no setting 'prefil'; did you mean prefill"):
        load_settings(prefil=1)
    with pytest.raises(Invalid, match=r"baton\.yaml: there is no setting 'prot'"):
        load_settings(write(tmp_path, "prot: 1"))
    monkeypatch.setenv("BATON_CONFIG", "")
    monkeypatch.setenv("BATON_DECODES", "1")
    with pytest.raises(Invalid, match=r"environment variable BATON_DECODES.*did you mean decode"):
        load_settings()


def test_responses_may_be_stored_for_no_time() -> None:
    settings = load_settings(response_ttl_seconds="0", tenant_response_bytes="1GiB")
    assert (settings.response_ttl_seconds, settings.tenant_response_bytes) == (0.0, 2**30)


@pytest.mark.parametrize("written_for", ["0.10.0", "0.9.4-rc.1", "1.0.0"])
def test_unknown_settings_of_a_newer_version_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_for: str
) -> None:
    """During an upgrade, pods that still have the previous version read the newer chart's
    ConfigMap."""
    monkeypatch.setattr(config_version, "program_version", lambda: "0.9.3")
    file = write(tmp_path, f"written_for: {written_for}\nprot: 1\nport: 9\nnew: {{a: hush}}\n")
    warnings: list[SettingWarning] = []
    assert load_settings(file, warnings.append).port == 9
    message = f"config file {file} was written for Baton {written_for}, and 0.9.3 does not have"
    assert warnings == [SettingWarning("newer_settings_ignored", f"{message} new, prot")]


@pytest.mark.parametrize("written_for", ["0.9.3", "0.9.3-rc.1", "0.9.2", "0.8.10"])
def test_unknown_settings_of_the_same_or_an_older_version_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_for: str
) -> None:
    monkeypatch.setattr(config_version, "program_version", lambda: "0.9.3")
    file = write(tmp_path, f"written_for: {written_for}\nport: 9\n")
    assert load_settings(file, [].append).port == 9
    with pytest.raises(Invalid, match=r"baton\.yaml: there is no setting 'prot'"):
        load_settings(write(tmp_path, f"written_for: {written_for}\nprot: 1\n"))


def test_wrong_values_and_other_sources_of_a_newer_version_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "written_for: 99.0.0\ndtype: int4\n")
    with pytest.raises(Invalid, match="dtype is 'int4'"):
        load_settings(file)
    with pytest.raises(Invalid, match=r"written_for is '1\.0'; it must be a version like 1\.2\.3"):
        load_settings(write(tmp_path, "written_for: 1.0\n"))
    write(tmp_path, "written_for: 99.0.0\n")
    monkeypatch.setenv("BATON_WRITTEN_FOR", "99.0.0")
    with pytest.raises(Invalid, match="there is no setting 'written_for'"):
        load_settings(file)


@pytest.mark.parametrize("text", ["- a\n", "{", "just words", "\x00"])
def test_config_file_that_is_no_mapping_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(Invalid, match=r"config file .*baton\.yaml"):
        load_settings(write(tmp_path, text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"api_keys: hunter2=t: bad", r"mapping values are not allowed here \(line 1, column 20\)"),
        (b"port: 1\nadmin_key: [hunter2", r"expected ',' or '\]', but got '<stream end>' \(line 2"),
        (b"admin_key: !hunter2", r"constructor for the tag \.\.\. \(line 1, column 12\)"),
        (b"admin_key: !hunter2'", r"constructor for the tag \.\.\. \(line 1"),
        (b"admin_key: *hunter2", r"undefined alias \.\.\. \(line 1"),
        (b"admin_key: !hunter2!x y", r"undefined tag handle \.\.\. \(line 1"),
        (b"admin_key: 'hunter2", r"unexpected end of stream \(line 1"),
        (b"admin_key: hunter2\0", "has characters that YAML does not allow"),
        (b"admin_key: hunter2\xff", "is not UTF-8 text"),
        (b"admin_key: !!int hunter2", "has an invalid number or date"),
        (b"admin_key: 2024-13-45", "has an invalid number or date"),
        (b"admin_key: " + b"[" * 3000, "is nested too deeply"),
        (b"# hunter2\n" * 2**17, "has more than 1048576 bytes"),
    ],
)
def test_errors_in_a_malformed_config_file_show_no_values(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "baton.yaml"
    file.write_bytes(content)
    with pytest.raises(Invalid, match=rf"^config file {file}: .*{message}") as refused:
        load_settings(file)
    assert "hunter2" not in str(refused.value) and refused.value.__cause__ is None


def test_config_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    parse = yaml.safe_load
    monkeypatch.setattr(yaml, "safe_load", lambda text: parsed.append(text) or parse(text))
    assert load_settings(write(tmp_path, "port: 1\n"), warn=lambda warning: None).port == 1
    assert parsed == ["port: 1\n"]


def test_missing_config_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"nowhere\.yaml"):
        load_settings(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("10K", 10_000), ("2MiB", 2 << 20), ("3GiB", 3 << 30)]
)
def test_byte_sizes_are_parsed(text: str, size: int) -> None:
    assert load_settings(store_bytes=text).store_bytes == size


@pytest.mark.parametrize("name", ["api_keys", "redis_url", "cluster_secret", "admin_key"])
def test_error_messages_never_contain_secrets(name: str) -> None:
    with pytest.raises(Invalid) as failure:
        load_settings(**{name: ["hush", 7]})
    assert "hush" not in str(failure.value)
    assert name in str(failure.value)


def test_listening_beyond_loopback_requires_keys_or_secrets() -> None:
    with pytest.raises(Invalid, match="needs api_keys"):
        load_settings(host="0.0.0.0")
    with pytest.raises(Invalid, match="needs cluster_secret"):
        load_settings(grpc_host="0.0.0.0")
    assert load_settings(host="0.0.0.0", api_keys="k=t").api_keys == {"k": "t"}
    assert load_settings(host="0.0.0.0", allow_open_http=True).host == "0.0.0.0"
    assert load_settings(grpc_host="0.0.0.0", cluster_secret="s").grpc_host == "0.0.0.0"


@pytest.mark.parametrize("text", ["key", "key=", "=tenant", "{", '{"a": 1}'])
def test_malformed_api_keys_are_rejected(text: str) -> None:
    with pytest.raises(Invalid, match="api_keys"):
        load_settings(api_keys=text)


def test_settings_round_trip_through_a_child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        api_keys={"k,1": "t=2"}, transports="grpc,shm", pool_bytes="1MiB", redis_url="redis://x/0",
        served_model_name="it's", cluster_secret="s s",
    )  # fmt: skip
    monkeypatch.setenv("BATON_PORT", "1")
    environment = child_environment(to_environment(settings), {"EXTRA": "1"})
    assert environment["EXTRA"] == "1"
    for name in [name for name in environment if name.startswith("BATON_")]:
        monkeypatch.setenv(name, environment[name])
    assert load_settings().model_dump() == settings.model_dump()


def test_home_folder_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert baton_home() == tmp_path


def test_thread_environment_limits_threads_and_disables_spinning() -> None:
    assert thread_environment(3)["OMP_NUM_THREADS"] == "3"
    assert thread_environment(0)["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_decode": 5, "max_decode": 4}, "and min_decode not above max_decode"),
        ({"min_prefill": 3, "max_workers": 3}, "max_workers is 3; it must be at least .* is 4"),
        ({"autoscale_utilisation": 0.5}, "autoscale_shrink_utilisation is 0.6; .* in turn at"),
    ],
)
def test_contradicting_pool_bounds_are_rejected(given: dict[str, float], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        load_settings(**given)


@pytest.mark.parametrize(
    ("written", "meant"), [("on", "on"), ("off", "off"), ("dry_run", "dry_run")]
)
def test_yaml_on_and_off_are_accepted_for_autoscale(
    tmp_path: Path, written: str, meant: str
) -> None:
    """YAML parses ``on`` and ``off`` as true and false."""
    file = tmp_path / "baton.yaml"
    file.write_text(f"autoscale: {written}\n")
    assert load_settings(file).autoscale == meant


def test_cors_origins_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORS_ORIGINS", "https://a.example, http://localhost:3000")
    assert load_settings().cors_origins == ("https://a.example", "http://localhost:3000")
    assert load_settings(cors_origins="null,file://").cors_origins == ("null", "file://")
    for wrong in ("a.example", "https://a.example/", "https://a.example/path", "https://a b"):
        with pytest.raises(Invalid, match=r"cors_origins is .*must be \*, null, or origins like"):
            load_settings(cors_origins=wrong)


def test_allowed_hosts_are_validated() -> None:
    settings = load_settings(allowed_hosts="baton.example, 10.0.0.7", advertise_address="here")
    assert settings.accepted_hosts("127.0.0.1") == ("baton.example", "10.0.0.7", "here")
    assert load_settings().accepted_hosts("127.0.0.1") == ()
    assert load_settings().accepted_hosts("0.0.0.0") is None
    assert load_settings(allowed_hosts="a").accepted_hosts("0.0.0.0") == ("a",)
    assert load_settings(allowed_hosts="*").accepted_hosts("127.0.0.1") is None
    for wrong in ("http://a.example", "a.example:80", "a/b", "a b"):
        with pytest.raises(Invalid, match=r"allowed_hosts is .*must be \*, or names like"):
            load_settings(allowed_hosts=wrong)


def test_strict_fields_is_true_or_false() -> None:
    assert load_settings().strict_fields is False
    assert load_settings(strict_fields="true").strict_fields is True
    with pytest.raises(Invalid, match="strict_fields"):
        load_settings(strict_fields="very")


def test_tls_certificate_requires_its_key() -> None:
    with pytest.raises(Invalid, match="tls_certificate and tls_key go together"):
        load_settings(tls_certificate="a.pem")
