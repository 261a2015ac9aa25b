"""The daemon's log: one JSON object per line. A record names an event; what belongs to it comes in `extra={"data": {...}}`."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

_REPEATED_SECONDS = 600.0
_MOST_REMEMBERED = 1000

START_FAILED = "daemon.start_failed"  # with the error: the command that started the daemon reads it


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        data = getattr(record, "data", {})
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **data,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RepeatFilter(logging.Filter):
    """An error that comes again and again, as while a GPU cannot be read, is logged once in ten minutes with its number."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # when it was logged last, and how often it came since
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        data = getattr(record, "data", {})
        error = record.exc_info[1] if record.exc_info else None
        key = (record.name, record.getMessage(), str(data), type(error), str(error))
        now = self._now()
        with self._lock:
            logged, left_out = self._seen.get(key, (-_REPEATED_SECONDS, 0))
            if now - logged < _REPEATED_SECONDS:
                self._seen[key] = (logged, left_out + 1)
                return False
            if len(self._seen) >= _MOST_REMEMBERED:
                self._seen = {one: seen for one, seen in self._seen.items() if now - seen[0] < _REPEATED_SECONDS}
            if len(self._seen) < _MOST_REMEMBERED:
                self._seen[key] = (now, 0)
        if left_out:
            record.data = {**data, "repeated": left_out}
        return True


def configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepeatFilter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
