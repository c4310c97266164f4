"""The dashboard of the KV store: its tiers and their hits."""

from tools.dashboards.grafana import Dashboard, Panel, PanelRow, PromQuery
from tools.dashboards.queries import quantiles, rate

STORE = Dashboard(
    "store",
    "Store",
    [
        PanelRow(
            "Tiers",
            [
                Panel(
                    "Full",
                    [
                        PromQuery(
                            "sum by (tier) (baton_store_bytes) "
                            "/ (sum by (tier) (baton_store_capacity_bytes) > 0)",
                            "{{tier}}",
                        )
                    ],
                    "percentunit",
                    "100 % is normal: it is a cache.",
                    most=1,
                ),
                Panel(
                    "Blocks",
                    [PromQuery("sum by (tier) (baton_store_blocks)", "{{tier}}")],
                ),
                Panel(
                    "Held by readers and pins",
                    [
                        PromQuery("sum(baton_store_leased_blocks)", "leased blocks"),
                        PromQuery("sum(baton_store_pinned_bytes)", "pinned bytes"),
                    ],
                    text="Leases last for seconds.",
                ),
            ],
        ),
        PanelRow(
            "Use",
            [
                Panel(
                    "Found",
                    [
                        PromQuery(rate("baton_store_hit_blocks_total", "tier"), "{{tier}}"),
                        PromQuery(rate("baton_store_missed_blocks_total"), "missed"),
                    ],
                    text="Blocks per second. Many hits on disk: add DRAM. Many misses and many "
                    "evictions: add disk.",
                    stacked=True,
                ),
                Panel(
                    "Stored",
                    [PromQuery(rate("baton_store_put_bytes_total"), "bytes a second")],
                    "Bps",
                ),
                Panel(
                    "Evicted",
                    [PromQuery(rate("baton_store_evictions_total", "reason"), "{{reason}}")],
                    text="Blocks per second. dropped: the SSD is too slow to write all of them.",
                    stacked=True,
                ),
                Panel(
                    "Between tiers",
                    [
                        PromQuery(rate("baton_store_demotions_total"), "to the SSD"),
                        PromQuery(rate("baton_store_promotions_total"), "from the SSD"),
                    ],
                    text="Blocks per second. High both ways: DRAM is too small for the hot blocks.",
                ),
                Panel(
                    "Wait for the store",
                    quantiles("baton_worker_store_wait_seconds"),
                    "s",
                    "Time that a prompt waits for the store before it is queued.",
                ),
                Panel(
                    "Damage and disk failures",
                    [
                        PromQuery(rate("baton_store_checksum_failures_total"), "damaged blocks"),
                        PromQuery(rate("baton_store_disk_failures_total"), "disk failures"),
                    ],
                    text="Above zero: faulty hardware.",
                ),
            ],
        ),
    ],
)
