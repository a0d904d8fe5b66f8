"""A job on another cluster than that of the shell: the commands follow it there."""

import json
from collections.abc import Callable

import pytest
import recorded
from sites import Outcome, Site

from hpcddp.slurm import follow_up_jobs

Command = Callable[..., Outcome]
# Only wice knows the job; with several clusters, each has a line of its own.
SQUEUE = """
for cluster in ${SLURM_CLUSTERS//,/ }; do
  echo "CLUSTER: $cluster"
  [ $cluster = wice ] && echo "42|PENDING|Priority|N/A|N/A||x/job.sbatch|$(cat name)"
done
true
"""


@pytest.mark.parametrize("clusters", ["wice", "genius,wice"])
def test_status_and_cancel_ask_the_cluster_of_the_job(
    site: Site, hpcddp: Command, clusters: str
) -> None:
    site.slurm(
        squeue=SQUEUE,
        scancel='echo "$SLURM_CLUSTERS $*" >>cancelled',
        sbatch="case $1 in --version) exit 0;; esac; echo 'Submitted batch job 42 on cluster wice'",
    )
    done = hpcddp("submit", "toy", "--sbatch", f"clusters={clusters}", "--json")
    assert done.code == 0, done.err
    name = json.loads(done.out.splitlines()[0])["run"]
    site.write("name", name)
    row = json.loads(hpcddp("status", "--json").out)
    assert (row["run"], row["state"], row["job_id"]) == (name, "PENDING", "42")
    assert json.loads(hpcddp("ls", "--json").out)["runs"][0]["state"] == "PENDING"
    assert hpcddp("cancel", name).code == 0
    assert (site.folder / "cancelled").read_text() == "wice 42\n"


def test_the_id_of_a_follow_up_is_without_its_cluster(site: Site) -> None:
    site.program("sbatch", f"cat '{recorded.CLUSTERS / 'multi-cluster' / 'sbatch'}'")
    script = site.write("job.sbatch", "#!/bin/bash\n")
    assert follow_up_jobs.successor(script, ["1"], "58070025", ok=False) == "58070026"
