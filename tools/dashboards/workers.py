"""The dashboard of the workers: the load, steps and memory of each one."""

from tools.dashboards.grafana import Dashboard, Panel, PanelRow, PromQuery, Variable
from tools.dashboards.queries import quantile, rate, share

INSTANCE = Variable("instance", "baton_worker_info", "instance")
HERE = 'instance=~"$instance"'

WORKERS = Dashboard(
    "workers",
    "Workers",
    [
        PanelRow(
            "Load",
            [
                Panel(
                    "Busy",
                    [
                        PromQuery(
                            rate("baton_worker_step_seconds_sum", "instance", HERE), "{{instance}}"
                        )
                    ],
                    "percentunit",
                    "Share of the time in which the device computes.",
                    most=1,
                ),
                Panel(
                    "Sequences",
                    [
                        PromQuery(
                            f"sum by (instance, state) (baton_worker_sequences{{{HERE}}})",
                            "{{instance}} {{state}}",
                        )
                    ],
                    text="waiting: queued prompts; exported: prefilled, not yet read by a decode "
                    "worker; reserved: their KV is being read.",
                ),
                Panel(
                    "Tokens to compute",
                    [PromQuery(f"baton_worker_queued_tokens{{{HERE}}}", "{{instance}}")],
                    text="Prompt tokens still to prefill. A worker far above the others is slow, "
                    "or has a popular prefix.",
                ),
                Panel(
                    "Queue, p99",
                    [
                        PromQuery(
                            quantile(0.99, "baton_worker_queue_seconds", "instance", HERE),
                            "{{instance}}",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Batch",
                    [
                        PromQuery(
                            share(
                                rate("baton_worker_batch_requests_sum", "instance", HERE),
                                rate("baton_worker_batch_requests_count", "instance", HERE),
                            ),
                            "{{instance}}",
                        )
                    ],
                    text="Mean number of requests in a step.",
                ),
                Panel(
                    "Step, p99",
                    [
                        PromQuery(
                            quantile(0.99, "baton_worker_step_seconds", "instance, kind", HERE),
                            "{{instance}} {{kind}}",
                        )
                    ],
                    "s",
                    "A decode step's time is the ITL; mixed steps take longer.",
                ),
            ],
        ),
        PanelRow(
            "Work",
            [
                Panel(
                    "Tokens computed",
                    [
                        PromQuery(
                            rate("baton_worker_computed_tokens_total", "instance, phase", HERE),
                            "{{instance}} {{phase}}",
                        )
                    ],
                    text="Per second.",
                ),
                Panel(
                    "Prompt tokens by source",
                    [
                        PromQuery(
                            rate("baton_worker_prefix_tokens_total", "source", HERE), "{{source}}"
                        )
                    ],
                    text="device: this worker's cache; dram and disk: the store.",
                    stacked=True,
                ),
                Panel(
                    "Outcomes of requests",
                    [
                        PromQuery(
                            rate("baton_worker_requests_total", "task, outcome", HERE),
                            "{{task}} {{outcome}}",
                        )
                    ],
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Failures",
                    [
                        PromQuery(
                            rate("baton_worker_failures_total", "instance, status", HERE),
                            "{{instance}} {{status}}",
                        )
                    ],
                    "short",
                    "By gRPC status. DATA_LOSS: a network link or memory corrupts blocks.",
                ),
                Panel(
                    "Preemptions",
                    [
                        PromQuery(
                            rate("baton_worker_preemptions_total", "instance", HERE), "{{instance}}"
                        )
                    ],
                    text="Answers per second that are recomputed for lack of memory.",
                ),
                Panel(
                    "Pauses",
                    [
                        PromQuery(
                            rate("baton_worker_pauses_total", "instance", HERE), "{{instance}}"
                        )
                    ],
                    text="Long prompts per second that let others pass. Many are normal.",
                ),
            ],
        ),
        PanelRow(
            "KV",
            [
                Panel(
                    "Blocks in use",
                    [
                        PromQuery(
                            "sum by (instance) (baton_worker_blocks{"
                            f'{HERE},state=~"filling|referenced"}}) '
                            f"/ sum by (instance) (baton_worker_blocks{{{HERE}}})",
                            "{{instance}}",
                        )
                    ],
                    "percentunit",
                    "Not counting the cache. Near 1, requests wait for memory.",
                    most=1,
                ),
                Panel(
                    "Memory for KV",
                    [PromQuery(f"baton_worker_pool_bytes{{{HERE}}}", "{{instance}}")],
                    "bytes",
                ),
                Panel(
                    "Quarantined",
                    [
                        PromQuery(
                            f'baton_worker_blocks{{{HERE},state="quarantined"}}', "{{instance}}"
                        )
                    ],
                    text="Blocks that an aborted read may still write to.",
                ),
                Panel(
                    "KV transfer, bytes",
                    [
                        PromQuery(
                            rate(
                                "baton_worker_kv_transfer_bytes_total", "instance, transport", HERE
                            ),
                            "{{instance}} {{transport}}",
                        )
                    ],
                    "Bps",
                    "Read from other workers.",
                ),
                Panel(
                    "KV export, p99",
                    [
                        PromQuery(
                            quantile(0.99, "baton_worker_kv_export_seconds", "instance", HERE),
                            "{{instance}}",
                        )
                    ],
                    "s",
                    "Long: decode workers lack memory to import the KV.",
                ),
                Panel(
                    "Store look-ups, by result",
                    [PromQuery(rate("baton_worker_store_lookups_total", "mode", HERE), "{{mode}}")],
                    "reqps",
                    "fetch: read from the store; recompute: faster than a read; none: "
                    "nothing more stored.",
                    stacked=True,
                ),
            ],
        ),
    ],
    [INSTANCE],
)
