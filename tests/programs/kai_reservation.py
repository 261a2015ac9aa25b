"""A stand-in for KAI-Scheduler's reservation program, which asks NVML for the UUID of the one GPU that its pod was given.

Here the device plugin's variable says which simulated GPU that is. It goes where KAI's binder looks for it: into an annotation
of the program's own pod.
"""

import asyncio
import os
import signal
import sys

from aimgpu.kubernetes.api.client import Client, Resource

ANNOTATION = "run.ai/reserve_for_gpu_index"
PODS = Resource(version="v1", plural="pods", namespaced=True)


async def annotate() -> None:
    gpu = os.environ["AIM_PARTITION_STABLE_ID"].partition("/")[0]
    async with Client.from_environment() as client:
        body = {"metadata": {"annotations": {ANNOTATION: gpu}}}
        await client.patch(PODS, os.environ["POD_NAME"], body, os.environ["POD_NAMESPACE"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the first process of a container ignores it otherwise
    asyncio.run(annotate())
    signal.pause()
