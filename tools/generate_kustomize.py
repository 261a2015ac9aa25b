"""Write a kustomize base from the Helm chart: `make kustomize IMAGE=registry.example/aimgpu:0.2.0`."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "aim-gpu-sharing"
NAMESPACE = "aim-gpu-sharing"
_HELM = Path(sys.executable).parent / "helm"
_LOWEST = "1.34.0"  # with claims, which the default values ask for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", help="of every component, with its tag")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--values", type=Path, help="of the chart")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, text in render(given.image, given.values).items():
        (given.folder / name).write_text(text, encoding="utf-8")


def render(image: str, values: Path | None = None) -> dict[str, str]:
    """Every file with its text."""
    repository, _, tag = image.rpartition(":")
    command = [str(_HELM), "template", NAMESPACE, str(CHART), f"--namespace={NAMESPACE}", f"--kube-version={_LOWEST}"]
    command += [f"--set-string=image.repository={repository},image.tag={tag}", *([f"--values={values}"] if values else [])]
    text = subprocess.run([*command, "--include-crds", "--no-hooks"], capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own chart
    objects = [_plain(item) for item in yaml.safe_load_all(text) if item]
    definitions = [item for item in objects if item["kind"] == "CustomResourceDefinition"]
    others = [item for item in objects if item["kind"] != "CustomResourceDefinition"]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": NAMESPACE,
        "resources": ["namespace.yaml", "definitions.yaml", "parts.yaml"],
    }
    return {
        "kustomization.yaml": _yaml(kustomization),
        "namespace.yaml": _yaml({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        "definitions.yaml": _yaml(*definitions),
        "parts.yaml": _yaml(*others),
    }


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """Without what only Helm's own installations have."""
    labels = item["metadata"].get("labels") or {}
    labels.pop("helm.sh/chart", None)
    if "app.kubernetes.io/managed-by" in labels:
        labels["app.kubernetes.io/managed-by"] = "kustomize"
    return item


def _yaml(*documents: dict[str, Any]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)


if __name__ == "__main__":
    main()
