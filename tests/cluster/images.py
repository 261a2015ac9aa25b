"""Container images written by hand: nothing is pulled, and few are larger than busybox.

The Python image is a few empty folders and links: the node's base runtime spec mounts the host's ``/usr``, Python, the
virtual environment and this repository into every container (``container_mounts``), so that pods run the code under test
without an image build. The last two have paths of their own in there: a pod's volumes, such as its ``/tmp``, would hide
a checkout at the host's path.
"""

import gzip
import hashlib
import io
import json
import platform
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

FOLDERS = ("dev", "etc", "proc", "root", "run", "sys", "tmp", "usr", "var")
APPLETS = ("cat", "echo", "env", "grep", "httpd", "id", "ip", "ls", "nc", "printf", "sh", "sleep", "stat", "test", "wget")
REPOSITORY = Path(__file__).resolve().parents[2]
# In containers.
CHECKOUT = Path("/opt/aimgpu/checkout")
ENVIRONMENT = Path("/opt/aimgpu/environment")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# The first process of a container ignores a signal that it does not handle: it would be killed at the end of the grace period.
SLEEP = ("/bin/sh", "-c", "trap 'exit 0' TERM; sleep 1000000 & wait")


def write_busybox_image(path: Path, names: tuple[str, ...], busybox: Path) -> None:
    """An image with busybox alone; it sleeps unless the pod says otherwise. None of its programs handles SIGTERM."""
    layer = _layer(
        folders=("bin", *FOLDERS),
        files={"bin/busybox": busybox.read_bytes()},
        links={f"bin/{applet}": "busybox" for applet in APPLETS},
    )
    _write(path, names, layer, environment={"PATH": "/bin"}, command=["/bin/sleep", "1000000"], stop_signal="SIGKILL")


def write_python_image(
    path: Path,
    names: tuple[str, ...],
    programs: dict[str, str] | None = None,
    command: Sequence[str] = SLEEP,
    entrypoint: Sequence[str] = (),
) -> None:
    """An image for the project's own programs: its folders are filled by the node's base runtime spec.

    `programs`: Python modules of this repository by the name of the command that runs them, such as a stand-in for an engine.
    """
    links = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64", "var/run": "/run"}
    passwd = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
    script = '#!/bin/sh\ncd /tmp && PYTHONPATH={root}:$PYTHONPATH exec python -m {module} "$@"\n'
    scripts = {f"opt/{name}": script.format(root=CHECKOUT, module=module).encode() for name, module in (programs or {}).items()}
    layer = _layer(folders=(*FOLDERS, "opt"), files=passwd | scripts, links=links)
    search = f"{ENVIRONMENT}/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"
    environment = {"PATH": f"{search}:/opt", "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    _write(path, names, layer, environment=environment, command=list(command), entrypoint=list(entrypoint))


def write_program_image(path: Path, name: str, program: Path) -> None:
    """An image with one static program, which runs as a user that is not root."""
    layer = _layer(folders=(*FOLDERS, "opt"), files={"opt/program": program.read_bytes()}, links={})
    _write(path, (name,), layer, environment={}, command=[], entrypoint=["/opt/program"], user="65532")


def container_mounts(folder: Path) -> list[dict[str, object]]:
    """What every container sees of this machine, as mounts of a runtime spec. `folder`: for a file that has to be rewritten."""
    binds = {Path("/usr"): Path("/usr"), CHECKOUT: REPOSITORY, ENVIRONMENT: Path(sys.prefix)}
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        binds[Path(sys.base_prefix)] = Path(sys.base_prefix)  # where the environment's links lead to
    for file in Path(sys.prefix).glob("lib/python*/site-packages/*.pth"):
        text = file.read_text()
        if str(REPOSITORY) in text:  # the editable installation
            rewritten = folder / file.name
            rewritten.write_text(text.replace(str(REPOSITORY), str(CHECKOUT)))
            binds[ENVIRONMENT / file.relative_to(sys.prefix)] = rewritten
    options = ["rbind", "ro", "nosuid", "nodev"]
    return [
        {"destination": str(inside), "source": str(outside), "type": "bind", "options": options}
        for inside, outside in binds.items()
    ]


def _layer(folders: tuple[str, ...], files: dict[str, bytes], links: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            layer.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            layer.addfile(entry, io.BytesIO(content))
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            layer.addfile(entry)
    return buffer.getvalue()


def _write(  # noqa: PLR0913 - what an image is made of
    path: Path,
    names: tuple[str, ...],
    layer: bytes,
    *,
    environment: dict[str, str],
    command: list[str],
    entrypoint: list[str] | None = None,
    user: str = "",
    stop_signal: str = "SIGTERM",
) -> None:
    """An OCI layout in one tar, with one index entry per name."""
    compressed = gzip.compress(layer, 1, mtime=0)
    config = _json(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {
                "Env": [f"{name}={value}" for name, value in environment.items()],
                "Cmd": command,
                "Entrypoint": entrypoint or [],
                "User": user,
                "StopSignal": stop_signal,
            },
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    image = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{image}.manifest.v1+json",
            "config": _described(config, f"{image}.config.v1+json"),
            "layers": [_described(compressed, f"{image}.layer.v1.tar+gzip")],
        }
    )
    entries = [
        _described(manifest, f"{image}.manifest.v1+json") | {"annotations": {"io.containerd.image.name": name}}
        for name in names
    ]
    content = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": _json({"schemaVersion": 2, "manifests": entries}),
        **{f"blobs/sha256/{_digest(blob).partition(':')[2]}": blob for blob in (config, compressed, manifest)},
    }
    with tarfile.open(path, "w") as tar:
        for name, blob in content.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(blob)
            tar.addfile(entry, io.BytesIO(blob))


def _described(blob: bytes, media_type: str) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
