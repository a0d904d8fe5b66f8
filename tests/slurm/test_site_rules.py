"""Sites that refuse jobs, or keep them waiting, by rules of their own."""

import json
from pathlib import Path

import pytest

from hpcddp.errors import SandboxError

from .desk import wait_for
from .test_hardships import Site, site  # noqa: F401

CONFIG = Path("/etc/slurm")  # where 20.11 looks for the script
# slurmdbd 24.11.5 with MariaDB 11.8.9, in Debian 13: each query fails.
BROKEN = "_check_mysql_concat_is_sane: null result"
LUA = """\
function slurm_job_submit(job, partitions, user)
  if job.account == nil then
    slurm.log_user("say who pays, with --account")
    return slurm.ERROR
  end
  if job.time_limit == nil or job.time_limit == slurm.NO_VAL then
    slurm.log_user("say how long, with --time")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""


@pytest.mark.smoke("job_submit/lua")
def test_the_words_of_a_script_that_refuses_the_job_are_shown(
    site: Site,  # noqa: F811
    pytestconfig: pytest.Config,
) -> None:
    desk = site()
    home = Path(desk.slurm.sandbox.status()["home"])
    (home / "job_submit.lua").write_text(LUA)
    if pytestconfig.getoption("--smoke") and CONFIG.is_dir():  # a folder of this run alone
        (CONFIG / "job_submit.lua").write_text(LUA)
    with (home / "slurm.conf").open("a") as conf:
        conf.write("JobSubmitPlugins=lua\n")
    sandbox = desk.slurm.sandbox
    sandbox.stop_daemon("slurmctld")
    sandbox.start_daemon("slurmctld")
    wait_for(lambda: set(sandbox.status()["nodes"].values()) == {"idle"})
    for given, words in (
        ((), "say who pays, with --account"),
        (("--account", "lab"), "say how long, with --time"),
    ):
        refused = desk.result("submit", "toy", *given)
        assert refused.returncode == 1 and words in refused.stderr, refused.stderr
        assert desk.status()["state"] == "REFUSED" and words in desk.status()["reason"]
    desk("submit", "toy", "--account", "lab", "--time", "10", "--follow")
    assert desk.status()["state"] == "COMPLETED"


@pytest.mark.smoke("accounting with limits")
def test_a_limit_of_the_account_is_told(site: Site) -> None:  # noqa: F811
    try:
        desk = site(accounting=True, extra={"AccountingStorageEnforce": "limits"})
    except SandboxError as error:
        if BROKEN in error.hint:
            pytest.skip("slurmdbd and MariaDB of this release do not work together")
        raise

    def account(*words: str) -> None:
        desk.slurm.run("sacctmgr", "--immediate", *words, check=True)

    account("add", "account", "lab", "Cluster=sandbox")
    account("add", "user", "root", "Account=lab")
    refused = desk.result("submit", "toy", "--account", "nobody")
    assert refused.returncode == 1 and "nvalid account" in refused.stderr, refused.stderr
    account("modify", "account", "lab", "set", "GrpTRES=node=1")
    run = desk.submit("--account", "lab", "--nodes", "2", "--gpus", "1")
    waits = desk.until(lambda s: "AssocGrpNodeLimit" in s["reason"], run)
    assert "more nodes than the account allows all jobs together" in waits["reason"], waits
    account("modify", "account", "lab", "set", "GrpTRES=node=-1")
    ended = desk.until(lambda s: s["state"] == "COMPLETED", run)
    shown = ("sacct", "-nPX", "-o", "State", "-j", ended["job_id"])
    # The controller tells the database later.
    wait_for(lambda: desk.slurm.run(*shown, check=True).stdout.strip() == "COMPLETED")
    assert json.loads(desk("status", run, "--json"))["step"] == 12
