"""Write the dashboards into the chart."""

from tools.dashboards import DASHBOARDS, FOLDER

FOLDER.mkdir(parents=True, exist_ok=True)
for dashboard in DASHBOARDS:
    (FOLDER / f"{dashboard.name}.json").write_text(dashboard.render(), encoding="utf-8")
    print(f"{dashboard.name}: {len(list(dashboard.queries))} queries")
