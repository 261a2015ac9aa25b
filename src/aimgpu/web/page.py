"""The plain status page: one HTML text, no script, nothing fetched from anywhere."""

import base64
import hashlib
from html import escape

from aimgpu.units import format_bytes
from aimgpu.web.view import GpuRow, ModelRow, PromiseRow, StatusView

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882;--ok:#1a7f37;--wait:#9a6700;--bad:#cf222e;--fill:#4493f8}
body{font:15px/1.5 system-ui,"DejaVu Sans",sans-serif;margin:0 auto;max-width:76rem;padding:1.5rem}
h1{font-size:1.4rem;margin:0 0 .25rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
.sim{background:#bf3989;color:#fff;padding:.6rem 1rem;border-radius:.5rem;font-weight:600;margin:1rem 0}
.note{background:var(--soft);padding:.6rem 1rem;border-radius:.5rem;margin:1rem 0}
.wrap{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.45rem .75rem;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;font-size:.85rem}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
pre{background:var(--soft);padding:.75rem 1rem;border-radius:.5rem;white-space:pre-wrap;overflow-wrap:anywhere}
.ready{color:var(--ok)}.failed{color:var(--bad)}.loading,.queued,.draining,.sleeping{color:var(--wait)}
.why{display:block;font-size:.85rem;opacity:.85}meter{width:9rem;height:.8rem}
footer{margin-top:2rem;font-size:.85rem;opacity:.7}
""".strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

PAGE_HEADERS: dict[str, str] = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def render_status_page(view: StatusView) -> str:
    """The page as text; send it with PAGE_HEADERS, which allow its style and nothing else."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="refresh" content="{view.refresh_seconds}">',
        f"<title>{'SIMULATED · ' if view.simulated else ''}AIM GPU Sharing</title>",
        '<link rel="icon" href="data:,">',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>AIM GPU Sharing</h1>",
        f"<p>OpenAI endpoint: <code>{escape(view.api_url)}</code></p>",
        *([_SIMULATED] if view.simulated else []),
        *(f'<p class="note">{escape(note)}</p>' for note in view.notes),
        _models(view),
        _gpus(view),
        _promises(view),
        _try_it(view),
        f"<footer>aimgpu {escape(view.version)} · this page asks again every {view.refresh_seconds} s</footer>",
        "</body></html>",
    ]
    return "\n".join(parts)


_SIMULATED = (
    '<p class="sim" role="status">SIMULATED GPU. The books are real and the models really answer, '
    "but they run on this machine's CPU: no memory or compute limit is enforced.</p>"
)


def _models(view: StatusView) -> str:
    head = ("Name", "Model", "Engine", "GPU and partition", "Memory granted", "Level", "State", "Endpoint")
    rows = [_model_row(row) for row in view.models]
    return f"<h2>Models</h2>{_table(head, rows, 'No model is deployed yet: <code>aimgpu up --file stack.yaml</code>.')}"


def _model_row(row: ModelRow) -> str:
    percent = f" {row.percent}%" if row.percent is not None else ""
    why = f'<span class="why">{escape(row.reason)}</span>' if row.reason else ""
    cells = [
        f"<strong>{escape(row.name)}</strong>",
        escape(row.model),
        escape(row.engine),
        f"{escape(row.gpu)}<span class='why'>{escape(row.partition)}</span>",
    ]
    state = f'<span class="{escape(row.state)}">{escape(row.state)}{percent}</span>{why}'
    after = [escape(row.level), state, f"<code>{escape(row.endpoint)}</code>" if row.endpoint else "&ndash;"]
    return "".join([*map(_cell, cells), _number(row.memory_bytes), *map(_cell, after)])


def _gpus(view: StatusView) -> str:
    head = ("GPU", "Layout", "Total", "Granted", "Free", "Measured", "Use")
    rows = [_gpu_row(row) for row in view.gpus]
    return f"<h2>GPUs</h2>{_table(head, rows, 'No GPU was found.')}"


def _gpu_row(row: GpuRow) -> str:
    simulated = " <strong>(simulated)</strong>" if row.simulated else ""
    meter = (
        f'<meter min="0" max="{row.total_bytes}" value="{row.granted_bytes}" '
        f'title="granted">{escape(format_bytes(row.granted_bytes))}</meter>'
    )
    sizes = (row.total_bytes, row.granted_bytes, row.free_bytes, row.measured_bytes)
    name = f"{escape(row.name)}{simulated}<span class='why'>{escape(row.id)}</span>"
    return "".join([_cell(name), _cell(escape(row.layout)), *map(_number, sizes), _cell(meter)])


def _promises(view: StatusView) -> str:
    if not view.promises:
        return ""
    head = ("Model", "Class", "Promise", "Kept, 6 hours", "Budget left", "Burn, 5 minutes")
    return f"<h2>Promises</h2>{_table(head, [_promise_row(row) for row in view.promises], '')}"


def _promise_row(row: PromiseRow) -> str:
    kept = _figure(row.kept, "{:.2%}")
    cells = [f"<strong>{escape(row.model)}</strong>", escape(row.promised_to), escape(row.promise)]
    shown = f'<span class="failed">{kept}</span>' if row.broken else kept
    figures = (shown, _figure(row.budget_left, "{:.0%}"), _figure(row.burn, "{:.1f}x"))
    return "".join([*map(_cell, cells), *(f'<td class="n">{figure}</td>' for figure in figures)])


def _figure(value: float | None, shape: str) -> str:
    return "&ndash;" if value is None else shape.format(value)


def _try_it(view: StatusView) -> str:
    ready = next((row.name for row in view.models if row.state == "ready"), None)
    if ready is None:
        return ""
    line = (
        f"curl {view.api_url}/chat/completions -H 'Content-Type: application/json' -d "
        f'\'{{"model": "{ready}", "max_tokens": 100, "messages": [{{"role": "user", "content": "Say hello"}}]}}\''
    )
    return f"<h2>Try it</h2><pre>{escape(line, quote=False)}</pre>"


def _table(head: tuple[str, ...], rows: list[str], empty: str) -> str:
    if not rows:
        return f"<p>{empty}</p>"
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wrap"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(html: str) -> str:
    return f"<td>{html}</td>"


def _number(count: int | None) -> str:
    return f'<td class="n">{"&ndash;" if count is None else escape(format_bytes(count))}</td>'
