"""The least that a proxy in Python can be with aiohttp on both sides: the yardstick beside ours."""

import sys

import aiohttp
import orjson
import uvloop
from aiohttp import web


async def make_application(upstream: str) -> web.Application:
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def pass_on(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if orjson.loads(body).get("model") != "m":
            return web.json_response({"error": "no such model"}, status=404)
        async with session.post(upstream + request.path, data=body, headers={"content-type": "application/json"}) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    application = web.Application()
    application.router.add_post("/v1/chat/completions", pass_on)
    return application


if __name__ == "__main__":
    uvloop.install()
    web.run_app(
        make_application(f"http://127.0.0.1:{sys.argv[1]}"),
        host="127.0.0.1",
        port=int(sys.argv[2]),
        print=None,
        access_log=None,
    )
