"""Python imports this at the start of every process of the tests, because the folder is on PYTHONPATH: their
clusters get the processes of the template (warm_start.py)."""

import os

if "NBGPU_TESTS_LOGS" in os.environ:
    from launch_hook import install

    install()
