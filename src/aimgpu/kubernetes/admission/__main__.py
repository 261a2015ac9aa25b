"""``python -m aimgpu.kubernetes.admission``: answer the API server until stopped."""

import asyncio
import sys

from aimgpu.kubernetes.admission.options import parse_options
from aimgpu.kubernetes.admission.server import AdmissionServer
from aimgpu.kubernetes.program import run_program

if __name__ == "__main__":
    options = parse_options(sys.argv[1:])
    sys.exit(run_program(lambda client: asyncio.ensure_future(AdmissionServer(client, options).run())))
