"""An engine that answers a little slowly, as a program that can be killed: `python -m benchmarks.soak.engine PORT`."""

import asyncio
import random
import sys

from aiohttp import web

CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


async def answer(request: web.Request) -> web.StreamResponse:
    fields = await request.json()
    tokens = random.randint(1, 30)  # noqa: S311  # a workload, not a secret
    if not fields.get("stream"):
        await asyncio.sleep(tokens * 0.005)
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        message = {"role": "assistant", "content": " word" * tokens}
        return web.json_response({"object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": usage})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(tokens):
        await response.write(CHUNK)
        await asyncio.sleep(0.005)
    await response.write(b"data: [DONE]\n\n")
    return response


if __name__ == "__main__":
    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    web.run_app(application, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None, reuse_port=True)
