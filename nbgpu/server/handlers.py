"""The addresses below `/nbgpu` of a Jupyter server. All are behind Jupyter's own login and authorizer, and
what changes something needs its token against forged requests (XSRF) too.

Nothing here does its work on the server's event loop: reading takes up to a third of a second where a rank
does not answer, and ending a cluster takes seconds.
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
"""The name under which an authorizer of the server knows these addresses."""
_REST_AFTER_S = 20.0
"""Seconds without a request after which the thread ends and the driver is closed."""
_FRESH_S = 0.4
"""A reading that is younger than this is the answer to further requests, so that several pages cost one
reading."""
_REPORT_POLICY = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""A report may draw its charts. It may fetch nothing, and has nothing of the server's own origin."""


class Reading:
    """Reads the overview on a thread of its own, which ends once nobody has looked for a while."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._overview: Any = None
        self._rest: asyncio.TimerHandle | None = None
        self._newest: dict[bool, tuple[float, asyncio.Future[dict[str, Any]]]] = {}

    async def read(self, with_devices: bool) -> dict[str, Any]:
        """The overview as JSON, or one from a moment ago."""
        loop = asyncio.get_running_loop()
        self._rest_later(loop)
        begun_s, reading = self._newest.get(with_devices, (0.0, None))
        is_fresh = reading is not None and (not reading.done() or time.monotonic() - begun_s < _FRESH_S)
        if reading is None or not is_fresh:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="nbgpu-overview")
            reading = asyncio.ensure_future(loop.run_in_executor(self._thread, self._read_now, with_devices))
            self._newest[with_devices] = time.monotonic(), reading
        # A page that goes away must not take the answer from the others.
        return await asyncio.shield(reading)

    def _read_now(self, with_devices: bool) -> dict[str, Any]:
        """Read the overview, on the thread; the first call imports it."""
        if self._overview is None:
            # This loads pydantic and the driver's library, in which a server where nobody looks has no part.
            from nbgpu.server.overview import Overview

            self._overview = Overview()
        told: dict[str, Any] = self._overview.read(with_devices)
        return told

    def _rest_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """Put off the end of the thread, because somebody has just looked."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = loop.call_later(_REST_AFTER_S, self._rest_now)

    def _rest_now(self) -> None:
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
        """Answer with an error's own words. An HTTPError would read a '%' in them as a format."""
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
        """Return a text from the JSON object of the request; status 400 if it is missing."""
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
        """Answer with the overview, in which each cluster also has its kernel and notebook of this server. An
        error is answered as an overview with a problem."""
        try:
            told = await self._reading.read(self.get_query_argument("devices", "0") == "1")
        except Exception as error:
            # Such as a library that cannot be loaded. A person looks at the sidebar, and not at this log.
            self.log.exception("nbgpu cannot look at this host")
            problem = f"nbgpu cannot look at this host: {error!r}. The Jupyter server's log says more."
            told = {"time_s": time.time(), "devices": None, "clusters": [], "problems": [problem]}
        clusters = [{**each, **self._here(each)} for each in told["clusters"]]
        self.finish(json.dumps({**told, "clusters": clusters}))

    def _here(self, cluster: dict[str, Any]) -> dict[str, str]:
        """The kernel that has a cluster and its notebook, as this server knows them; empty where they are not
        this server's."""
        manager = self.kernel_manager
        kernels = {
            # Kernels that run elsewhere have no process here.
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
    """`POST nbgpu/clusters/ID/end` with {state}: end a cluster that is still in the state that was seen."""

    @web.authenticated
    @authorized
    async def post(self, cluster_id: str) -> None:
        from nbgpu.server import actions

        await self.carry_out(actions.end, cluster_id, self.field("state"))


class ReportHandler(JupyterHandler):
    """`GET nbgpu/clusters/ID/report/RUN`: the report of a cluster's newest run, for a tab of its own."""

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
    """Return the addresses with their handlers, for tornado."""
    below = url_path_join(base_url, "nbgpu")
    cluster = url_path_join(below, "clusters", "([0-9a-f]+)")
    return [
        (url_path_join(below, "overview"), OverviewHandler, {"reading": Reading()}),
        (url_path_join(cluster, "run"), RunHandler),
        (url_path_join(cluster, "end"), EndHandler),
        (url_path_join(cluster, "report", "([^/]+)"), ReportHandler),
    ]
