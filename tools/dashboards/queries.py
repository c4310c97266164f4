"""Prometheus queries and panels that several dashboards share."""

from tools.dashboards.grafana import Panel, PromQuery


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    """Return the query for the ``q`` quantile of one of Baton's histograms over all processes."""
    labels = f"le, {by}" if by else "le"
    chosen = f"{{{where}}}" if where else ""
    return (
        f"histogram_quantile({q}, sum by ({labels}) "
        f"(rate({histogram}_bucket{chosen}[$__rate_interval])))"
    )


def rate(counter: str, by: str = "", where: str = "") -> str:
    """Return the query for a counter's rate per second, summed over processes."""
    chosen = f"{{{where}}}" if where else ""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({counter}{chosen}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return the query for ``part / whole``; it has no value where ``whole`` is 0."""
    return f"{part} / ({whole} > 0)"


def quantiles(histogram: str, by: str = "", where: str = "") -> list[PromQuery]:
    """Return the queries for median, p90 and p99."""
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        PromQuery(quantile(q, histogram, by, where), f"p{q * 100:g}{legend}")
        for q in (0.5, 0.9, 0.99)
    ]


def stat(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    """Return a panel with one number."""
    return Panel(title, [PromQuery(expr, title)], unit, text, kind="stat", width=4)
