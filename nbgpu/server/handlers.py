"""The URLs below `/nbgpu` of a Jupyter server. All of them require Jupyter's login and authorizer, and those
that change something also its token against forged requests (XSRF).

No work is done on the server's event loop: reading takes up to a third of a second if a rank does not answer,
and ending a cluster takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.utils import url_path_join
from tornado import web

from nbgpu.errors import NbgpuError

_RESOURCE = "nbgpu"
"""The name of these URLs for the server's authorizer."""
_REST_AFTER_S = 20.0
"""Seconds without a request after which the thread ends and the driver is closed."""
_FRESH_S = 0.4
"""A reading that is younger than this, in seconds, answers further requests, so that several pages cost one
reading."""
_REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""A report may run its own scripts, to draw its charts. It may fetch nothing, and `sandbox` keeps it out of
the server's origin."""


class Reading:
    """Reads the overview on a thread, which ends after some time without requests."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._overview: Any = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._newest: dict[bool, tuple[float, asyncio.Future[dict[str, Any]]]] = {}
        """By `with_devices`: the (monotonic) time at which the newest reading began, and the reading."""

    async def read(self, with_devices: bool) -> dict[str, Any]:
        """Return the overview as JSON. It may be a moment old."""
        loop = asyncio.get_running_loop()
        # Each request puts off the end of the thread.
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self._rest_timer = loop.call_later(_REST_AFTER_S, self._rest)
        begun_s, reading = self._newest.get(with_devices, (0.0, None))
        is_fresh = reading is not None and (not reading.done() or time.monotonic() - begun_s < _FRESH_S)
        if reading is None or not is_fresh:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="nbgpu-overview")
            reading = asyncio.ensure_future(loop.run_in_executor(self._thread, self._read_now, with_devices))
            self._newest[with_devices] = time.monotonic(), reading
        # A request that is cancelled, because its page is gone, must not cancel the reading for the others.
        return await asyncio.shield(reading)

    def _read_now(self, with_devices: bool) -> dict[str, Any]:
        """Read the overview, on the thread; the first call imports it."""
        if self._overview is None:
            # This imports pydantic and the driver's library, which a server without a request does not need.
            from nbgpu.server.overview import Overview

            self._overview = Overview()
        overview: dict[str, Any] = self._overview.read(with_devices)
        return overview

    def _rest(self) -> None:
        """Close the connections and the driver on the thread that uses them, and end the thread."""
        self._newest.clear()
        thread, self._thread = self._thread, None
        if thread is not None:
            overview, self._overview = self._overview, None
            if overview is not None:
                thread.submit(overview.rest)
            thread.shutdown(wait=False)


class _Api(APIHandler):
    """The base of the handlers that answer with JSON."""

    auth_resource = _RESOURCE

    def refuse(self, error: NbgpuError) -> None:
        """Answer with the message of an error. An HTTPError would take a '%' in the message for a format."""
        self.set_status(409)
        self.finish(json.dumps({"message": str(error)}))

    async def carry_out(self, work: Callable[..., str], *arguments: str) -> None:
        """Call `work` on a thread, and answer with the sentence that it returns, or with the error that it
        raises."""
        try:
            sentence = await asyncio.to_thread(work, *arguments)
        except NbgpuError as error:
            self.refuse(error)
            return
        self.log.info("nbgpu, asked by %s: %s", self.current_user.username, sentence)
        self.finish(json.dumps({"message": sentence}))

    def field(self, name: str) -> str:
        """Return a text from the JSON object in the body of the request; status 400 if it is missing."""
        body = self.get_json_body()
        value = body.get(name) if isinstance(body, dict) else None
        if not isinstance(value, str):
            raise web.HTTPError(400, f"{name} is missing")
        return value


class OverviewHandler(_Api):
    """`GET nbgpu/overview?devices=1`: this host's devices and this user's clusters."""

    def initialize(self, reading: Reading) -> None:
        self._reading = reading

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the overview, in which each cluster also has its kernel and its notebook on this
        server. After an error, answer with an overview that has only a problem."""
        try:
            overview = await self._reading.read(self.get_query_argument("devices", "0") == "1")
        except Exception as error:
            # For example, a library cannot be imported. People look at the sidebar, and not at the log.
            self.log.exception("nbgpu cannot look at this host")
            problem = f"nbgpu cannot look at this host: {error!r}. The Jupyter server's log says more."
            overview = {"time_s": time.time(), "devices": None, "clusters": [], "problems": [problem]}
        clusters = [{**cluster, **self._on_this_server(cluster)} for cluster in overview["clusters"]]
        self.finish(json.dumps({**overview, "clusters": clusters}))

    def _on_this_server(self, cluster: dict[str, Any]) -> dict[str, str]:
        """Return the kernel id and the notebook's path of a cluster on this server; '' for one of another
        server."""
        manager = self.kernel_manager
        kernels = {
            # A kernel on another host has no process here.
            getattr(getattr(manager.get_kernel(kernel_id), "provisioner", None), "pid", None): kernel_id
            for kernel_id in manager.list_kernel_ids()
        }
        root, notebook = Path(self.settings["server_root_dir"]).expanduser().absolute(), Path(cluster["path"])
        is_below = notebook.is_absolute() and notebook.is_relative_to(root) and notebook.suffix == ".ipynb"
        return {
            "kernel_id": kernels.get(cluster["process"], ""),
            "contents_path": notebook.relative_to(root).as_posix() if is_below else "",
        }


class RunHandler(_Api):
    """`POST nbgpu/clusters/ID/run` with {run, command}: pause, resume or stop a cluster's run."""

    @web.authenticated
    @authorized
    async def post(self, cluster_id: str) -> None:
        from nbgpu.server import actions

        await self.carry_out(actions.command_run, cluster_id, self.field("run"), self.field("command"))


class EndHandler(_Api):
    """`POST nbgpu/clusters/ID/end` with {state}: end a cluster if it is still in the state that the sidebar
    has shown."""

    @web.authenticated
    @authorized
    async def post(self, cluster_id: str) -> None:
        from nbgpu.server import actions

        await self.carry_out(actions.end, cluster_id, self.field("state"))


class ReportHandler(JupyterHandler):
    """`GET nbgpu/clusters/ID/report/RUN`: the report of a cluster's newest run, as a page."""

    auth_resource = _RESOURCE

    @web.authenticated
    @authorized
    async def get(self, cluster_id: str, run_name: str) -> None:
        """Answer with the report of a run, under a policy that lets it run its own scripts and fetch nothing;
        status 404 if there is none."""
        from nbgpu.server import actions

        try:
            path = await asyncio.to_thread(actions.report, cluster_id, run_name)
            page = await asyncio.to_thread(path.read_bytes)
        except (NbgpuError, OSError) as error:
            self.log.warning("nbgpu: %s", error)
            raise web.HTTPError(404) from None
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Content-Security-Policy", _REPORT_POLICY)
        self.finish(page)


def handlers(base_url: str) -> list[tuple[Any, ...]]:
    """Return the patterns of the URLs with their handlers, for tornado."""
    below = url_path_join(base_url, "nbgpu")
    cluster = url_path_join(below, "clusters", "([0-9a-f]+)")
    return [
        (url_path_join(below, "overview"), OverviewHandler, {"reading": Reading()}),
        (url_path_join(cluster, "run"), RunHandler),
        (url_path_join(cluster, "end"), EndHandler),
        (url_path_join(cluster, "report", "([^/]+)"), ReportHandler),
    ]
