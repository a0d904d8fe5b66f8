"""`python -m hpcddp.agent`, for scripts in the folders of older runs."""

import runpy

if __name__ == "__main__":
    runpy.run_module("hpcddp.launch.torchrun", run_name="__main__", alter_sys=True)
