"""A store node's Prometheus metrics, with the values of the node's last sweep."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.core.store import StoreStats

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

_FAMILIES: tuple[tuple[Family, str, str, str, dict[str, str]], ...] = (
    (
        GaugeMetricFamily, "baton_store_bytes", "Bytes held, by tier.", "tier",
        {"dram": "used_bytes", "disk": "disk_used_bytes"},
    ),
    (
        GaugeMetricFamily, "baton_store_raw_bytes", "Bytes of the blocks, were none encoded.",
        "tier", {"dram": "raw_bytes", "disk": "disk_raw_bytes"},
    ),
    (
        GaugeMetricFamily, "baton_store_capacity_bytes", "Capacity, by tier.", "tier",
        {"dram": "arena_bytes", "disk": "disk_capacity_bytes"},
    ),
    (
        GaugeMetricFamily, "baton_store_blocks", "Blocks held, by tier.", "tier",
        {"dram": "num_blocks", "disk": "disk_blocks"},
    ),
    (
        GaugeMetricFamily, "baton_store_leased_blocks", "Blocks leased to readers.", "", {
            "": "leased_blocks",
        },
    ),
    (
        GaugeMetricFamily, "baton_store_pinned_bytes", "Bytes that may not be evicted.", "", {
            "": "pinned_bytes",
        },
    ),
    (
        CounterMetricFamily, "baton_store_hit_blocks", "Blocks leased, by tier.", "tier",
        {"dram": "hit_blocks_dram", "disk": "hit_blocks_disk"},
    ),
    (
        CounterMetricFamily, "baton_store_missed_blocks", "Requested blocks not stored.", "", {
            "": "missed_blocks",
        },
    ),
    (
        CounterMetricFamily, "baton_store_put_blocks", "Blocks stored.", "", {"": "put_blocks"},
    ),
    (
        CounterMetricFamily, "baton_store_put_bytes", "Bytes stored.", "", {"": "put_bytes"},
    ),
    (
        CounterMetricFamily, "baton_store_evictions", "Blocks that left a tier, by reason.",
        "reason",
        {
            "room": "evictions",
            "quota": "quota_evictions",
            "disk": "disk_evictions",
            "dropped": "dropped_blocks",
            "purged": "purged_blocks",
        },
    ),
    (
        CounterMetricFamily, "baton_store_demotions", "Blocks written to the SSD.", "", {
            "": "demotions",
        },
    ),
    (
        CounterMetricFamily, "baton_store_encoded_demotions", "Blocks encoded for the SSD.", "", {
            "": "encoded_demotions",
        },
    ),
    (
        CounterMetricFamily, "baton_store_promotions", "Blocks read from the SSD.", "", {
            "": "promotions",
        },
    ),
    (
        CounterMetricFamily, "baton_store_checksum_failures", "Damaged blocks.", "", {
            "": "checksum_failures",
        },
    ),
    (
        CounterMetricFamily, "baton_store_disk_failures", "Reads and writes that failed.", "", {
            "": "disk_failures",
        },
    ),
)  # fmt: skip
"""Metric type, name, help text, label, and the field of StoreStats for each value of the label."""


class StoreMetrics(Collector):
    """Exports ``stats``, which is always replaced as a whole, because the ops server reads it in
    another thread."""

    def __init__(self) -> None:
        self.stats = StoreStats()

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for kind, name, text, label, fields in _FAMILIES:
            family = kind(name, text, labels=[label] if label else [])
            for value, field in fields.items():
                family.add_metric([value] if label else [], getattr(stats, field))
            yield family
