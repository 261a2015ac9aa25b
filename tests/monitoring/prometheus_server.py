"""Debian's Prometheus, scraping a daemon."""

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.cluster.waiting import wait_for, wait_until
from tests.monitoring.dashboards import RULES

PROMETHEUS = shutil.which("prometheus")


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        (folder / RULES.name).write_text(RULES.read_text())
        scrape = {"job_name": "aimgpu", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [scrape],
            "rule_files": [RULES.name],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))

    def __enter__(self) -> Self:
        arguments = [
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self._get("/api/v1/query", {"query": expression})["result"])

    def label_values(self, label: str, match: str) -> list[str]:
        found = self._get(f"/api/v1/label/{label}/values", {"match[]": match})
        return [str(one) for one in found]

    def rules(self) -> dict[str, dict[str, Any]]:
        """By name: alerts and recording rules, with their health."""
        return {rule["name"]: rule for group in self._get("/api/v1/rules", {})["groups"] for rule in group["rules"]}

    def _get(self, path: str, query: dict[str, str]) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(query)}") as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from error

    def wait_for_scrapes(self, count: int) -> None:
        """Until it has read the daemon so many times."""

        def is_read() -> bool:
            try:
                found = self.query('sum_over_time(up{job="aimgpu"}[10m])')
            except (OSError, AssertionError):
                return False
            return bool(found) and int(float(found[0]["value"][1])) >= count

        wait_until(is_read, "scrapes", self._check)

    def wait_for_data(self, expression: str) -> list[dict[str, Any]]:
        """A scrape that takes longer than its second fails, and its series have no data until the next one."""
        return wait_for(lambda: self.query(expression), bool, f"data of {expression}", self._check)

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text()[-2000:])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
