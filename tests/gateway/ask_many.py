"""A program that asks COUNT times at once, each on its own connection, and prints how many got which answer."""

import asyncio
import collections
import json
import resource
import sys

from tests.gateway.calling import CHAT


async def ask_many(port: int, count: int) -> dict[str, int]:
    body = json.dumps(CHAT).encode()
    data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    connecting = asyncio.Semaphore(200)

    async def ask() -> str:
        async with connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        line = await reader.readline()
        writer.close()
        return line.decode().strip()

    return dict(collections.Counter(await asyncio.gather(*(ask() for _ in range(count)))))


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.stdout.write(json.dumps(asyncio.run(ask_many(int(sys.argv[1]), int(sys.argv[2])))))
