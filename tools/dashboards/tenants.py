"""Who uses the cluster, and how well they are served."""

from tools.dashboards.grafana import Dashboard, Panel, PanelRow, PromQuery, Variable
from tools.dashboards.queries import rate, share

TENANT = Variable("tenant", "baton_tenant_requests_total", "tenant")
THEIRS = 'tenant=~"$tenant"'

TENANTS = Dashboard(
    "tenants",
    "Tenants",
    [
        PanelRow(
            "Use",
            [
                Panel(
                    "Requests",
                    [
                        PromQuery(
                            rate("baton_tenant_requests_total", "tenant", THEIRS), "{{tenant}}"
                        )
                    ],
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Tokens of prompts",
                    [
                        PromQuery(
                            rate("baton_tenant_prompt_tokens_total", "tenant", THEIRS), "{{tenant}}"
                        )
                    ],
                    text="Per second.",
                    stacked=True,
                ),
                Panel(
                    "Tokens of answers",
                    [
                        PromQuery(
                            rate("baton_tenant_completion_tokens_total", "tenant", THEIRS),
                            "{{tenant}}",
                        )
                    ],
                    text="Per second.",
                    stacked=True,
                ),
            ],
        ),
        PanelRow(
            "Service",
            [
                Panel(
                    "Goodput",
                    [
                        PromQuery(
                            share(
                                rate(
                                    "baton_tenant_slo_answers_total",
                                    "tenant",
                                    f'{THEIRS},verdict="met"',
                                ),
                                rate("baton_tenant_slo_answers_total", "tenant", THEIRS),
                            ),
                            "{{tenant}}",
                        )
                    ],
                    "percentunit",
                    "Share of a tenant's answers within the SLO.",
                    most=1,
                ),
                Panel(
                    "Refused",
                    [
                        PromQuery(
                            rate("baton_tenant_refusals_total", "tenant, reason", THEIRS),
                            "{{tenant}} {{reason}}",
                        )
                    ],
                    "reqps",
                    "requests, tokens, concurrent: its own limits; full: the router.",
                ),
                Panel(
                    "Cached",
                    [
                        PromQuery(
                            share(
                                rate(
                                    "baton_tenant_prompt_tokens_total",
                                    "tenant",
                                    f'{THEIRS},source="cached"',
                                ),
                                rate("baton_tenant_prompt_tokens_total", "tenant", THEIRS),
                            ),
                            "{{tenant}}",
                        )
                    ],
                    "percentunit",
                    "Share of its prompts' tokens.",
                    most=1,
                ),
            ],
        ),
        PanelRow(
            "Books",
            [
                Panel(
                    "Usage not told to Redis", [PromQuery("sum(baton_usage_unsent)", "counters")]
                ),
                Panel(
                    "Tenants file",
                    [PromQuery("max(baton_tenants_file_stale)", "1: wrong as it is")],
                    most=1,
                ),
                Panel(
                    "Limits given in parts",
                    [PromQuery("max(baton_limits_split)", "1: Redis can't be asked")],
                    most=1,
                ),
            ],
        ),
    ],
    [TENANT],
)
