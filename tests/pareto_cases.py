"""A small report of ``baton plan --pareto``, with figures by hand."""

from simulator.pareto import ParetoPoint, ParetoReport, Slo, SloFigures, mark_frontiers
from simulator.running_costs import RunningCosts

HOSTILE = (
    "</script><script>window.injected=1</script><img src=x onerror=window.injected=2> [[script]]"
)
"""A name that would run a script if it was written into HTML as it is."""

COSTS = RunningCosts(3.6, True, 720)
"""$0.001 and 720 J per GPU and second."""

SLOS = (Slo(2.0, 0.05), Slo(1.0, 0.02))
TARGET = 0.9


def figures(tokens_per_second: float, attainment: float = 1.0) -> SloFigures:
    return SloFigures(
        attainment=attainment,
        meets_target=attainment >= TARGET,
        tokens_per_second_per_gpu=tokens_per_second,
        dollars_per_million_tokens=COSTS.dollars_per_million_tokens(tokens_per_second),
        max_kwh_per_million_tokens=COSTS.max_kwh_per_million_tokens(tokens_per_second),
        min_tokens_per_joule=COSTS.min_tokens_per_joule(tokens_per_second),
    )


def point(kind: str, rate: float, speed: float, *by_slo: SloFigures) -> ParetoPoint:
    prefill, decode, mixed = {"mixed": (0, 0, 4), "split": (1, 3, 0)}.get(kind, (1, 1, 2))
    latencies: dict[str, float | None] = {"p50": 1 / speed, "p90": 0.03, "p99": 0.04}
    return ParetoPoint(
        label={"mixed": "4 mixed", "split": "1+3"}.get(kind, HOSTILE),
        kind=kind,
        workers={"prefill": prefill, "decode": decode, "mixed": mixed},
        num_gpus=4,
        gpus_per_worker={"prefill": 1, "decode": 1, "mixed": 1},
        rate_rps=rate,
        tokens_per_second_per_user=speed,
        rejected_ratio=0.0,
        ttft_seconds={"p50": 0.5, "p90": 1.5, "p99": None},
        itl_seconds=latencies,
        by_slo=by_slo,
    )


def report() -> ParetoReport:
    """Return a report whose frontier, under the first SLO, has a mixed point (20 tokens/s per
    user), a split point (50), and one of a kind with a hostile name (60). Under the second one, it
    has the split point only."""
    points = [
        point("mixed", 10.0, 20.0, figures(1000), figures(500, 0.5)),
        point("mixed", 5.0, 40.0, figures(500), figures(400, 0.8)),
        point("split", 8.0, 50.0, figures(800), figures(750, 0.95)),
        point("split", 12.0, 30.0, figures(1100, 0.7), figures(0, 0.0)),
        point("other", 2.0, 60.0, figures(200), figures(10, 0.1)),
    ]
    about = {
        "model": HOSTILE,
        "gpu": "H100",
        "num_gpus": 4,
        "traffic": HOSTILE,
        "num_requests": 1000,
        "seed": 7,
        "costs": "costs from the GPU's datasheet",
        "highest_rps": 12.0,
    }
    split = {"up": "baton up --prefill 1 --decode 3", "helm_values": "pools: {}", "note": None}
    return ParetoReport(
        about=about,
        target=TARGET,
        costs=COSTS,
        slos=SLOS,
        deployments={
            "4 mixed": {"up": None, "helm_values": None, "note": "not yet"},
            "1+3": split,
            HOSTILE: {"up": HOSTILE, "helm_values": HOSTILE, "note": None},
        },
        points=mark_frontiers(points),
    )
