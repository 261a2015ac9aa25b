"""What a cluster looks like when something that was waited for did not come: the end of the message of that failure."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

HEADING = "What the cluster looks like:"
# About 6 kB together: often only the end of a run's output is kept.
POD_CHARACTERS, EVENT_CHARACTERS, DESCRIPTION_CHARACTERS, LOG_CHARACTERS = 900, 1200, 1900, 900
LINE_CHARACTERS = 240

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TROUBLE = re.compile(r"\b(warn|error|fail|panic|timed out)", re.IGNORECASE)

Ask = Callable[..., str]  # runs kubectl; what it printed, or why it failed


def situation(ask: Ask, namespace: str, target: str = "", logs: Mapping[str, str] | None = None) -> str:
    """Pods that are not ready, the last events of a namespace, what kubectl describes of the target, and ends of logs."""
    parts = [
        ("pods that are not ready", _end(unready_pods(ask("get", "pods", "--all-namespaces", "--output=json")), POD_CHARACTERS))
    ]
    columns = "custom-columns=REASON:.reason,KIND:.involvedObject.kind,NAME:.involvedObject.name,MESSAGE:.message"
    options = (f"--namespace={namespace}", "--sort-by=.metadata.creationTimestamp", "--no-headers", f"--output={columns}")
    parts.append((f"last events of {namespace}", _end(ask("get", "events", *options).splitlines(), EVENT_CHARACTERS)))
    if target:
        described = ask("describe", target, f"--namespace={namespace}").splitlines()
        parts.append((f"kubectl describe {target}", _end(described, DESCRIPTION_CHARACTERS)))
    for name, text in (logs or {}).items():
        parts.append((f"end of the log of {name}", _end(telling(text, namespace), LOG_CHARACTERS)))
    return "\n".join((HEADING, *(f"--- {title}:\n{text}" for title, text in parts)))


def unready_pods(answer: str) -> list[str]:
    """A line for each pod that neither is ready nor has done its work."""
    try:
        pods = json.loads(answer)["items"]
    except (ValueError, KeyError):
        return answer.splitlines()
    return [_line(pod) for pod in pods if not _is_well(pod)] or ["none"]


def telling(log: str, namespace: str) -> list[str]:
    """Lines that name the namespace or sound like trouble, without colours; all lines where there are none."""
    lines = _COLOUR.sub("", log).splitlines()
    return [line for line in lines if namespace in line or _TROUBLE.search(line)] or lines


def _is_well(pod: Mapping[str, Any]) -> bool:
    status = pod.get("status", {})
    is_ready = any(found["type"] == "Ready" and found["status"] == "True" for found in status.get("conditions", ()))
    return is_ready or status.get("phase") == "Succeeded"


def _line(pod: Mapping[str, Any]) -> str:
    metadata, status = pod["metadata"], pod.get("status", {})
    node = pod.get("spec", {}).get("nodeName", "no node")
    words = [f"{metadata.get('namespace', '')}/{metadata['name']}", status.get("phase", "no phase"), node]
    words += ["being deleted"] if "deletionTimestamp" in metadata else []
    words += [f"{found['name']}: {_reason(found)}" for found in _containers(status) if not found.get("ready")]
    words += [
        found["message"] for found in status.get("conditions", ()) if found["type"] == "PodScheduled" and "message" in found
    ]
    return " ".join(", ".join(words).split())


def _containers(status: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    return (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))


def _reason(container: Mapping[str, Any]) -> str:
    ((name, state),) = (container.get("state") or {"unknown": {}}).items()
    details = [str(state[key]) for key in ("reason", "exitCode", "message") if key in state]
    return " ".join((name, *details))


def _end(lines: Iterable[str], characters: int) -> str:
    """The last lines that fit, none of them longer than a screen's width or two."""
    kept: list[str] = []
    for line in reversed([line.rstrip()[:LINE_CHARACTERS] for line in lines]):
        characters -= len(line) + 1
        if characters < 0:
            kept.append("...")
            break
        kept.append(line)
    return "\n".join(reversed(kept))
