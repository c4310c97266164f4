"""Tiers of the KV store, and what is found in them."""

from tools.dashboards.grafana import Dashboard, Panel, Query, Row
from tools.dashboards.queries import quantiles, rate

STORE = Dashboard(
    "store",
    "Store",
    [
        Row(
            "Tiers",
            [
                Panel(
                    "Full",
                    [
                        Query(
                            "sum by (tier) (baton_store_bytes) "
                            "/ (sum by (tier) (baton_store_capacity_bytes) > 0)",
                            "{{tier}}",
                        )
                    ],
                    "percentunit",
                    "Full is normal: it is a cache.",
                    most=1,
                ),
                Panel(
                    "Blocks",
                    [Query("sum by (tier) (baton_store_blocks)", "{{tier}}")],
                ),
                Panel(
                    "Held by readers and pins",
                    [
                        Query("sum(baton_store_leased_blocks)", "leased blocks"),
                        Query("sum(baton_store_pinned_bytes)", "pinned bytes"),
                    ],
                    text="Leases last seconds.",
                ),
            ],
        ),
        Row(
            "Use",
            [
                Panel(
                    "Found",
                    [
                        Query(rate("baton_store_hit_blocks_total", "tier"), "{{tier}}"),
                        Query(rate("baton_store_missed_blocks_total"), "missed"),
                    ],
                    text="Blocks a second. Much from disk: more DRAM. Much missed while much is "
                    "evicted: more disk.",
                    stacked=True,
                ),
                Panel(
                    "Stored", [Query(rate("baton_store_put_bytes_total"), "bytes a second")], "Bps"
                ),
                Panel(
                    "Evicted",
                    [Query(rate("baton_store_evictions_total", "reason"), "{{reason}}")],
                    text="Blocks a second. dropped: the SSD is slower than what is stored.",
                    stacked=True,
                ),
                Panel(
                    "Between tiers",
                    [
                        Query(rate("baton_store_demotions_total"), "to the SSD"),
                        Query(rate("baton_store_promotions_total"), "from the SSD"),
                    ],
                    text="Blocks a second. High both ways: DRAM is too small for what is hot.",
                ),
                Panel(
                    "Wait for the store",
                    quantiles("baton_worker_store_wait_seconds"),
                    "s",
                    "Of prompts, before they are queued.",
                ),
                Panel(
                    "Harm",
                    [
                        Query(rate("baton_store_checksum_failures_total"), "damaged blocks"),
                        Query(rate("baton_store_disk_failures_total"), "failures of the disk"),
                    ],
                    text="Anything but zero is hardware.",
                ),
            ],
        ),
    ],
)
