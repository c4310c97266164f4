"""The console's routes: the page at ``/ui``, and its data below ``/admin``."""

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from router.admin.routes import check_admin
from router.console.assets import INDEX, Asset, load_assets
from router.console.feed import ConsoleFeed, ConsolePage
from router.errors import ApiError, to_api_error
from router.http.response_writer import (
    INLINE_WRITER_KEY,
    STREAM_HEADERS,
    ClientDisconnected,
    ResponseWriter,
    cancel_on_disconnect,
)
from router.serving.context import RouterContext


def add_console_routes(app: FastAPI, context: RouterContext, feed: ConsoleFeed) -> None:
    """Add the routes. The page itself needs no key, since it contains nothing about the cluster;
    its data are for admins only."""

    @app.get("/ui")
    async def page(request: Request) -> Response:
        return _send_asset(request, load_assets()[INDEX])

    @app.get("/ui/assets/{path:path}")
    async def asset(request: Request, path: str) -> Response:
        found = load_assets().get(path)
        if found is None:
            raise ApiError(404, f"the console has no file {path!r}")
        return _send_asset(request, found)

    @app.get("/admin/state")
    async def state(request: Request) -> Response:
        check_admin(context, request)
        return Response(await feed.snapshot(), media_type="application/json")

    @app.get("/admin/events")
    async def events(request: Request) -> Response:
        check_admin(context, request)
        return EventStream(context, feed)


def _send_asset(request: Request, asset: Asset) -> Response:
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=asset.headers)
    headers = {**asset.headers, "content-type": asset.content_type}
    return Response(asset.content, headers=headers)


class EventStream(Response):
    """Streams the feed's frames as server-sent events, one per second, until the client disconnects
    or the router drains. The class is a Starlette response, so that it learns at once when the
    client disconnects."""

    def __init__(self, context: RouterContext, feed: ConsoleFeed) -> None:
        super().__init__()
        self._context = context
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(send)
        try:
            with self._feed.open_page() as page:
                await cancel_on_disconnect(scope[INLINE_WRITER_KEY], self._send(writer, page))
        except ClientDisconnected:
            pass
        except BatonError as error:
            await writer.send_error(to_api_error(error), {})

    async def _send(self, writer: ResponseWriter, page: ConsolePage) -> None:
        await writer.start(200, STREAM_HEADERS)
        while not self._context.draining:
            await writer.write(b"data: " + await page.next_frame() + b"\n\n")
        await writer.end()
