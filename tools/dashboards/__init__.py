"""Grafana's dashboards of Baton: ``python -m tools.dashboards`` writes them into the chart.

A test sees to it that what lies there is what is described here, and that every metric exists.
"""

from pathlib import Path

from tools.dashboards.conductor import CONDUCTOR
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.store import STORE
from tools.dashboards.tenants import TENANTS
from tools.dashboards.workers import WORKERS

DASHBOARDS = (OVERVIEW, WORKERS, STORE, TENANTS, CONDUCTOR)
FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "baton" / "dashboards"
