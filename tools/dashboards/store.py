"""Tiers of the KV store, and what is found in them."""

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
                    "Full is normal: it is a cache.",
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
                    text="Leases last seconds.",
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
                    text="Blocks a second. Much from disk: more DRAM. Much missed while much is "
                    "evicted: more disk.",
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
                    text="Blocks a second. dropped: the SSD is slower than what is stored.",
                    stacked=True,
                ),
                Panel(
                    "Between tiers",
                    [
                        PromQuery(rate("baton_store_demotions_total"), "to the SSD"),
                        PromQuery(rate("baton_store_promotions_total"), "from the SSD"),
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
                        PromQuery(rate("baton_store_checksum_failures_total"), "damaged blocks"),
                        PromQuery(rate("baton_store_disk_failures_total"), "failures of the disk"),
                    ],
                    text="Anything but zero is hardware.",
                ),
            ],
        ),
    ],
)
