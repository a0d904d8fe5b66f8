"""What to run: NAME.toml for the plan and NAME.py for the worker, side by side."""
