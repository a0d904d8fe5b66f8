"""A process with mounts of its own."""

import subprocess


def mounts() -> list[str]:
    """How a process gets mounts of its own here; nothing where it cannot."""
    for words in (["unshare", "-m"], ["unshare", "-Urm"]):
        if subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
                          capture_output=True).returncode == 0:  # fmt: skip
            return words
    return []
