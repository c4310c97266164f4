"""Baton's Grafana dashboards: ``python -m tools.dashboards`` writes them into the chart.

A test checks that the files in the chart match this package, and that every metric exists.
"""

from pathlib import Path

from tools.dashboards.conductor import CONDUCTOR
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.store import STORE
from tools.dashboards.tenants import TENANTS
from tools.dashboards.workers import WORKERS

DASHBOARDS = (OVERVIEW, WORKERS, STORE, TENANTS, CONDUCTOR)
FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "baton" / "dashboards"
