"""`make bench-interposer`."""

import sys

from benchmarks.interposer.run import main

if __name__ == "__main__":
    sys.exit(main())
