"""What the driver remembers of a claim: its record in the node's ledger, written before the first act and after the last."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aimgpu.ledger import Ledger


class ClaimState(StrEnum):
    PREPARING = "preparing"  # cut short if it is still so at a start
    PREPARED = "prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One line of the answer to the kubelet."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRecord:
    uid: str
    namespace: str
    name: str
    state: ClaimState
    boot_id: str  # another boot: its containers are gone, and so are the CDI files
    tenants: tuple[str, ...]
    devices: tuple[PreparedDevice, ...] = ()
    pods: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.namespace}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "name": self.name,
            "state": self.state.value,
            "boot_id": self.boot_id,
            "tenants": list(self.tenants),
            "pods": list(self.pods),
            "devices": [
                {
                    "requests": list(device.requests),
                    "pool": device.pool,
                    "device": device.device,
                    "cdi_ids": list(device.cdi_ids),
                    "share_id": device.share_id,
                }
                for device in self.devices
            ],
        }


class Checkpoint:
    """Claim records by uid."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def read(self, uid: str) -> ClaimRecord | None:
        body = self._ledger.claim(uid)
        return None if body is None else _parse(uid, body)

    def read_all(self) -> tuple[ClaimRecord, ...]:
        return tuple(_parse(uid, body) for uid, body in self._ledger.claims().items())

    def write(self, record: ClaimRecord) -> None:
        self._ledger.keep_claim(record.uid, record.to_json())

    def together(self) -> AbstractContextManager[None]:
        """Everything written within, grants included, is one transaction."""
        return self._ledger.together()

    def remove(self, uid: str) -> None:
        self._ledger.drop_claim(uid)


def _parse(uid: str, body: Mapping[str, Any]) -> ClaimRecord:
    """Fields that a later version adds are ignored, so that a downgrade keeps running pods."""
    return ClaimRecord(
        uid=uid,
        namespace=body["namespace"],
        name=body["name"],
        state=ClaimState(body["state"]),
        boot_id=body["boot_id"],
        tenants=tuple(body["tenants"]),
        pods=tuple(body.get("pods", ())),
        devices=tuple(
            PreparedDevice(
                requests=tuple(device["requests"]),
                pool=device["pool"],
                device=device["device"],
                cdi_ids=tuple(device["cdi_ids"]),
                share_id=device.get("share_id"),
            )
            for device in body["devices"]
        ),
    )
