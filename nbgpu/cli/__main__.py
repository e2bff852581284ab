"""`python -m nbgpu.cli` is the `nbgpu` command."""

from nbgpu.cli import main

main()
