"""The shipped jobs: NAME.toml for the plan and NAME.py for the ranks."""
