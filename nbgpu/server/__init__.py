"""An extension of the Jupyter server, through which JupyterLab's sidebar shows this host and acts on
clusters.

Jupyter looks for the functions below by name. They import nothing heavy, because every Jupyter server with
nbgpu installed runs them, also if nobody ever opens the sidebar.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Name the module that Jupyter loads."""
    return [{"module": "nbgpu.server"}]


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Name the folder with the built JupyterLab extension, for `jupyter labextension develop`."""
    return [{"src": "../labextension", "dest": "nbgpu"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the addresses below `/nbgpu` to a Jupyter server that starts. Where this raises, Jupyter logs the
    error and starts without them."""
    from nbgpu.server.handlers import handlers

    server.web_app.add_handlers(".*$", handlers(server.web_app.settings["base_url"]))
    server.log.info("nbgpu: the sidebar's addresses are below %snbgpu", server.web_app.settings["base_url"])
