"""What is decided, and from what."""

from tools.dashboards.grafana import Dashboard, Panel, Query, Row
from tools.dashboards.queries import quantiles, rate

CONDUCTOR = Dashboard(
    "conductor",
    "Conductor",
    [
        Row(
            "Decisions",
            [
                Panel(
                    "By kind",
                    [Query(rate("baton_conductor_decisions_total", "policy, kind"), "{{kind}}")],
                    "reqps",
                    "pair: both pools; alone: the decode worker reads the prompt itself; one_pool: "
                    "the other pool is empty.",
                    stacked=True,
                ),
                Panel(
                    "Refused",
                    [Query(rate("baton_conductor_refusals_total", "reason"), "{{reason}}")],
                    "reqps",
                    "overloaded: nobody can meet the SLO; impossible: too long for any; nobody: an "
                    "empty cluster.",
                    stacked=True,
                ),
                Panel(
                    "Placed again",
                    [Query(rate("baton_conductor_replacements_total"), "requests")],
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
                    [Query("max(baton_conductor_forecast_requests_per_second)", "requests")],
                    "reqps",
                ),
            ],
        ),
        Row(
            "What it knows",
            [
                Panel(
                    "Age of the registry",
                    [Query("baton_conductor_registry_age_seconds", "{{instance}}")],
                    "s",
                    "Beyond ten seconds nobody is refused any more.",
                ),
                Panel(
                    "Blocks in stores",
                    [Query("baton_conductor_mirror_blocks", "{{instance}}")],
                    text="As conductors know them; all should know as many.",
                ),
                Panel(
                    "Leads",
                    [Query("baton_conductor_leads", "{{instance}}")],
                    text="Which one resizes the pools in Kubernetes.",
                    most=1,
                ),
                Panel(
                    "Store nodes followed",
                    [Query("baton_conductor_mirror_nodes", "{{instance}}")],
                ),
            ],
        ),
    ],
)
