"""What watches the gateway asks: /health, /ready, /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of
from swarmnode.metrics.exposition import CONTENT_TYPE, Sources, exposed

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Whether this process lives."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether each swarm has somebody for every unit of its model, and the tokenizers are loaded."""
    swarms = gateway_of(request).swarms
    missing = {name: model.missing for name, model in swarms.items() if model.missing}
    loading = [name for name, model in swarms.items() if not model.loader.is_done]
    is_ready = not missing and not loading
    return JSONResponse({"ready": is_ready, "missing": missing, "loading": loading}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    sources = [Sources(name, model.client.readings) for name, model in gateway_of(request).swarms.items()]
    return Response(await exposed(sources), media_type=CONTENT_TYPE)
