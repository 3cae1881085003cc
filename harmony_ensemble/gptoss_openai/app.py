"""The gateway's routes.

Starlette and not FastAPI: what FastAPI adds is a second description of every request, as pydantic
models. Here `gptoss_harmony` checks requests, with the sentences and codes of the ensemble itself,
and two descriptions would drift apart; what is left of a framework is routing and CORS.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gptoss_openai.chat import ChatAnswer
from gptoss_openai.completions import TextAnswer
from gptoss_openai.config import GatewayConfig
from gptoss_openai.ensemble import Ensemble
from gptoss_openai.errors import ApiError
from gptoss_openai.events import as_bytes, new_id
from gptoss_openai.exchange import Exchanges, Message, Receive, Scope, Send, check_model
from gptoss_openai.hosts import check_host
from gptoss_openai.metrics import CONTENT_TYPE, GatewayMetrics
from gptoss_openai.responses import ResponseAnswer
from gptoss_openai.store import ResponseStore, not_found

_NAMES = {405: "method_not_allowed", 404: "not_found"}

log = logging.getLogger(__name__)


class Gateway:
    """The ASGI application, and what it holds."""

    def __init__(
        self, config: GatewayConfig, connect: Callable[[GatewayConfig], Ensemble] = Ensemble
    ) -> None:
        self.config = config
        self.store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self.metrics = GatewayMetrics(self.store)
        self.exchanges = Exchanges(config, self.metrics)
        self.is_draining = False
        self._connect = connect
        self._created = int(time.time())
        route = self.exchanges.route
        # Routes that answer: looked up by their path alone, since Starlette's way to them takes
        # half as long again as all checks of a request.
        self.answering = {
            "/v1/chat/completions": route("chat", self._chat),
            "/v1/completions": route("completions", self._text),
            "/v1/responses": route("responses", self._respond),
        }
        self.app = self._application()

    def _application(self) -> Starlette:
        middleware = [Middleware(_Guard, gateway=self)]
        if self.config.cors_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=self.config.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "retry-after"),
            )
            middleware.insert(0, cors)
        app = Starlette(
            routes=[
                *(Route(path, app, methods=["POST"]) for path, app in self.answering.items()),
                Route("/v1/responses/{response_id}", self._stored, methods=["GET", "DELETE"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: _refuse,
                HTTPException: _refuse_http,
                Exception: _refuse_bug,
            },
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncGenerator[None, None]:
        self.exchanges.ensemble = self._connect(self.config)
        yield
        await self.exchanges.ensemble.close()

    def _chat(self, body: dict[str, Any], _owner: str) -> ChatAnswer:
        return ChatAnswer(body)

    def _text(self, body: dict[str, Any], _owner: str) -> TextAnswer:
        return TextAnswer(body)

    def _respond(self, body: dict[str, Any], owner: str) -> ResponseAnswer:
        return ResponseAnswer(body, self.store, owner)

    async def _stored(self, request: Request) -> Response:
        response_id, owner = request.path_params["response_id"], request.state.owner
        if request.method == "DELETE":
            if not self.store.delete(response_id, owner):
                raise not_found(response_id)
            return _json({"id": response_id, "object": "response", "deleted": True})
        stored = self.store.get(response_id, owner)
        if stored is None:
            raise not_found(response_id)
        return Response(stored.response, media_type="application/json")

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self.config.model_name)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        about = {"object": "model", "created": self._created, "owned_by": "gptoss-backend"}
        return {"id": self.config.model_name, **about}

    async def _health(self, _request: Request) -> Response:
        if self.is_draining:
            raise ApiError(503, "the gateway is draining: it takes no new requests")
        if not await self.exchanges.ensemble.is_ready():
            raise ApiError(503, f"the model at {self.config.url} is not ready")
        return _json({"status": "ok"})

    async def _metrics(self, _request: Request) -> Response:
        return Response(self.metrics.as_text(), headers={"content-type": CONTENT_TYPE})


class _Guard:
    """Before any route: an id for the request, its host, its key, how many are open; it counts."""

    def __init__(self, app: Callable[..., Awaitable[None]], gateway: Gateway) -> None:
        self._app = app
        self._metrics = gateway.metrics
        self._max_open = gateway.config.max_open_requests
        self._keys = [each.encode() for each in gateway.config.api_keys]
        self._hosts = gateway.config.allowed_hosts
        self._answering = gateway.answering
        self._num_open = 0
        gateway.metrics.open_requests.set_function(lambda: self._num_open)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # of who leaves before the answer begins

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", new_id("req_").encode()))
            await send(message)

        self._num_open += 1
        try:
            await self._enter(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            self._num_open -= 1
            route = scope.get("path", "") if "endpoint" in scope else "unknown"
            self._metrics.requests.labels(_route_name(route), status).inc()

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            app = self._answering.get(scope["path"]) if scope["method"] == "POST" else None
            if app is None:
                await self._app(scope, receive, send)
            else:
                scope["endpoint"] = app
                await app(scope, receive, send)
        except ApiError as error:
            await _error_response(error)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if self._hosts:
            header = dict(scope["headers"]).get(b"host", b"")
            check_host(header.decode("latin-1"), self._hosts)
        if scope["path"].startswith("/v1/"):
            scope.setdefault("state", {})["owner"] = self._owner(scope)
            if self._num_open > self._max_open:
                raise ApiError(503, f"{self._max_open} requests are open, as many as are allowed")

    def _owner(self, scope: Scope) -> str:
        """Whose the request is: a digest of its key, empty where there are no keys."""
        if not self._keys:
            return ""
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip()
        # All are compared, so that the time says nothing of which is near.
        is_known = [hmac.compare_digest(key, each) for each in self._keys]
        if scheme.lower() != b"bearer" or not any(is_known):
            raise ApiError(
                401,
                "the header Authorization must be `Bearer` and a known key"
                + (", got another" if given else ", got none"),
                code="invalid_api_key",
            )
        return hashlib.sha256(key).hexdigest()


def _route_name(path: str) -> str:
    """Paths with a client's words in them are one route."""
    for prefix in ("/v1/responses/", "/v1/models/"):
        if path.startswith(prefix):
            return prefix + "{id}"
    return path


def _json(value: Any) -> Response:
    return Response(as_bytes(value), media_type="application/json")


def _error_response(error: ApiError, status: int | None = None) -> Response:
    return Response(
        as_bytes(error.body()),
        status_code=status or error.status,
        headers=error.headers,
        media_type="application/json",
    )


async def _refuse(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    sentence = {
        404: f"there is no {request.url.path}",
        405: f"{where} is not allowed: {(error.headers or {}).get('Allow', 'another')} is",
    }.get(error.status_code, error.detail)
    response = _error_response(
        ApiError(error.status_code, sentence, code=_NAMES.get(error.status_code))
    )
    response.headers.update(error.headers or {})
    return response


async def _refuse_bug(request: Request, _error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path)
    return _error_response(ApiError(500, "the gateway failed; its log says how"))
