"""``python -m aimgpu.kubernetes.cluster.admission``: answer the API server until stopped."""

import asyncio
import sys

from aimgpu.kubernetes.api.program import run_program
from aimgpu.kubernetes.cluster.admission.options import parse_options
from aimgpu.kubernetes.cluster.admission.server import AdmissionServer

if __name__ == "__main__":
    options = parse_options(sys.argv[1:])
    sys.exit(run_program(lambda client: asyncio.ensure_future(AdmissionServer(client, options).run())))
