"""The web chat of examples/web_chat as objects of a cluster: its files in a ConfigMap, its key in a Secret."""

from importlib import resources
from pathlib import Path
from typing import Any

from aimgpu.errors import AimGpuError, ClusterFailed
from aimgpu.keyfile import KeyStore
from aimgpu.kubernetes.api.client import Client
from aimgpu.kubernetes.api.resources import SECRETS
from aimgpu.kubernetes.models.serving.key_secret import KeySecret
from aimgpu.kubernetes.models.serving.manifests import Manifest
from aimgpu.kubernetes.vocabulary.model_labels import MANAGED

NAME = "aim-gpu-web-chat"
COMPONENT = {"app.kubernetes.io/component": "web-chat", "app.kubernetes.io/part-of": "aim-gpu-sharing"}
SELECTOR = ",".join(f"{key}={value}" for key, value in (MANAGED | COMPONENT).items())
_PORT = 8000
_FILES = ("server.py", "page.html")


def render_web_chat(image: str, gateway: str, pull_policy: str | None = None) -> list[Manifest]:
    """Without the Secret, which is made once. `gateway`: "http://aim-gpu-sharing-gateway.NAMESPACE.svc"."""
    container: dict[str, Any] = {
        "name": "web-chat",
        "image": image,
        "command": ["python", "/chat/server.py", "--host", "0.0.0.0", "--port", str(_PORT)],  # noqa: S104 - a pod
        "env": [
            {"name": "AIMGPU_URL", "value": gateway},
            {"name": "AIMGPU_API_KEY", "valueFrom": {"secretKeyRef": {"name": NAME, "key": "key"}}},
        ],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "chat", "mountPath": "/chat", "readOnly": True}],
    }
    if pull_policy:
        container["imagePullPolicy"] = pull_policy
    pod = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "chat", "configMap": {"name": NAME}}],
    }
    template = {"metadata": {"labels": {**MANAGED, **COMPONENT}}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": COMPONENT}, "template": template}
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return [
        _object("v1", "ConfigMap", data={name: _read(name) for name in _FILES}),
        _object("apps/v1", "Deployment", spec=spec),
        _object("v1", "Service", spec={"selector": COMPONENT, "ports": ports}),
    ]


async def ensure_key(client: Client, namespace: str, gateway_namespace: str) -> bool:
    """The chat's own key, made once; whether it was made now."""
    if await client.find(SECRETS, NAME, namespace) is not None:
        return False
    name = f"web-chat.{namespace}"

    def renew(store: KeyStore) -> str:
        if any(one.name == name for one in store.read()):  # of a chat that was removed: its key is known to no one
            store.remove(name)
        return store.add(name)

    key = await KeySecret(client, gateway_namespace).change(renew)
    await client.create(SECRETS, _object("v1", "Secret", stringData={"key": key}), namespace)
    return True


async def forget_key(client: Client, namespace: str, gateway_namespace: str) -> None:
    """So that a copy of the removed Secret opens nothing."""
    try:
        await KeySecret(client, gateway_namespace).change(lambda store: store.remove(f"web-chat.{namespace}"))
    except ClusterFailed:
        raise
    except AimGpuError:  # there was none
        return


def _read(name: str) -> str:
    """From the installed package, or from a checkout."""
    packaged = resources.files("aimgpu") / "_web_chat" / name
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    checkout = Path(__file__).resolve().parents[5] / "examples" / "web_chat" / name
    return checkout.read_text(encoding="utf-8")


def _object(version: str, kind: str, **content: object) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NAME, "labels": {**MANAGED, **COMPONENT}}, **content}
