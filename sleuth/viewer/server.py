"""The viewer's HTTP server, on this machine's loopback address alone: one page, and what it asks for, as JSON.

What models wrote is sent as JSON and put into the page as text, never as HTML; a policy for the browser (CSP) forbids
any script and any request but the page's own. Requests under another host's name are refused, so that no foreign page
can reach the server through a name that it makes point here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from importlib.resources import files
from typing import Any

import orjson
from aiohttp import web

from sleuth.loopback import OWN_HOSTS
from sleuth.metrics.catalog import describe
from sleuth.metrics.jsonl import MetricsLine
from sleuth.viewer.index import FILTERS, Query
from sleuth.viewer.runs import ALL, Run, differing

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(runs: Sequence[Run]) -> web.Application:
    """The application that shows these runs."""
    app = web.Application(middlewares=[_guard])
    app[RUNS] = {run.name: run for run in runs}
    app.add_routes(
        [
            web.get("/", functools.partial(_static, name="index.html")),
            web.get("/static/{name}", _static),
            web.get("/api/runs", _answered(list_runs)),
            web.get("/api/series", _answered(series)),
            web.get("/api/trajectories", _answered(trajectories)),
            web.get("/api/trajectory", _answered(trajectory)),
        ]
    )
    return app


RUNS: web.AppKey[dict[str, Run]] = web.AppKey("runs", dict)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign host names; give every answer, errors too, the headers that protect the page."""
    if (request.url.host or "") not in OWN_HOSTS:
        return web.Response(status=403, text="this server answers under 127.0.0.1 and localhost alone", headers=HEADERS)
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.headers.update(HEADERS)
        raise
    response.headers.update(HEADERS)
    return response


async def _static(request: web.Request, name: str = "") -> web.Response:
    name = name or request.match_info["name"]
    found = next((file for file in files("sleuth.viewer").joinpath("static").iterdir() if file.name == name), None)
    if found is None:
        raise web.HTTPNotFound(text=f"no such file: {name}")
    return web.Response(body=found.read_bytes(), content_type=TYPES[name.rpartition(".")[2]], charset="utf-8")


def _answered(answer: Callable[[dict[str, Run], Any], Any]) -> Handler:
    """A handler that sends as JSON what `answer(runs, parameters)` returns; 404 for what is not there."""

    async def handler(request: web.Request) -> web.Response:
        try:
            found = await asyncio.to_thread(answer, request.app[RUNS], request.query)
            return web.Response(body=orjson.dumps(found), content_type="application/json")
        except (KeyError, ValueError, OSError) as error:
            status = 400 if isinstance(error, ValueError) else 404
            text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            return web.Response(status=status, text=text, headers={"Content-Type": "text/plain; charset=utf-8"})

    return handler


def _run(runs: dict[str, Run], query: Any) -> Run:
    name = query.get("run", "")
    if name not in runs:
        raise KeyError(f"expected one of {', '.join(runs)} as run, found {name!r}")
    return runs[name]


def list_runs(runs: dict[str, Run], query: Any) -> dict[str, Any]:
    """All runs with their files of trajectories, the names of all metrics, and the settings that differ."""
    shown = [
        run.summary() | {"files": [{"name": f.path.name, "step": f.step, "evaluation": f.name} for f in run.files()]}
        for run in runs.values()
    ]
    names = sorted(
        {name for run in runs.values() for line in run.metrics()[0] for name in line} - {"step", "timestamp"}
    )
    metrics = {name: _described(name) for name in names}
    settings = differing([run.configuration for run in runs.values()])
    return {"runs": shown, "metrics": metrics, "differing": settings, "filters": list(FILTERS)}


def _described(name: str) -> str:
    metric = describe(name)
    return "" if metric is None else f"{metric.meaning}{f' ({metric.unit})' if metric.unit else ''}"


def series(runs: dict[str, Run], query: Any) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """`{metric: {run: [[step, value], ...]}}` of the metrics named by the parameters `name`."""
    return {
        name: {run.name: points for run in runs.values() if (points := points_of(run.metrics()[0], name))}
        for name in query.getall("name", [])
    }


def points_of(lines: Sequence[MetricsLine], name: str) -> list[tuple[int, float]]:
    """Steps and values at which the metric is a number."""
    return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]


def trajectories(runs: dict[str, Run], query: Any) -> dict[str, Any]:
    """One page of the list."""
    run, group = _run(runs, query), query.get("group", "")
    compare = query.get("compare", "")
    wanted = Query(
        filter=query.get("filter") or "all",
        text=query.get("text", ""),
        group=int(group) if group else None,
        compare=run.file(compare) if compare else None,
    )
    return run.page(query.get("file") or ALL, wanted, max(0, int(query.get("offset") or 0)))


def trajectory(runs: dict[str, Run], query: Any) -> dict[str, Any]:
    """One trajectory, whole."""
    return _run(runs, query).trajectory(query.get("file", ""), int(query.get("number", "-1")))
