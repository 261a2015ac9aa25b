"""Known causes of an engine's death, found in its last lines."""

import re
from collections.abc import Iterable, Mapping

PORT_TAKEN = "another program took its port first"  # between choosing it and listening: worth another try
Causes = Mapping[str, str]  # sentence for people -> regular expression; {0} is its first group


_SIZES = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of "32.00 MiB" as PyTorch and ggml print it; 0 where it is anything else."""
    number, _, unit = text.partition(" ")
    try:
        return round(float(number) * _SIZES.get(unit, 0))
    except (ValueError, OverflowError):
        return 0


def find_cause(lines: Iterable[str], causes: Causes) -> str | None:
    """The cause that stands first in the table, wherever it stands in the log: a traceback ends with the least telling line."""
    texts = list(lines)
    for sentence, pattern in causes.items():
        for line in texts:
            if match := re.search(pattern, line):
                return sentence.format(*match.groups())
    return None
