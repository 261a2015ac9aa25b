import base64
import hashlib
import re

from aimgpu.units import GIB
from aimgpu.web.page import PAGE_HEADERS, render_status_page
from aimgpu.web.view import GpuRow, ModelRow, PromiseRow, StatusView

MODEL = ModelRow(
    name="chat",
    model="smollm2",
    engine="llamacpp",
    gpu="MI300X",
    partition="gpu0/0",
    memory_bytes=2 * GIB,
    level="none",
    state="ready",
    endpoint="http://127.0.0.1:8080/v1",
)
GPU = GpuRow(
    id="gpu0",
    name="MI300X",
    layout="SPX/NPS1",
    total_bytes=192 * GIB,
    granted_bytes=2 * GIB,
    free_bytes=190 * GIB,
    simulated=True,
)


def view(**changes: object) -> StatusView:
    fields: dict[str, object] = {
        "version": "0.1.0",
        "simulated": True,
        "api_url": "http://127.0.0.1:8080/v1",
        "models": (MODEL,),
        "gpus": (GPU,),
    }
    return StatusView(**(fields | changes))  # type: ignore[arg-type]


def test_the_page_says_simulated_only_when_it_is() -> None:
    assert "SIMULATED" in render_status_page(view())
    assert "SIMULATED" not in render_status_page(view(simulated=False))


def test_the_page_shows_each_model_and_gpu() -> None:
    page = render_status_page(view())
    for text in ("chat", "smollm2", "llamacpp", "MI300X", "gpu0/0", "2GiB", "none", "ready", "190GiB", "192GiB"):
        assert text in page


def test_what_others_wrote_cannot_become_markup() -> None:
    hostile = ModelRow(
        name="<script>x</script>",
        model='"><img src=x>',
        engine="&",
        gpu="<b>",
        partition="p",
        memory_bytes=None,
        level="none",
        state='failed" onload="x',
        reason="<i>",
    )
    page = render_status_page(view(models=(hostile,), notes=("<u>",)))
    for markup in ("<script", "<img", "<b>", "<i>", "<u>", 'failed" onload'):
        assert markup not in page


def test_the_policy_allows_the_pages_own_style_and_nothing_else() -> None:
    page = render_status_page(view())
    [style] = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in PAGE_HEADERS["content-security-policy"]
    assert "default-src 'none'" in PAGE_HEADERS["content-security-policy"]
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert " style=" not in page


def test_an_empty_house_says_what_to_do() -> None:
    page = render_status_page(view(models=(), gpus=()))
    assert "aimgpu up" in page
    assert "No GPU was found" in page


def test_promises_are_shown_where_there_are_any() -> None:
    assert "Promises" not in render_status_page(view())
    row = PromiseRow(
        model="chat", promised_to="low", promise="99% latency <= 60s", kept=0.985, budget_left=-0.5, burn=None, broken=True
    )
    page = render_status_page(view(promises=(row,)))
    for text in ("Promises", "low", "99% latency &lt;= 60s", '<span class="failed">98.50%</span>', "-50%", "&ndash;"):
        assert text in page
