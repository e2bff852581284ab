"""A kernel's widgets, driven by the messages that a page would send."""

from __future__ import annotations

import queue
import time
from typing import Any

from jupyter_client.blocking import BlockingKernelClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def run_cell(kernel: BlockingKernelClient, code: str) -> list[dict[str, Any]]:
    """Runs a cell as a page would; returns what came on iopub."""
    came: list[dict[str, Any]] = []
    kernel.execute_interactive(code, allow_stdin=True, timeout=180, output_hook=came.append)
    errors = [m["content"]["traceback"] for m in came if m["msg_type"] == "error"]
    assert not errors, "\n".join(errors[0])
    return came


def new_subshell(kernel: BlockingKernelClient) -> str:
    info = kernel.kernel_info(reply=True, timeout=180)
    assert "kernel subshells" in info["content"]["supported_features"], (
        "the marker 'subshells' skips where there are none"
    )
    request = kernel.session.msg("create_subshell_request")
    kernel.control_channel.send(request)
    while True:
        reply = kernel.get_control_msg(timeout=10)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            return str(reply["content"]["subshell_id"])


def widget_id(came: list[dict[str, Any]]) -> str:
    """The id of the one widget that was displayed; a run's panel has an empty output above it."""
    displayed = [m["content"]["data"] for m in came if m["msg_type"] == "display_data"]
    (shown,) = [data[WIDGET] for data in displayed if WIDGET in data]
    return str(shown["model_id"])


def say(kernel: BlockingKernelClient, comm_id: str, subshell_id: str, content: dict[str, Any]) -> None:
    """Sends a widget's custom message as JupyterLab does: to the subshell of the widgets."""
    message = kernel.session.msg(
        "comm_msg", {"comm_id": comm_id, "data": {"method": "custom", "content": content}}
    )
    message["header"]["subshell_id"] = subshell_id
    kernel.shell_channel.send(message)


def wait_for(kernel: BlockingKernelClient, comm_id: str, wanted: Any, timeout_s: float) -> dict[str, Any]:
    """The first custom message of the widget for which `wanted` is true."""
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            message = kernel.get_iopub_msg(timeout=left_s)
        except queue.Empty:
            break
        if message["msg_type"] == "comm_msg" and message["content"]["comm_id"] == comm_id:
            content = message["content"]["data"].get("content", {})
            if wanted(content):
                return {**content, "buffers": message["buffers"]}
    raise AssertionError(f"the kernel said nothing of the kind within {timeout_s} s")
