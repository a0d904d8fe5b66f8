"""Recorded clusters: what Slurm's programs print on them, from the folders of tests/clusters."""

from pathlib import Path

from sites import Site

CLUSTERS = Path(__file__).parents[1] / "clusters"
# A word of the command line -> the file with the answer.
ANSWERS = {
    "scontrol": ("config", "partition", "node", "reservation"),
    "sinfo": ("sinfo",),
    "sshare": ("sshare",),
    "sacctmgr": ("user", "qos"),
}

# What any Slurm refuses, after what a plugin of the site refuses; it may set `partition`.
SBATCH = """\
[ $1 = --version ] && exit
script=$(grep '^#SBATCH') partition=
no() {{ echo "sbatch: error: $1" >&2; exit 1; }}
if [ $1 = --test-only ]; then
  {own}
  [[ $script =~ --partition=([^[:space:]]*) ]] && partition=${{BASH_REMATCH[1]}}
  [ -n "$partition" ] || partition=$(grep -o '^[^|]*\\*|' '{folder}/sinfo' | head -n 1)
  partition=${{partition%|}} partition=${{partition%\\*}} partition=${{partition%%,*}}
  [ -n "$partition" ] || no "No partition specified or system default partition"
  if [[ $script =~ gpus-per-node=|gres=gpu ]]; then
    grep -q "^$partition[*]\\?|.*|gpu:" '{folder}/sinfo' ||
      no "Requested node configuration is not available"
  fi
  echo "sbatch: Job 9 to start" >&2
else
  echo "Submitted batch job 42"
fi
"""


def names() -> list[str]:
    """The recorded clusters."""
    return sorted(path.name for path in CLUSTERS.iterdir() if path.is_dir())


def install(site: Site, name: str) -> None:
    """Make Slurm's programs answer as on a cluster, and write down their calls."""
    folder = CLUSTERS / name
    site.slurm()
    own = f". '{folder}/submit'" if (folder / "submit").exists() else ""
    site.program("sbatch", SBATCH.format(folder=folder, own=own))
    site.program("squeue", f'echo "squeue $*" >>{site.folder}/calls')
    for program, words in ANSWERS.items():
        cases = "\n".join(
            f"{_pattern(program, word)}) {_answer(folder / word)};;" for word in words
        )
        site.program(
            program, f'echo "{program} $*" >>{site.folder}/calls\ncase "$*" in\n{cases}\nesac'
        )


def _pattern(program: str, word: str) -> str:
    return "*" if program in ("sinfo", "sshare") else f"*'show {word}'*"


def _answer(file: Path) -> str:
    return f"cat '{file}'" if file.exists() else "echo 'not here' >&2; exit 1"


def change(site: Site, program: str, command: str) -> None:
    """Change what a program of Slurm prints, by a command of sed, which knows the variables."""
    path = site.bin / program
    if not (site.bin / "sed").exists():
        (site.bin / "sed").symlink_to("/usr/bin/sed")
    path.write_text(path.read_text().replace("cat", f'sed "{command}"'))


def calls(site: Site) -> list[str]:
    """The calls of Slurm's programs so far."""
    path = site.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []
