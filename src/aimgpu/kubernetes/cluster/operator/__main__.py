"""``python -m aimgpu.kubernetes.cluster.operator``: lead, or wait to, until stopped."""

import asyncio
import sys

from aimgpu.kubernetes.api.program import run_program
from aimgpu.kubernetes.cluster.operator.operator import Operator
from aimgpu.kubernetes.cluster.operator.options import parse_options

if __name__ == "__main__":
    options = parse_options(sys.argv[1:])
    sys.exit(run_program(lambda client: asyncio.ensure_future(Operator(client, options).run())))
