"""The version of nbgpu, of which all others are read: pyproject.toml's, `nbgpu.__version__`, a registry
entry's."""

VERSION = "0.1.0"
