"""The Helm chart, and helm as a program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "aim-gpu-sharing"
NAMESPACE, RELEASE = "gpu-sharing", "sharing"
HELM = Path(sys.executable).parent / "helm"


def helm(*arguments: str, kubeconfig: Path | None = None, check: bool = True) -> str:
    program = str(HELM) if HELM.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    folders = {name: f"/tmp/aimgpu-helm-{os.getpid()}" for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}  # noqa: S108
    environment = os.environ | folders | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"helm {' '.join(arguments)}: {done.stderr}\n{done.stdout}")
    return done.stdout + done.stderr
