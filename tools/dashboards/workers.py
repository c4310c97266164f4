"""Load, work and memory of each worker."""

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
                    text="waiting: prompts in the queue; held: prompts whose reader is to come; "
                    "reserved: being read.",
                ),
                Panel(
                    "Tokens to compute",
                    [PromQuery(f"baton_worker_queued_tokens{{{HERE}}}", "{{instance}}")],
                    text="Of prompts that are here. One worker apart from the others has a prefix "
                    "that all want, or is slow.",
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
                    text="Requests in a step, in the mean.",
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
                    "Of decode steps it is the gap between tokens; mixed ones stretch it.",
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
                    "Prompts' tokens by source",
                    [
                        PromQuery(
                            rate("baton_worker_prefix_tokens_total", "source", HERE), "{{source}}"
                        )
                    ],
                    text="device: this worker's cache; dram and disk: the store.",
                    stacked=True,
                ),
                Panel(
                    "What became of requests",
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
                    "By gRPC status. DATA_LOSS: a link or memory damages blocks.",
                ),
                Panel(
                    "Preemptions",
                    [
                        PromQuery(
                            rate("baton_worker_preemptions_total", "instance", HERE), "{{instance}}"
                        )
                    ],
                    text="Answers that are computed again for lack of memory, a second.",
                ),
                Panel(
                    "Pauses",
                    [
                        PromQuery(
                            rate("baton_worker_pauses_total", "instance", HERE), "{{instance}}"
                        )
                    ],
                    text="Long prompts that let others pass, a second. Many are no fault.",
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
                    text="Blocks behind a read that has not ended.",
                ),
                Panel(
                    "Hand-off, bytes",
                    [
                        PromQuery(
                            rate("baton_worker_handoff_bytes_total", "instance, transport", HERE),
                            "{{instance}} {{transport}}",
                        )
                    ],
                    "Bps",
                    "Read from other workers.",
                ),
                Panel(
                    "Held for a reader, p99",
                    [
                        PromQuery(
                            quantile(0.99, "baton_worker_handoff_held_seconds", "instance", HERE),
                            "{{instance}}",
                        )
                    ],
                    "s",
                    "Decode workers without room leave prompts where they were computed.",
                ),
                Panel(
                    "Store, by way",
                    [PromQuery(rate("baton_worker_store_lookups_total", "way", HERE), "{{way}}")],
                    "reqps",
                    "fetch: read from the store; recompute: that was faster; none: it had no more.",
                    stacked=True,
                ),
            ],
        ),
    ],
    [INSTANCE],
)
