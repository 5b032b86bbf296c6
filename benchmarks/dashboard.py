"""The Grafana dashboard without a Grafana: its panels drawn from a running Prometheus, its JSON checked by Grafana's types.

    python benchmarks/dashboard.py --prometheus 127.0.0.1:9090 --output dashboard.html
    python benchmarks/dashboard.py --types

The first asks every query over the last minutes, draws each panel where Grafana would put it, and exits with 1 if one has no
data. The second compiles the dashboard as a value of the types that npm's `@grafana/schema` publishes, panel options and
field configuration included; it needs npm.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtllm_pipeline.hosting.dashboard import dashboard

MINUTES: Final = 5
STEP_S: Final = 5
_CELL: Final = (56, 36)
"""Pixels of one unit of Grafana's grid."""
_PANELCFG: Final = "./node_modules/@grafana/schema/dist/esm/raw/composable"
_TYPES: Final = f"""
import type {{ Dashboard, Panel, RowPanel }} from '@grafana/schema';
import type * as timeseries from '{_PANELCFG}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as stat from '{_PANELCFG}/stat/panelcfg/x/StatPanelCfg_types.gen';
// JSON has texts where the types have enumerations.
type Text<T> = T extends string ? (string extends T ? string : `${{T}}`)
  : T extends Array<infer U> ? Text<U>[] : T extends object ? {{ [K in keyof T]: Text<T[K]> }} : T;
type Defaults = Omit<Text<NonNullable<Panel['fieldConfig']>['defaults']>, 'custom'>;
type Of<Type, Options, Custom> = Omit<Text<Panel>, 'type' | 'options' | 'fieldConfig'> & {{
  type: Type; options: Text<Partial<Options>>;
  fieldConfig: {{ defaults: Defaults & {{ custom?: Text<Custom> }}; overrides: [] }} }};
type Ours = Omit<Text<Dashboard>, 'panels'> & {{ panels: Array<Text<RowPanel>
  | Of<'timeseries', timeseries.Options, timeseries.FieldConfig> | Of<'stat', stat.Options, {{}}>> }};
export const dashboard: Ours = """


def series(prometheus: str, expression: str, legend: str) -> list[dict[str, Any]]:
    """What a query gives over the last minutes, as rows of `at`, `line` and `value`."""
    for variable in ("server", "instance", "model"):
        expression = expression.replace(f"${variable}", ".*")
    now_s = time.time()
    query = {
        "query": expression.replace("$__rate_interval", f"{4 * STEP_S}s"),
        "start": now_s - 60 * MINUTES,
        "end": now_s,
        "step": STEP_S,
    }
    url = f"http://{prometheus}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    return [
        {
            "at": at_s * 1000,
            "line": _named(legend, each["metric"]),
            "value": float(value),
        }
        for each in found
        for at_s, value in each["values"]
        if value not in {"NaN", "+Inf"}
    ]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), legend)


def drawn(panel: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A panel as SVG, or as a number."""
    import vl_convert

    if panel["type"] == "stat":
        return f"<b>{rows[-1]['value']:.4g} {panel['fieldConfig']['defaults']['unit']}</b>"
    width, height = (
        size * cell for size, cell in zip((panel["gridPos"]["w"], panel["gridPos"]["h"]), _CELL, strict=True)
    )
    return vl_convert.vegalite_to_svg(
        {
            "width": width - 90,
            "height": height - 110,
            "data": {"values": rows},
            "mark": {"type": "line"},
            "encoding": {
                "x": {"field": "at", "type": "temporal", "title": None},
                "y": {"field": "value", "type": "quantitative", "title": panel["fieldConfig"]["defaults"]["unit"]},
                "color": {
                    "field": "line",
                    "legend": {"orient": "bottom", "title": None, "columns": 3, "labelLimit": 240},
                },
            },
        }
    )


def page(prometheus: str) -> tuple[str, list[str]]:
    """All panels as an HTML page, and the titles of those without data."""
    parts, empty, row = [], [], ""
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        place = f"left:{at['x'] * _CELL[0]}px;top:{at['y'] * _CELL[1]}px;width:{at['w'] * _CELL[0] - 8}px;height:{at['h'] * _CELL[1] - 8}px"
        if panel["type"] == "row":
            row, body = panel["title"], ""
        else:
            rows = [
                each for query in panel["targets"] for each in series(prometheus, query["expr"], query["legendFormat"])
            ]
            empty += [] if rows else [f"{row}: {panel['title']}"]
            body = drawn(panel, rows) if rows else "No data"
        parts.append(f'<div class="{panel["type"]}" style="{place}"><h3>{html.escape(panel["title"])}</h3>{body}</div>')
    style = "body{font:12px sans-serif;position:relative}div{position:absolute;overflow:hidden}h3{margin:4px}.timeseries,.stat{border:1px solid #ccc}.stat b{font-size:24px;margin:8px}"
    return f"<!doctype html><meta charset=utf-8><style>{style}</style><body>{''.join(parts)}", empty


def check_types() -> int:
    """Compile the dashboard as a value of Grafana's types; the exit status of the compiler."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "package.json").write_text('{"private": true}')
        subprocess.run(["npm", "install", "--silent", "typescript@5", "@grafana/schema"], cwd=folder, check=True)
        (Path(folder) / "dashboard.ts").write_text(f"{_TYPES}{json.dumps(dashboard(), indent=1)};\n")
        version = json.loads((Path(folder) / "node_modules/@grafana/schema/package.json").read_text())["version"]
        options = "--noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext --target es2022"
        done = subprocess.run(["npx", "tsc", *options.split(), "dashboard.ts"], cwd=folder, check=False)
    print(f"@grafana/schema {version}: {'fits' if done.returncode == 0 else 'does not fit'}")
    return done.returncode


def main() -> int:
    """As the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", metavar="HOST:PORT")
    parser.add_argument("--output", metavar="FILE", type=Path, default=Path("dashboard.html"))
    parser.add_argument("--types", action="store_true")
    given = parser.parse_args()
    if given.types:
        return check_types()
    if given.prometheus is None:
        parser.error("give --prometheus or --types")
    text, empty = page(given.prometheus)
    given.output.write_text(text, encoding="utf-8")
    print("\n".join(f"no data: {title}" for title in empty) or "every panel has data")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
