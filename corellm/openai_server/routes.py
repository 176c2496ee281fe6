"""The endpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from aiohttp import web

from corellm.errors import InvalidRequestError, ModelNotFoundError
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.prompts import ModelLimits, encode_request
from corellm.openai_api.requests import ChatRequest, CompletionRequest, parse_request
from corellm.openai_api.responses import Head
from corellm.openai_api.schema import openapi
from corellm.openai_api.tokenize import parse_detokenize, parse_tokenize
from corellm.openai_server.answers import Answering, json_response
from corellm.openai_server.engine_api import Engine, Vocabulary
from corellm.openai_server.intake import Intake, Prompts
from corellm.openai_server.metrics import CONTENT_TYPE, Metrics
from corellm.openai_server.observe import Observer
from corellm.openai_server.state import ServerState

Parsed = tuple[ChatRequest | CompletionRequest, Prompts]


class Routes:
    """What each path does. `served` are names for the model beside the engine's own; the first is the one it tells."""

    def __init__(
        self, state: ServerState, intake: Intake, observer: Observer, metrics: Metrics, served: Sequence[str]
    ) -> None:
        self._state, self._intake, self._observer, self._metrics = state, intake, observer, metrics
        self._served = tuple(served)
        self._started = int(time.time())

    def table(self) -> list[web.RouteDef]:
        return [
            web.post(Endpoint.CHAT.value, self._generate(Endpoint.CHAT)),
            web.post(Endpoint.COMPLETIONS.value, self._generate(Endpoint.COMPLETIONS)),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/version", self.version),
            web.get("/openapi.json", self.openapi),
        ]

    # ---- generation -----------------------------------------------------------------------------------------------

    def _generate(self, endpoint: Endpoint) -> Callable[[web.Request], Any]:
        async def generate(http: web.Request) -> web.StreamResponse:
            with self._state.request():
                engine = self._state.engine()
                self._state.check_room()
                request, prompts = await self._intake.take(http, lambda body: self._parse(endpoint, body, engine))
                head = Head.new(endpoint, request.generation.model or self._names(engine)[0])
                answering = Answering(http, engine, self._observer, request, prompts, head)
                with self._state.answering(len(prompts), request.generation.n):
                    return await answering.respond()

        return generate

    def _parse(self, endpoint: Endpoint, body: dict[str, Any], engine: Engine) -> Parsed:
        request = parse_request(endpoint, body)
        self._check_model(request.generation.model, engine)
        return request, encode_request(request, engine, ModelLimits.of(engine.info))

    # ---- models ---------------------------------------------------------------------------------------------------

    async def models(self, http: web.Request) -> web.Response:
        engine = self._state.engine()
        return json_response({"object": "list", "data": [self._card(name, engine) for name in self._names(engine)]})

    async def model(self, http: web.Request) -> web.Response:
        engine = self._state.engine()
        name = http.match_info["model"]
        self._check_model(name, engine)
        return json_response(self._card(name, engine))

    def _card(self, name: str, engine: Engine) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "corellm",
            "max_model_len": engine.info.max_model_len,
        }

    def _names(self, engine: Engine) -> tuple[str, ...]:
        return self._served or (engine.info.model,)

    def _check_model(self, name: str | None, engine: Engine) -> None:
        names = self._names(engine)
        if name is not None and name not in names:
            raise ModelNotFoundError(f"model {name[:200]!r} is not served here; served is {', '.join(names)}")

    # ---- tokens ---------------------------------------------------------------------------------------------------

    async def tokenize(self, http: web.Request) -> web.Response:
        engine = self._state.engine()
        return json_response(await self._intake.take(http, lambda body: self._tokenize(body, engine)))

    def _tokenize(self, body: dict[str, Any], engine: Engine) -> dict[str, Any]:
        request = parse_tokenize(body)
        self._check_model(request.model, engine)
        vocabulary = _vocabulary(engine)
        ids: Sequence[int]
        if request.messages is not None:
            ids = engine.encode_chat(
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            )
        else:
            bos = request.add_special_tokens and vocabulary.adds_bos
            ids = vocabulary.encode(request.prompt or "", special=True, bos=bos)
        names = [vocabulary.token_bytes(token).decode(errors="replace") for token in ids]
        return {
            "count": len(ids),
            "max_model_len": engine.info.max_model_len,
            "tokens": list(ids),
            "token_strs": names if request.return_token_strs else None,
        }

    async def detokenize(self, http: web.Request) -> web.Response:
        engine = self._state.engine()
        return json_response(await self._intake.take(http, lambda body: self._detokenize(body, engine)))

    def _detokenize(self, body: dict[str, Any], engine: Engine) -> dict[str, Any]:
        request = parse_detokenize(body)
        self._check_model(request.model, engine)
        highest = max(request.tokens, default=0)
        if highest >= engine.info.vocab:
            last = engine.info.vocab - 1
            raise InvalidRequestError(f"tokens names token {highest}; the model's ids end at {last}", "tokens")
        return {"prompt": _vocabulary(engine).decode(request.tokens, skip_special_tokens=False)}

    # ---- the server itself ----------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        status, body = self._state.health()
        return json_response(body, status)

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, http: web.Request) -> web.Response:
        return json_response({"version": version("corellm")})

    async def openapi(self, http: web.Request) -> web.Response:
        return json_response(openapi(version("corellm")))


def _vocabulary(engine: Engine) -> Vocabulary:
    if engine.tokenizer is None:
        raise InvalidRequestError("the model has no tokenizer; text has no tokens here", "prompt")
    return engine.tokenizer
