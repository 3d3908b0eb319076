"""The alerts for Prometheus and the dashboard for Grafana: they read, and each metric in them is one that is told.

Not tried: Grafana itself; that an alert fires. Where there is a `promtool`, it checks the rules.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "packaging" / "prometheus" / "walrider-alerts.yml"
DASHBOARD = ROOT / "packaging" / "grafana" / "walrider.json"


def told():
    """The metrics that the documents list, which unit tests hold against the program."""
    names = set()
    for name in ("standby.md", "top.md"):
        names.update(re.findall(r"`(walrider_\w+)", (ROOT / "docs" / name).read_text()))
    return names | {"up"}


def metrics_of(expression):
    """The names of metrics in an expression of PromQL."""
    bare = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\b(?:walrider_\w+|up)\b", re.sub(r"\{[^}]*\}", "", bare)))


def assert_known(expression):
    """Each metric is told, or is a bucket of one that is."""
    found = {re.sub("_bucket$", "", name) for name in metrics_of(expression)}
    assert found and found <= told(), (expression, found - told())


def test_alerts():
    """Each rule has an expression of known metrics, and says what is wrong."""
    text = ALERTS.read_text()
    expressions = re.findall(r"(?m)^ +expr: (.*)$", text)
    assert len(expressions) == text.count("- alert:") == text.count("summary:") == text.count("severity:") >= 12
    for expression in expressions:
        assert_known(expression)
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "rules", ALERTS], check=True, timeout=60)


def test_dashboard():
    """Each panel has its place and asks for known metrics."""
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 10 and len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            assert_known(target["expr"])
