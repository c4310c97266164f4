"""The overview dashboard: the latencies that clients see, how much each stage adds to them, and
which members are running."""

from tools.dashboards.grafana import Dashboard, Panel, PanelRow, PromQuery
from tools.dashboards.queries import quantile, quantiles, rate, share, stat

GOODPUT = share(
    rate("baton_slo_answers_total", where='verdict="met"'), rate("baton_slo_answers_total")
)
HIT_RATIO = share(rate("baton_cached_tokens_total"), rate("baton_prompt_tokens_total"))
KV_TRANSFER_RATE = share(
    rate("baton_worker_kv_transfer_bytes_total", "transport"),
    rate("baton_worker_kv_transfer_read_seconds_total", "transport"),
)

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    [
        PanelRow(
            "Now",
            [
                stat("Goodput", GOODPUT, "percentunit", "Share of answers within the SLO."),
                stat("Requests", rate("baton_requests_total"), "reqps"),
                stat("TTFT, p99", quantile(0.99, "baton_time_to_first_token_seconds"), "s"),
                stat("ITL, p99", quantile(0.99, "baton_inter_token_latency_seconds"), "s"),
                stat("Answers under way", "sum(baton_running_requests)"),
                stat(
                    "Hit ratio",
                    HIT_RATIO,
                    "percentunit",
                    "Share of prompt tokens that were cached.",
                ),
            ],
        ),
        PanelRow(
            "What clients see",
            [
                Panel(
                    "Answers by verdict",
                    [PromQuery(rate("baton_slo_answers_total", "verdict"), "{{verdict}}")],
                    "reqps",
                    "late: TTFT too high; slow: ITL too high; failed: no answer, or it broke off.",
                    stacked=True,
                ),
                Panel(
                    "TTFT",
                    quantiles("baton_time_to_first_token_seconds"),
                    "s",
                    "Grows with the prompts' queue. Add prefill workers, or find out why prefixes "
                    "miss the cache.",
                ),
                Panel(
                    "ITL",
                    quantiles("baton_inter_token_latency_seconds"),
                    "s",
                    "Grows with the decode batches. Add decode workers.",
                ),
                Panel(
                    "Requests by status",
                    [PromQuery(rate("baton_requests_total", "status"), "{{status}}")],
                    "reqps",
                    "429: refused; 5xx: failed; 499: the client disconnected.",
                    stacked=True,
                ),
                Panel(
                    "Tokens",
                    [
                        PromQuery(rate("baton_prompt_tokens_total"), "prompts"),
                        PromQuery(rate("baton_cached_tokens_total"), "cached prompt tokens"),
                        PromQuery(rate("baton_completion_tokens_total"), "answers"),
                    ],
                    "short",
                    "Per second.",
                ),
                Panel(
                    "Whole request",
                    quantiles("baton_request_seconds"),
                    "s",
                ),
            ],
        ),
        PanelRow(
            "Where time goes",
            [
                Panel(
                    "Prompts' queue",
                    quantiles("baton_worker_queue_seconds"),
                    "s",
                    "Time on the worker until the first chunk is computed.",
                ),
                Panel(
                    "Placement",
                    [
                        PromQuery(quantile(0.99, "baton_placement_seconds"), "asked, p99"),
                        PromQuery(
                            quantile(0.99, "baton_conductor_decision_seconds"), "decided, p99"
                        ),
                    ],
                    "s",
                    "Above some milliseconds, the conductor lacks CPU or the network is slow.",
                ),
                Panel(
                    "KV transfer speed",
                    [PromQuery(KV_TRANSFER_RATE, "{{transport}}")],
                    "Bps",
                    "Bytes per second of read time. grpc instead of nixl: the device or the UCX "
                    "transport is missing.",
                ),
                Panel(
                    "KV transfer, exposed",
                    quantiles("baton_worker_kv_transfer_exposed_seconds"),
                    "s",
                    "Time that the KV transfer adds before the second token.",
                ),
                Panel(
                    "Reused KV, by tier",
                    [PromQuery(rate("baton_cached_tokens_total", "tier"), "{{tier}}")],
                    "short",
                    "Prompt tokens per second that were cached.",
                    stacked=True,
                ),
                Panel(
                    "KV on devices",
                    [PromQuery("sum by (state) (baton_worker_blocks)", "{{state}}")],
                    "short",
                    "Blocks. idle: evictable prefix cache. With neither idle nor free blocks, "
                    "requests wait.",
                    stacked=True,
                ),
            ],
        ),
        PanelRow(
            "Members",
            [
                Panel(
                    "Ready",
                    [
                        PromQuery(
                            'max by (role) (baton_conductor_members{state="ready"})',
                            "{{role}}",
                        )
                    ],
                ),
                Panel(
                    "Planned",
                    [
                        PromQuery(
                            "max by (pool) (baton_conductor_planned_workers)", "{{pool}} planned"
                        ),
                        PromQuery(
                            'max by (role) (baton_conductor_members{state="ready",'
                            'role=~"prefill|decode|mixed"})',
                            "{{role}} ready",
                        ),
                    ],
                    "short",
                    "Workers that the planner wants, and workers that are ready.",
                ),
                Panel(
                    "Failovers and migrations",
                    [
                        PromQuery(rate("baton_failovers_total"), "failovers"),
                        PromQuery(
                            rate("baton_worker_requests_total", where='outcome="migrated"'),
                            "answers migrated",
                        ),
                        PromQuery(
                            rate("baton_worker_requests_total", where='outcome="failed"'),
                            "failed on a worker",
                        ),
                    ],
                    "short",
                    "Per second. Resizes move answers; failed workers cause failovers.",
                ),
            ],
        ),
    ],
)
