"""`python -m hpcddp.fork`, for scripts in the folders of older runs."""

import runpy

runpy.run_module("hpcddp.launch.fork", run_name="__main__", alter_sys=True)
