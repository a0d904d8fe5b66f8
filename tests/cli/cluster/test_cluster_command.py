import json
from collections.abc import Callable
from pathlib import Path

import pytest
import recorded
from sites import Outcome, Site

from hpcddp.planning.site import site_facts
from hpcddp.planning.site.site_facts import CheckUp

Command = Callable[..., Outcome]


@pytest.fixture
def cluster(site: Site, hpcddp: Command) -> Command:
    """`hpcddp cluster` on a recorded cluster."""
    recorded.install(site, "plain")
    return lambda *words: hpcddp("cluster", *words)


def test_detect_writes_a_profile_that_the_next_command_uses(
    site: Site, cluster: Command, hpcddp: Command
) -> None:
    done = cluster("detect")
    assert done.code == 0 and not done.err
    assert "gpu           12  4 a100" in done.out and "biology (default), vision" in done.out
    assert "2026-11-25 10:00 UTC to 2026-11-25 20:00 UTC, all nodes" in done.out
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    assert f"wrote     {profile}\n" in done.out
    script = hpcddp("submit", "toy", "--dry-run", "--gpus", "4").out
    for line in ("partition=gpu", "account=vision", "qos=gpu", "gpus-per-node=a100:4"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --cpus-per-task=30\n" in script


@pytest.mark.parametrize("name", ["slurm", "local"])
def test_a_cluster_with_a_reserved_name_gets_another_one(
    site: Site, cluster: Command, hpcddp: Command, name: str
) -> None:
    recorded.change(site, "scontrol", f"s/= plain/= {name}/")
    done = cluster("detect")
    assert done.code == 0, done.err
    assert f"clusters/{name}-cluster.toml\n" in done.out
    assert "#SBATCH --partition=gpu\n" in hpcddp("submit", "toy", "--dry-run").out


def test_nodes_of_another_architecture_are_a_warning(site: Site, cluster: Command) -> None:
    recorded.change(site, "scontrol", "s/Arch=x86_64/Arch=riscv64/")
    done = cluster("detect")
    assert "warning: the nodes are riscv64, but this machine is " in done.err
    assert "CPUs      riscv64\n" in done.out


def test_another_cluster_is_detected_by_its_name(
    site: Site, cluster: Command, hpcddp: Command
) -> None:
    recorded.install(site, "multi-cluster")
    for program in ("scontrol", "sinfo"):  # they answer for wice alone
        text = (site.bin / program).read_text().replace("#!/bin/bash", "")
        site.program(program, f'[ "$SLURM_CLUSTERS" = wice ] || exit 1\n{text}')
    done = cluster("detect", "-M", "wice")
    assert done.code == 0, done.err
    assert done.out.endswith(" --cluster wice -- python train.py\n")
    shown = hpcddp("submit", "toy", "--cluster", "wice", "--dry-run")
    assert "#SBATCH --clusters=wice\n" in shown.out and shown.code == 0, shown.err


def test_a_second_detect_keeps_what_a_person_changed(site: Site, cluster: Command) -> None:
    cluster("detect")
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    mine = profile.read_text().replace('account = "vision"', 'account = "speech"')
    profile.write_text(mine)
    done = cluster("detect")
    assert profile.read_text() == mine and f"unchanged {profile}\n" in done.out
    assert 'note: kept your slurm.account: "speech" (detected: "vision")' in done.err
    assert cluster("detect", "--force").code == 0
    assert 'account = "vision"' in profile.read_text()


def test_a_second_detect_keeps_what_a_check_up_found(site: Site, cluster: Command) -> None:
    cluster("detect")
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    seen = {Path("/scratch"): False}
    site_facts.add_check_up(profile, CheckUp(1e9, seen, "ib0", {"/venv": 40.0}))
    cluster("detect")
    facts = json.loads(cluster("show", "--json").out)["facts"]
    assert facts["nodes"] == "ib0 (doctor, 2001-09-09 01:46 UTC)"
    assert (facts["unseen"], facts["imports"]) == (["/scratch"], {"/venv": 40.0})


def test_a_dry_run_prints_the_profile_and_writes_nothing(site: Site, cluster: Command) -> None:
    done = cluster("detect", "--dry-run")
    assert done.code == 0 and 'partition = "gpu"' in done.out
    assert not (site.config / "hpcddp").exists()


def test_show_has_the_values_and_the_facts(cluster: Command) -> None:
    cluster("detect")
    done = cluster("show")
    assert done.code == 0 and 'slurm.account   "vision"' in done.out
    assert "Slurm     23.11.10" in done.out and "h100" in done.out
    facts = json.loads(cluster("show", "--json").out)
    assert facts["values"]["slurm"]["partition"] == "gpu"
    assert facts["facts"]["kinds"][0]["partition"] == "cpu" and facts["schema_version"] == 1


def test_show_of_a_profile_without_facts_says_how_to_read_them(cluster: Command) -> None:
    done = cluster("show", "slurm")
    assert done.code == 0 and "`hpcddp cluster detect` reads them" in done.err


def test_list_names_each_profile(site: Site, cluster: Command) -> None:
    cluster("detect", "mine")
    done = cluster("list")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["NAME", "local", "slurm", "mine"]
    names = [row["name"] for row in json.loads(cluster("list", "--json").out)["profiles"]]
    assert names == ["local", "slurm", "mine"]


def test_list_shows_what_is_wrong_with_a_profile(site: Site, cluster: Command) -> None:
    folder = site.config / "hpcddp" / "clusters"
    folder.mkdir(parents=True)
    (folder / "broken.toml").write_text("nodez = 1\n")
    done = cluster("list")
    assert done.code == 0 and "invalid: unknown key 'nodez'" in done.out
    assert "slurm" in done.out


def test_the_head_of_the_profile_has_the_trials_and_gaps_of_the_last_detection(
    site: Site, cluster: Command
) -> None:
    cluster("detect")
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    tried = [line for line in profile.read_text().splitlines() if "--test-only" in line]
    assert tried == [
        "# sbatch --test-only --partition=gpu --account=vision --qos=gpu "
        "--gpus-per-node=a100:1: accepted"
    ]
    path = site.bin / "scontrol"
    path.write_text(
        path.read_text().replace("*'show reservation'*)", "*'show reservation'*) exit 1;")
    )
    cluster("detect", "--no-trials")
    head = profile.read_text().split("\n\n")[0].splitlines()
    assert head[-3:-1] == [*tried, "# unknown: reservations (scontrol: no message)"]
    assert "interface, GPU driver, libc and $HOME are unknown until `hpcddp doctor`" in head[-1]
    assert profile.read_text().count("# unknown") == 1
    cluster("detect", "--no-trials")
    assert profile.read_text().count("# unknown") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["detect", "../x"], 2, "invalid name of a profile: '../x'"),
        (["detect", "local"], 2, "local is a reserved name"),
        (["show", "nowhere"], 2, "unknown cluster 'nowhere'"),
        (["check", "none.toml"], 2, "no such file"),
        (["detekt"], 2, "did you mean detect?"),
    ],
)
def test_a_mistake_is_an_error_of_one_line(
    cluster: Command, words: list[str], code: int, message: str
) -> None:
    done = cluster(*words)
    assert done.code == code and message in done.err and not done.out


def test_a_profile_that_is_no_utf_8_is_an_error(site: Site, cluster: Command) -> None:
    cluster("detect")
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    profile.write_bytes(b"# gr\xfc\xdfe\n")
    done = cluster("detect")
    assert done.code == 2 and "plain.toml: " in done.err and "Traceback" not in done.err


def test_a_profile_that_is_wrong_is_not_replaced(site: Site, cluster: Command) -> None:
    profile = site.profile("plain", "partition = 'gpu'\n")
    done = cluster("detect")
    assert done.code == 2 and "unknown key 'partition'" in done.err
    assert profile.read_text() == "partition = 'gpu'\n"


def test_damaged_facts_are_read_again_and_lose_no_change(site: Site, cluster: Command) -> None:
    cluster("detect")
    facts = site.config / "hpcddp" / "clusters" / "plain.json"
    profile = facts.with_suffix(".toml")
    mine = profile.read_text().replace('account = "vision"', 'account = "speech"')
    profile.write_text(mine)
    facts.write_text("{")
    assert cluster("show").code == 2
    assert cluster("detect").code == 0 and json.loads(facts.read_text())
    assert profile.read_text() == mine


def values(profile: Path) -> list[str]:
    """The lines of a profile with values."""
    return [line for line in profile.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("program", ["sinfo", "sacctmgr"])
def test_what_could_not_be_read_changes_no_value(
    site: Site, cluster: Command, program: str
) -> None:
    cluster("detect")
    profile = site.config / "hpcddp" / "clusters" / "plain.toml"
    whole, before = profile.read_text(), values(profile)
    kept = (site.bin / program).read_text()
    site.program(program, "echo 'Unable to contact x' >&2; exit 1")
    done = cluster("detect")
    assert done.code == 0 and "note: unknown: " in done.err and values(profile) == before
    site.program(program, kept.split("\n", 1)[1])
    assert cluster("detect").code == 0 and profile.read_text() == whole
    assert cluster("detect", "--no-trials").code == 0 and profile.read_text() == whole


def test_no_slurm_is_exit_code_3(site: Site, hpcddp: Command) -> None:
    done = hpcddp("cluster", "detect")
    assert done.code == 3 and "scontrol not found" in done.err
    assert not (site.config / "hpcddp").exists()


def test_check_asks_bash_and_sbatch(site: Site, cluster: Command) -> None:
    cluster("detect")
    done = cluster("check", "plain")
    assert done.code == 0 and "bash -n   valid" in done.out
    assert "sbatch    accepted: Job 9 to start" in done.out
    site.program("sbatch", "cat >/dev/null; echo 'sbatch: error: no such account' >&2; exit 1")
    done = cluster("check", "plain")
    assert done.code == 1 and "refused: no such account" in done.out
    facts = json.loads(cluster("check", "plain", "--json").out)
    assert facts["accepted"] is False and "#SBATCH --account=vision" in facts["script"]


def test_check_finds_a_template_that_is_no_shell(site: Site, cluster: Command) -> None:
    profile = site.profile("mine", "template = 'mine.sh.j2'\n")
    child = "{% extends 'slurm.sh.j2' %}\n{% block setup %}\nif true\n{% endblock %}\n"
    (profile.parent / "mine.sh.j2").write_text(child)
    done = cluster("check", "mine")
    assert done.code == 2 and "the script is not valid" in done.err and "mine.sh.j2" in done.err
