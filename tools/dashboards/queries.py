"""What dashboards ask Prometheus, and the panels that several of them have."""

from tools.dashboards.grafana import Panel, PromQuery


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    """Of a histogram of ours, over whatever was scraped."""
    labels = f"le, {by}" if by else "le"
    chosen = f"{{{where}}}" if where else ""
    return (
        f"histogram_quantile({q}, sum by ({labels}) "
        f"(rate({histogram}_bucket{chosen}[$__rate_interval])))"
    )


def rate(counter: str, by: str = "", where: str = "") -> str:
    """Per second, summed over processes."""
    chosen = f"{{{where}}}" if where else ""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({counter}{chosen}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Of two sums; nothing where there is nothing."""
    return f"{part} / ({whole} > 0)"


def quantiles(histogram: str, by: str = "", where: str = "") -> list[PromQuery]:
    """Median, p90 and p99."""
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        PromQuery(quantile(q, histogram, by, where), f"p{q * 100:g}{legend}")
        for q in (0.5, 0.9, 0.99)
    ]


def stat(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    """One number."""
    return Panel(title, [PromQuery(expr, title)], unit, text, kind="stat", width=4)
