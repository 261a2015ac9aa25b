"""Write the Grafana dashboards of the chart with Grafana's own SDK; with --check, fail when one is out of date.

Every expression uses names of the metrics table and the selectors node, gpu and model; tests evaluate each of them in a real
Prometheus, and `tools/dashboard_pictures.py` draws them in Perses. They were never opened in Grafana.
"""

import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, statushistory, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from tools.dashboard_boards import BOARDS
from tools.dashboard_panels import Board, Panel

TARGET = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "aim-gpu-sharing" / "files" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "aimgpu"
_HIDDEN = ("Time", "Value")
_MANY = 2  # queries, or labels in a legend, from which on a legend below the panel would be cut off or take the lines' room


def build(board: Board) -> dict[str, Any]:
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG, "gpu"])
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .link(
            dashboard.DashboardLink("AIM")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(as_dropdown=True)
            .include_vars(include_vars=True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Data source"))
        .with_variable(_selector("node", "label_values(aim_gpu_up, node)"))
        .with_variable(_selector("gpu", 'label_values(aim_gpu_up{node=~"$node"}, gpu)'))
        .with_variable(_selector("model", 'label_values(aim_model_restarts_total{node=~"$node"}, model)'))
    )
    for title, panels in board.rows:
        builder = builder.with_row(dashboard.Row(title))
        for panel in panels:
            builder = builder.with_panel(_panel(panel))
    found: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True, indent=2).encode(builder.build()))
    return _numbered(_current(found))


def _current(found: dict[str, Any]) -> dict[str, Any]:
    """Without what the SDK still writes and Grafana has no more."""
    found.pop("style", None)
    for panel in found["panels"]:
        if panel["type"] == "table":
            panel["options"].pop("footer", None)
    for variable in found["templating"]["list"]:
        for key in ("auto", "auto_min", "auto_count", "id"):
            variable.pop(key, None)
    return found


def _selector(name: str, query: str) -> Any:  # noqa: ANN401 -- the SDK's builders
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize() if name != "gpu" else "GPU")
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(multi=True)
        .include_all(include_all=True)
        .all_value(".*")
    )


def _panel(panel: Panel) -> Any:  # noqa: ANN401 -- the SDK's builders
    make = {
        "timeseries": _timeseries,
        "stat": _stat,
        "bargauge": _bargauge,
        "table": _table,
        "statushistory": _statushistory,
    }[panel.kind]
    found = make(panel).title(panel.title).datasource(SOURCE).unit(panel.unit).span(panel.width).height(panel.height)
    found = found.no_value("no data")
    if panel.text:
        found = found.description(panel.text)
    if panel.most is not None:
        found = found.min(0).max(panel.most)
    if panel.limits:
        steps = [Threshold(color=colour, value=None if at == 0 else value) for at, (colour, value) in enumerate(panel.limits)]
        found = found.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    for number, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        query = query.legend_format(legend) if legend else query
        query = query.instant() if panel.kind in ("table", "bargauge", "stat") else query.range()
        found = found.with_target(query.format(PromQueryFormat.TABLE) if panel.kind == "table" else query)
    return found


def _timeseries(panel: Panel) -> Any:  # noqa: ANN401
    place = LegendPlacement.RIGHT if _has_long_legend(panel) else LegendPlacement.BOTTOM
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(place)
    found = (
        timeseries.Panel()
        .draw_style(GraphDrawStyle.LINE)
        .line_width(1)
        .fill_opacity(30 if panel.stacked else 0)
        .legend(legend.show_legend(show_legend=True).calcs([]))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    return found.stacking(common.StackingConfig().mode(StackingMode.NORMAL)) if panel.stacked else found


def _has_long_legend(panel: Panel) -> bool:
    """Of many lines, or of long names: several labels in one, or an instance."""
    return len(panel.queries) >= _MANY or any(
        legend.count("{{") >= _MANY or "{{instance_id}}" in legend for _, legend in panel.queries
    )


def _stat(_panel: Panel) -> Any:  # noqa: ANN401
    return stat.Panel().color_mode(BigValueColorMode.VALUE)


def _bargauge(_panel: Panel) -> Any:  # noqa: ANN401
    return bargauge.Panel().orientation(VizOrientation.HORIZONTAL)


def _table(panel: Panel) -> Any:  # noqa: ANN401
    """The labels that are named, in this order; neither the time nor the value, which is always 1."""
    shown = [label for label, _ in panel.columns]
    options = {
        "indexByName": {label: at for at, label in enumerate([*shown, *_HIDDEN])},
        "renameByName": dict(panel.columns),
        "excludeByName": dict.fromkeys(_HIDDEN, True),
    }
    found = table.Panel().show_header(show_header=True)
    return found.with_transformation(DataTransformerConfig(id_val="organize", options=options))


def _statushistory(panel: Panel) -> Any:  # noqa: ANN401
    words = {f"{value:g}": ValueMappingResult(text=text, color=_colour(panel, value), index=0) for value, text in panel.words}
    return statushistory.Panel().show_value(VisibilityMode.NEVER).mappings([ValueMap(options=words)])


def _colour(panel: Panel, value: float) -> str:
    return [colour for colour, least in panel.limits if value >= least][-1]


def _numbered(board: dict[str, Any]) -> dict[str, Any]:
    """Every panel has an id, and the file is the same whenever it is written."""
    for number, panel in enumerate(board["panels"], start=1):
        panel["id"] = number
    return board


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = []
    for board in BOARDS:
        path = TARGET / f"{board.uid}.json"
        text = json.dumps(build(board), indent=2, sort_keys=True) + "\n"
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.name)
        elif not check:
            TARGET.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
