"""The daemon's log: one JSON object per line. A record names an event; what belongs to it comes in `extra={"data": {...}}`."""

import json
import logging
import sys
from datetime import UTC, datetime

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


def configure_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
