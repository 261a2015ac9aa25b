"""``python -m aimgpu.kubernetes.operator``: lead, or wait to, until stopped."""

import asyncio
import sys

from aimgpu.kubernetes.operator.operator import Operator
from aimgpu.kubernetes.operator.options import parse_options
from aimgpu.kubernetes.program import run_program

if __name__ == "__main__":
    options = parse_options(sys.argv[1:])
    sys.exit(run_program(lambda client: asyncio.ensure_future(Operator(client, options).run())))
