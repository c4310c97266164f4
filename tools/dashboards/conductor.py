"""What is decided, and from what."""

from tools.dashboards.grafana import Dashboard, Panel, PanelRow, PromQuery
from tools.dashboards.queries import quantiles, rate

CONDUCTOR = Dashboard(
    "conductor",
    "Conductor",
    [
        PanelRow(
            "Decisions",
            [
                Panel(
                    "By kind",
                    [
                        PromQuery(
                            rate("baton_conductor_decisions_total", "policy, kind"), "{{kind}}"
                        )
                    ],
                    "reqps",
                    "pair: both pools; alone: the decode worker reads the prompt itself; one_pool: "
                    "the other pool is empty.",
                    stacked=True,
                ),
                Panel(
                    "Refused",
                    [PromQuery(rate("baton_conductor_refusals_total", "reason"), "{{reason}}")],
                    "reqps",
                    "overloaded: nobody can meet the SLO; impossible: too long for any; nobody: an "
                    "empty cluster.",
                    stacked=True,
                ),
                Panel(
                    "Placed again",
                    [PromQuery(rate("baton_conductor_replacements_total"), "requests")],
                    "reqps",
                ),
                Panel("What a decision takes", quantiles("baton_conductor_decision_seconds"), "s"),
                Panel(
                    "First token, came by predicted",
                    quantiles("baton_first_token_prediction_ratio"),
                    "short",
                    "1: as predicted. Far above: workers are slower than they told.",
                ),
                Panel(
                    "Load that is planned for",
                    [PromQuery("max(baton_conductor_forecast_requests_per_second)", "requests")],
                    "reqps",
                ),
            ],
        ),
        PanelRow(
            "What it knows",
            [
                Panel(
                    "Age of the registry",
                    [PromQuery("baton_conductor_registry_age_seconds", "{{instance}}")],
                    "s",
                    "Beyond ten seconds nobody is refused any more.",
                ),
                Panel(
                    "Blocks in stores",
                    [PromQuery("baton_conductor_mirror_blocks", "{{instance}}")],
                    text="As conductors know them; all should know as many.",
                ),
                Panel(
                    "Leads",
                    [PromQuery("baton_conductor_leads", "{{instance}}")],
                    text="Which one resizes the pools in Kubernetes.",
                    most=1,
                ),
                Panel(
                    "Store nodes followed",
                    [PromQuery("baton_conductor_mirror_nodes", "{{instance}}")],
                ),
            ],
        ),
    ],
)
