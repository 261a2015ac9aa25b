// Small SVG charts: a sparkline, and lines over time with a readout. Colours come from the style sheet.

import { h } from "./dom.js";

export function sparkline(values, colour, label) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length < 2) return h("svg", { class: "spark", viewBox: "0 0 120 26", "aria-hidden": "true" });
  const most = Math.max(...known, 1e-9);
  const step = 120 / (values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)},${(24 - ((value ?? 0) / most) * 21).toFixed(1)}`);
  return h(
    "svg",
    { class: "spark", viewBox: "0 0 120 26", preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("path", { d: `M0,26 L${points.join(" L")} L120,26 Z`, class: "area", style: { fill: colour } }),
    h("polyline", { points: points.join(" "), style: { stroke: colour } }),
  );
}

/** `lines`: [{name, colour, values, dashed}], one value for each of `times` (seconds since the epoch). `scale`: round
    the axis in these units. `latest`: the legend has the last sample, also where it is unknown, and not the last known. */
export function lineChart({ times, lines, format, label, most = null, scale = 1, latest = false }) {
  const shown = lines.filter((line) => line.values.some((value) => value !== null && value !== undefined));
  if (times.length < 2 || !shown.length) return h("p", { class: "nodata" }, "Nothing measured in this time. The chart fills while requests come.");
  const highest = Math.max(...shown.flatMap((line) => line.values.map((value) => (value ?? 0) / scale)), scale > 1 ? 1 : 0);
  const top = most ?? niceTop(highest || 1) * scale;
  const begin = times[0];
  const span = times[times.length - 1] - begin || 1;
  const x = (at) => ((at - begin) / span) * 100;
  const y = (value) => (1 - Math.max(0, value) / top) * 100;
  const current = (line) => format(latest ? line.values.at(-1) ?? null : last(line.values));
  const described = `${label}: ${shown.map((line) => `${line.name} ${current(line)}`).join(", ")}`;
  return h(
    "figure",
    { class: "chart" },
    h("div", { class: "yAxis", "aria-hidden": "true" }, [1, 0.5, 0].map((part) => h("span", { key: part }, format(top * part)))),
    h(
      "div",
      { class: "plot", onpointermove: (event) => readout(event, times, shown, format), onpointerleave: hideReadout },
      h(
        "svg",
        { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": described },
        [0, 50, 100].map((at) => h("line", { key: at, x1: 0, x2: 100, y1: at, y2: at, class: "grid" })),
        shown.map((line) => h("path", { key: line.name, d: path(times, line.values, x, y), class: line.dashed ? "dashed" : "", style: { stroke: line.colour } })),
      ),
      h("i", { class: "cursor" }),
    ),
    h("div", { class: "xAxis", "aria-hidden": "true" }, [0, 0.5, 1].map((part) => h("span", { key: part }, timeLabel(begin + span * part, span)))),
    h("figcaption", {}, shown.map((line) => h("span", { key: line.name }, h("b", { class: line.dashed ? "dashed" : "", style: { background: line.colour } }), line.name, h("em", {}, current(line))))),
  );
}

function last(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function path(times, values, x, y) {
  let text = "";
  let open = false;
  times.forEach((at, index) => {
    const value = values[index];
    if (value === null || value === undefined) open = false;
    else {
      text += `${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      open = true;
    }
  });
  return text;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const factor of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (factor * power >= value) return factor * power;
  return value;
}

function timeLabel(at, span) {
  const text = new Date(at * 1000).toTimeString();
  return span > 600 ? text.slice(0, 5) : text.slice(0, 8);
}

function readout(event, times, lines, format) {
  const plot = event.currentTarget;
  const box = plot.getBoundingClientRect();
  const part = (event.clientX - box.left) / box.width;
  const at = Math.round(part * (times.length - 1));
  if (at < 0 || at >= times.length) return;
  const cursor = plot.querySelector(".cursor");
  cursor.style.setProperty("left", `${part * 100}%`);
  cursor.style.setProperty("opacity", "1");
  const captions = plot.parentNode.querySelectorAll("figcaption em");
  lines.forEach((line, index) => captions[index] && (captions[index].textContent = format(line.values[at] ?? null)));
}

function hideReadout(event) {
  event.currentTarget.querySelector(".cursor").style.setProperty("opacity", "0");
}
