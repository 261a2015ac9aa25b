"""Known causes of an engine's death, found in its last lines."""

import re
from collections.abc import Iterable, Mapping

PORT_TAKEN = "another program took its port first"  # between choosing it and listening: worth another try
Causes = Mapping[str, str]  # sentence for people -> regular expression; {0} is its first group


def find_cause(lines: Iterable[str], causes: Causes) -> str | None:
    """The cause that stands first in the table, wherever it stands in the log: a traceback ends with the least telling line."""
    texts = list(lines)
    for sentence, pattern in causes.items():
        for line in texts:
            if match := re.search(pattern, line):
                return sentence.format(*match.groups())
    return None
