"""A command-line client to copy: streams an answer from any OpenAI endpoint, with nothing but the standard library.

python examples/chat_client.py chat "Why is the sky blue?"
AIMGPU_URL=http://gpubox:8080/v1 AIMGPU_API_KEY=... python examples/chat_client.py chat "Hello" --priority low
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

URL = os.environ.get("AIMGPU_URL", "http://127.0.0.1:8080/v1")


def ask(model: str, text: str, priority: str | None) -> Iterator[str]:
    """The answer, part by part."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("AIMGPU_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    if priority:
        headers["x-aimgpu-priority"] = priority
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}
    with urlopen(Request(f"{URL}/chat/completions", json.dumps(body).encode(), headers)) as answer:  # noqa: S310  # the user's URL
        if answer.headers.get("x-aimgpu-simulated"):
            print("(simulated GPU)", file=sys.stderr)
        for line in answer:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"the answer broke off: {event['error']['message']}")
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model one thing.")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--priority", choices=["high", "medium", "low"])
    given = parser.parse_args()
    try:
        for part in ask(given.model, given.text, given.priority):
            print(part, end="", flush=True)
        print()
    except HTTPError as error:
        wait = error.headers.get("retry-after")
        again = f" Ask again in {wait} s." if wait else ""
        raise SystemExit(f"{error.code}: {json.load(error)['error']['message']}{again}") from None
    except URLError as error:
        raise SystemExit(f"{URL} does not answer: {error.reason}") from None


if __name__ == "__main__":
    main()
