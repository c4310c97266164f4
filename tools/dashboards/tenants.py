"""The dashboard of tenants: their usage, and the latencies they get."""

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
                    "Prompt tokens",
                    [
                        PromQuery(
                            rate("baton_tenant_prompt_tokens_total", "tenant", THEIRS), "{{tenant}}"
                        )
                    ],
                    text="Per second.",
                    stacked=True,
                ),
                Panel(
                    "Answer tokens",
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
                    "requests, tokens, concurrent: the tenant's limits; full: the router's.",
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
                    "Share of its prompt tokens that were cached.",
                    most=1,
                ),
            ],
        ),
        PanelRow(
            "Accounting",
            [
                Panel(
                    "Usage not yet written to Redis",
                    [PromQuery("sum(baton_usage_unsent)", "counters")],
                ),
                Panel(
                    "Tenants file",
                    [PromQuery("max(baton_tenants_file_stale)", "1: invalid, old one in force")],
                    most=1,
                ),
                Panel(
                    "Limits split among routers",
                    [PromQuery("max(baton_quota_store_unreachable)", "1: Redis is unreachable")],
                    most=1,
                ),
            ],
        ),
    ],
    [TENANT],
)
