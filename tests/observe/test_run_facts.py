"""The facts of a run for a page that is passed on: all that matters, and no secret."""

import json
from pathlib import Path

from made import made_run

from hpcddp.observe.run_facts import static
from hpcddp.planning.render import variable
from hpcddp.rundir import write_json


def test_what_nobody_changed_is_named(tmp_path: Path) -> None:
    facts = static(made_run(tmp_path, global_batch=32, seed=7))
    assert "global_batch" in facts["defaults"] and "seed" not in facts["defaults"]
    assert set(facts["defaults"]) < set(facts["config"])


def test_values_of_the_environment_stay_where_they_are(tmp_path: Path) -> None:
    env = {"DATABASE_URL": "hush 4711", "GIT_PAT": "it's", "OMIT": "false", "EMPTY": ""}
    run = made_run(tmp_path, env=env)
    words = variable("ENVIRONMENT", [f"{name}={value}" for name, value in env.items()])
    run.script.write_text(f"readonly -a COMMAND=(a b)\n{words}\nfalse || srun x\n")
    facts = static(run)
    text = json.dumps(facts)
    assert "hush" not in text and "it's" not in text and "'\"'" not in text
    assert facts["config"]["env.GIT_PAT"] == facts["config"]["env.EMPTY"] == "(hidden)"
    assert facts["script"] == (
        "readonly -a COMMAND=(a b)\n"
        "readonly -a ENVIRONMENT=(DATABASE_URL=(hidden) GIT_PAT=(hidden) OMIT=(hidden) "
        "EMPTY=(hidden))\nfalse || srun x\n"
    )
    run.script.write_text("readonly -a ENVIRONMENT=(A='hush)\n")
    assert static(run)["script"] == "readonly -a ENVIRONMENT=((hidden))\n"


def test_a_url_is_shown_without_its_user(tmp_path: Path) -> None:
    dataset = {"url": "https://ann:hu@sh@host:8/a@b", "also": ["s3://key:hush@bucket", "a@b.org"],
               "root": "s3://key:hu+/hush@bucket/x", "plain": "s3://b/a:b@c",
               "signed": "https://host:8/a@b?sig=hush&x=1"}  # fmt: skip
    run = made_run(tmp_path, dataset=dataset, data={"stage": "http://hush@host/x"})
    run.script.write_text("curl 'ftp://ann:hush@host' me@host\n")
    facts = static(run)
    assert "hush" not in json.dumps(facts) and "hu@" not in json.dumps(facts)
    assert facts["config"]["dataset.url"] == "https://(hidden)@host:8/a@b"
    assert facts["config"]["dataset.also"] == ["s3://(hidden)@bucket", "a@b.org"]
    assert facts["config"]["dataset.root"] == "s3://(hidden)@bucket/x"
    assert facts["config"]["dataset.plain"] == "s3://b/a:b@c"
    assert facts["config"]["dataset.signed"] == "https://host:8/a@b?sig=(hidden)&x=1"
    assert facts["script"] == "curl 'ftp://(hidden)@host' me@host\n"


def test_versions_are_one_table_with_what_matters_first(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    packages = {"attrs": "26", "torch": "2.13.0", "Zope": "1"}
    write_json(
        run.versions, {"executable": "/bin/python", "python": "3.11.7", "packages": packages}
    )
    assert list(static(run)["versions"]) == ["python", "torch", "executable", "attrs", "Zope"]
