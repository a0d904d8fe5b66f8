"""A repository of a user's code, to be copied for a run."""

import subprocess
from pathlib import Path

GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main")


def repository(folder: Path) -> Path:
    """A repository with code, ignored data, and links of each kind."""
    made = folder / "repo"
    for name in ("pkg", "sub", "data/deep"):
        (made / name).mkdir(parents=True)
    subprocess.run([*GIT, "init", "-q", str(made)], check=True)
    (made / ".gitignore").write_text("data/\n*.log\n")
    (made / "data/deep/big").write_bytes(b"0" * 1000)
    (made / "pkg/code.py").write_text("VALUE = 1\n")
    (made / "sub/run.sh").write_text("#!/bin/sh\n")
    (made / "sub/run.sh").chmod(0o755)
    (made / "sub/old.log").write_text("x")
    (made / "gone.py").write_text("")
    (folder / "outside").write_text("secret")
    (made / "in").symlink_to("pkg/code.py")
    (made / "out").symlink_to("../outside")
    (made / "far").symlink_to(folder)
    subprocess.run([*GIT, "-C", str(made), "add", "gone.py", "pkg"], check=True)
    (made / "gone.py").unlink()
    return made
