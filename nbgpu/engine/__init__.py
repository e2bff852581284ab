"""The ranks' side: the code in the process of each rank. It does not import the client."""

from nbgpu.machine.slow_imports import put_off

put_off()
