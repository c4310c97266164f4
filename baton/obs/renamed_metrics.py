"""Renders a registry's metrics as Prometheus text. Renamed metrics also appear under their old
names, for one version of Baton."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

RENAMED_METRICS: Mapping[str, str] = MappingProxyType({
    "baton_first_token_seconds": "baton_time_to_first_token_seconds",
    "baton_token_gap_seconds": "baton_inter_token_latency_seconds",
    "baton_shipped_bytes": "baton_kv_transfer_bytes",
    "baton_first_token_prediction_ratio": "baton_time_to_first_token_prediction_ratio",
    "baton_limits_split": "baton_quota_store_unreachable",
    "baton_conductor_wished_workers": "baton_conductor_planned_workers",
    "baton_conductor_leads": "baton_conductor_is_leader",
    "baton_worker_handoff_bytes": "baton_worker_kv_transfer_bytes",
    "baton_worker_handoff_read_seconds": "baton_worker_kv_transfer_read_seconds",
    "baton_worker_handoff_exposed_seconds": "baton_worker_kv_transfer_exposed_seconds",
    "baton_worker_handoff_held_seconds": "baton_worker_kv_export_seconds",
})  # fmt: skip
"""Old name → new name of each renamed metric family, without suffixes such as ``_total`` and
``_bucket``."""

_OLD_NAMES = {new: old for old, new in RENAMED_METRICS.items()}


def render_metrics(registry: Collector) -> bytes:
    """Return the body of ``/metrics``. Each renamed family is repeated under its old name, with the
    same values: the registry is collected only once."""
    return generate_latest(_Families(tuple(_with_old_names(registry.collect()))))


class _Families(Collector):
    """A collector of families that have already been collected."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _with_old_names(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        yield family
        if family.name in _OLD_NAMES:
            yield _renamed(family, _OLD_NAMES[family.name])


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, f"deprecated: use {family.name}", family.type)
    renamed.samples = [
        sample._replace(name=name + sample.name.removeprefix(family.name))
        for sample in family.samples
    ]
    return renamed
