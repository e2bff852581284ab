"""`python -m nbgpu.cli` is the `nbgpu` command."""

from nbgpu.cli import main

if __name__ == "__main__":
    main()
