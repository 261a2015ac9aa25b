"""`python -m aimgpu.daemon --home ...` runs the daemon."""

import sys

from aimgpu.daemon.assembly import main

if __name__ == "__main__":
    sys.exit(main())
