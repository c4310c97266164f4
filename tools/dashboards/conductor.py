"""The dashboard of the conductor's decisions and of the data that they are based on."""

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
                    "pair: one worker of each pool; alone: the decode worker also prefills; "
                    "one_pool: the other pool is empty.",
                    stacked=True,
                ),
                Panel(
                    "Refused",
                    [PromQuery(rate("baton_conductor_refusals_total", "reason"), "{{reason}}")],
                    "reqps",
                    "overloaded: no worker can meet the SLO; impossible: too long for every "
                    "worker; nobody: no worker is ready.",
                    stacked=True,
                ),
                Panel(
                    "Placed again",
                    [PromQuery(rate("baton_conductor_replacements_total"), "requests")],
                    "reqps",
                ),
                Panel("Decision time", quantiles("baton_conductor_decision_seconds"), "s"),
                Panel(
                    "TTFT, actual / predicted",
                    quantiles("baton_time_to_first_token_prediction_ratio"),
                    "short",
                    "1: as predicted. Far above: workers are slower than they reported.",
                ),
                Panel(
                    "Load forecast",
                    [PromQuery("max(baton_conductor_forecast_requests_per_second)", "requests")],
                    "reqps",
                ),
            ],
        ),
        PanelRow(
            "View of the cluster",
            [
                Panel(
                    "Age of the registry",
                    [PromQuery("baton_conductor_registry_age_seconds", "{{instance}}")],
                    "s",
                    "Above 10 s, conductors no longer refuse requests.",
                ),
                Panel(
                    "Blocks in stores",
                    [PromQuery("baton_conductor_mirror_blocks", "{{instance}}")],
                    text="As each conductor knows them; the numbers should be equal.",
                ),
                Panel(
                    "Leads",
                    [PromQuery("baton_conductor_is_leader", "{{instance}}")],
                    text="The leader resizes the pools in Kubernetes.",
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
