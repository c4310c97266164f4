"""Tests that old names of metrics, members' fields and settings are accepted for one version, and
that no document or chart of the project uses them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from baton.config.renamed_settings import RENAMED_SETTINGS
from baton.core.ids import Incarnation, WorkerId
from baton.core.member import Member
from baton.core.pending_settings import PendingSettings
from baton.core.states import Role, WorkerState
from baton.obs.renamed_metrics import RENAMED_METRICS, render_metrics
from baton.registry.member_codec import RENAMED_FIELDS, member_from_json, member_to_json
from baton.worker.metrics import WorkerMetrics
from router.telemetry.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
OLD_METRIC = re.compile(rf"({'|'.join(RENAMED_METRICS)})(?=_total|_bucket|_sum|_count|\b)")
OLD_SETTING = re.compile(rf"\b({'|'.join(RENAMED_SETTINGS)})\b")
CODE_SPAN = re.compile(r"`+[^`]+`+")


def samples(text: bytes) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Return the samples of each metric family as (suffix of the name, labels, value)."""
    return {
        family.name: [
            (sample.name.removeprefix(family.name), sample.labels, sample.value)
            for sample in family.samples
        ]
        for family in text_string_to_metric_families(text.decode())
    }


def test_renamed_metrics_have_equal_values_under_both_names() -> None:
    registry = CollectorRegistry()
    Counter("baton_kv_transfer_bytes_total", "Bytes.", ["transport"], registry=registry).labels(
        "shm"
    ).inc(140)
    Histogram(
        "baton_time_to_first_token_seconds", "TTFT.", buckets=(1, 2), registry=registry
    ).observe(1.5)
    Gauge("baton_quota_store_unreachable", "1: yes.", registry=registry).set(1)
    Gauge("baton_running_requests", "Others have one name.", registry=registry)
    text = render_metrics(registry)
    found = samples(text)
    assert found["baton_kv_transfer_bytes"][0] == ("_total", {"transport": "shm"}, 140.0)
    assert len(found["baton_time_to_first_token_seconds"]) == 5
    for old in ("baton_shipped_bytes", "baton_first_token_seconds", "baton_limits_split"):
        assert found[old] == found[RENAMED_METRICS[old]]
        assert f"deprecated: use {RENAMED_METRICS[old]}" in text.decode()
    assert len([name for name in found if not name.endswith("_created")]) == 7


def test_each_renamed_metric_exists_under_its_new_name_only() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    families = [*registry.collect(), *RouterMetrics().registry.collect()]
    names = {family.name for family in families}
    conductors = {new for new in RENAMED_METRICS.values() if "_conductor_" in new}
    source = (ROOT / "conductor" / "metrics.py").read_text()
    assert all(f'"{name}"' in source for name in conductors)
    assert set(RENAMED_METRICS.values()) <= names | conductors
    assert names.isdisjoint(RENAMED_METRICS)


MEMBER = Member(
    WorkerId("d"), Role.DECODE, "127.0.0.1:1", Incarnation(1), WorkerState.READY,
    local_socket="/tmp/s", framed_address="127.0.0.1:2", numerics_fingerprint="ab",
)  # fmt: skip


def test_members_of_the_version_before_are_read() -> None:
    fields = json.loads(member_to_json(MEMBER))
    for old, new in RENAMED_FIELDS.items():
        assert fields[old] == fields[new]
        del fields[new]
    assert member_from_json(json.dumps(fields).encode()) == MEMBER


def test_members_of_the_version_before_have_no_pending_settings() -> None:
    member = replace(MEMBER, pending_settings=PendingSettings(("model", "port"), "port is 'x'"))
    fields = json.loads(member_to_json(member))
    assert member_from_json(json.dumps(fields).encode()) == member
    del fields["pending_settings"]
    assert member_from_json(json.dumps(fields).encode()) == MEMBER


def test_new_name_of_a_members_field_counts_if_both_are_there() -> None:
    fields = json.loads(member_to_json(MEMBER)) | {"framed_address": "127.0.0.1:3"}
    expected = replace(MEMBER, framed_address="127.0.0.1:3")
    assert member_from_json(json.dumps(fields).encode()) == expected


def pages() -> Iterator[Path]:
    """Yield the documents, and the files of the Helm chart that a user reads or installs."""
    yield from (ROOT / "docs").glob("*.md")
    for pattern in ("*.yaml", "*.tpl", "*.txt", "README.md", "dashboards/*.json"):
        yield from (ROOT / "deploy" / "helm" / "baton").rglob(pattern)


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_and_chart_use_the_new_names(path: Path) -> None:
    if path.name in ("LOG.md", "compatibility.md", "settings.yaml"):
        return  # these list old names, which are still accepted
    text = path.read_text()
    assert OLD_METRIC.findall(text) == []
    code = text if path.suffix != ".md" else " ".join(CODE_SPAN.findall(text))
    assert OLD_SETTING.findall(code) == []
