"""Endpoints for monitoring: /health, /ready and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from swarmnode.gateway.gateway import gateway_of
from swarmnode.metrics.exposition import CONTENT_TYPE, Sources, exposed

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """Return status 200 as long as this process runs."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """Return status 200 if every unit of each swarm's model has a holder and the tokenizers are loaded, else 503 with the
    missing units and the swarms that are still loading. A gateway that has reached no swarm yet is not ready."""
    swarms = gateway_of(request).swarms
    missing = {name: model.missing for name, model in swarms.items() if model.missing}
    loading = [name for name, model in swarms.items() if not model.loader.is_done]
    is_ready = bool(swarms) and not missing and not loading
    return JSONResponse({"ready": is_ready, "missing": missing, "loading": loading}, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of all swarms in Prometheus' text format."""
    sources = [Sources(name, model.client.readings) for name, model in gateway_of(request).swarms.items()]
    return Response(await exposed(sources), media_type=CONTENT_TYPE)
