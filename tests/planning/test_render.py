import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sites import NASTY

from hpcddp.errors import TemplateError
from hpcddp.planning import render, resources
from hpcddp.planning.render import TemplateContext, Text


def facts(**given: Any) -> TemplateContext:
    return TemplateContext(
        **{"directives": [], "variables": {}, "launcher": "launch/srun.sh.j2"} | given
    )


def rendered(folder: Path, text: str, **given: Any) -> str:
    path = folder / "site.sh.j2"
    path.write_text("#!/bin/bash\n" + text)
    return render.render(path, resources.folder("templates"), facts(**given))


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpi", "dask"])
@pytest.mark.parametrize(("program", "seconds"), [(True, 0), (False, 600)])
def test_ranks_of_a_program_may_outstay_one_another(
    tmp_path: Path, launcher: str, program: bool, seconds: int
) -> None:
    """srun waits for ever with 0."""
    how = {"launcher": f"launch/{launcher}.sh.j2", "program": program, "backend": "slurm"}
    text = rendered(tmp_path, '{% extends "slurm.sh.j2" %}', **how)
    assert set(re.findall(r" --wait=(\d+)", text)) == {str(seconds)}


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("gpu", "#SBATCH --x=gpu"),
        (4, "#SBATCH --x=4"),
        (True, "#SBATCH --x"),
        (False, ""),
        ("", '#SBATCH --x=""'),
        ("a b", '#SBATCH --x="a b"'),
        ('say "hi"', '#SBATCH --x="say \\"hi\\""'),
        ("a\\b", '#SBATCH --x="a\\\\b"'),
        ("it's $HOME; #5", '#SBATCH --x="it\'s $HOME; #5"'),
        ("größe", '#SBATCH --x="größe"'),
    ],
)
def test_an_option_is_quoted_as_sbatch_reads_it(value: Any, line: str) -> None:
    assert render.sbatch("x", value) == line


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("x", "a\nb", "control character"),
        ("x", "a\x1b[31m", "control character"),
        ("x", "\udcff", "control character"),
        ("x y", "1", "not the long name"),
        ("X", "1", "not the long name"),
        ("job-name", "x" * 1025, "1025 bytes long, but sbatch accepts 1024"),
        ("output", "数" * 1400, "4200 bytes long, but sbatch accepts 4090"),
    ],
)
def test_what_no_option_can_hold(name: str, value: str, what: str) -> None:
    with pytest.raises(TemplateError, match=what) as caught:
        render.sbatch(name, value)
    assert name in caught.value.where


def test_shell_variables_hold_their_values_byte_for_byte(tmp_path: Path) -> None:
    lines = [f"{render.variable(f'V{i}', v)}" for i, v in enumerate(NASTY)]
    lines += [render.variable("ALL", NASTY), render.variable("NONE", []), render.variable("N", 5)]
    shown = " ".join(f'"$V{i}"' for i in range(len(NASTY)))
    script = "\n".join([*lines, f'printf \'%s\\0\' {shown} "${{ALL[@]}}" "${{#NONE[@]}}" "$N"'])
    done = subprocess.run(["bash", "-uc", script], capture_output=True, check=True, cwd=tmp_path)
    assert done.stdout.decode().split("\0")[:-1] == [*NASTY, *NASTY, "0", "5"]
    assert list(tmp_path.iterdir()) == []


def test_a_variable_is_read_only_and_has_a_name() -> None:
    done = subprocess.run(["bash", "-c", render.variable("A", "1") + "\nA=2\necho $A"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert "A: readonly variable" in done.stderr and done.stdout == "1\n"
    with pytest.raises(TemplateError, match="is not a shell variable's name"):
        render.variable("A B", "1")
    with pytest.raises(TemplateError, match="control character"):
        render.variable("A", ["x", "a\nb"])


@pytest.mark.parametrize(
    "line",
    [
        "{{ launcher }}",
        "{{ 'text' }}",
        "{{ 5 }}",
        "{{ directives }}",
        "{% for name, value in directives %}{{ value }}{% endfor %}",
        "{{ variables() ~ 'x' }}",
        "{{ launcher | upper }}",
        "{{ launcher | safe }}",
        "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(launcher) }}",
        "{% set x %}{{ launcher }}{% endset %}{{ x }}",
    ],
)
def test_a_raw_value_is_an_error_that_names_the_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(TemplateError, match="is not allowed here") as caught:
        rendered(tmp_path, f"\n\n{line}\n", directives=[("x", "y")])
    assert caught.value.where == f"{tmp_path}/site.sh.j2:4"
    assert "variables()" in caught.value.hint


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{{ lanucher }}", "'lanucher' is undefined"),
        ("{% if modles %}{% endif %}", "'modles' is undefined"),
        ("{{ launcher.nope }}", "no attribute 'nope'"),
        ("{{ sbatch('x') }}", "missing 1 required"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ launcher if", "unexpected"),
        ("{% nope %}", "unknown tag 'nope'"),
        ("{{ sbatch('x', 'a\\nb') }}", "control character"),
    ],
)
def test_a_mistake_in_a_template_is_named_with_its_line(
    tmp_path: Path, line: str, what: str
) -> None:
    with pytest.raises(TemplateError, match=re.escape(what)) as caught:
        rendered(tmp_path, f"\n{line}\n")
    assert caught.value.where.startswith(f"{tmp_path}/site.sh.j2:3")


def test_the_line_is_named_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = tmp_path / "site.sh"
    path.write_text("#!/bin/bash\n{{ launcher }}\n")
    with pytest.raises(TemplateError) as caught:
        render.render(path, resources.folder("templates"), facts())
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"#!/bin/bash\n\xff\n", "UnicodeDecodeError"),
        (b"echo hi\n", "does not begin with #!"),
        (b"#!/bin/bash\n{% include 'gone.j2' %}\n", "unknown template 'gone.j2'"),
        (b"#!/bin/bash\necho\n#SBATCH --qos=x\n", "sbatch would ignore this line: #SBATCH --qos=x"),
        (b"#!/bin/bash\n # SBATCH --qos=x\n", "sbatch would ignore this line"),
    ],
)
def test_what_is_no_script(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "site.sh.j2"
    path.write_bytes(data)
    with pytest.raises(TemplateError, match=re.escape(what)) as caught:
        render.render(path, resources.folder("templates"), facts())
    assert str(path) in caught.value.where


def test_a_script_that_sbatch_would_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "LONGEST_SCRIPT", 100)
    with pytest.raises(TemplateError, match="longer than 4 MiB"):
        rendered(tmp_path, "#" * 100)


def test_a_template_may_extend_a_shipped_one_and_keep_what_it_fills(tmp_path: Path) -> None:
    text = rendered(
        tmp_path,
        "{% extends 'slurm.sh.j2' %}{% block setup %}{{ super() }}\nml cuda\n{% endblock %}",
        directives=[("qos", "high")],
    )
    assert "#SBATCH --qos=high\n" in text
    assert 'export "${ENVIRONMENT[@]}"\n' in text and "\nml cuda\n" in text
    assert "srun --nodes=" in text


def test_slurms_template_serves_this_machine_too(tmp_path: Path) -> None:
    """A job file names a site's child of it, and is tried where there is no Slurm."""
    here = rendered(tmp_path, '{% extends "slurm.sh.j2" %}', backend="local")
    assert "HPCDDP_SAID" not in here and "later" not in here and "\n  break\n" in here


@pytest.mark.parametrize("name", ["slurm.sh.j2", "a b $(touch x).sh.j2", "größe"])
def test_a_template_may_have_any_name_also_that_of_what_it_extends(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("{% extends 'slurm.sh.j2' %}{% block setup %}# mine\n{% endblock %}")
    (tmp_path / "sub").mkdir()
    for same in (path, tmp_path / "sub" / ".." / name):
        assert "# mine\n" in render.render(same, resources.folder("templates"), facts())


def test_a_template_may_include_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "part.sh.j2").write_text("echo part\n")
    assert rendered(tmp_path, "{% include 'part.sh.j2' %}") == "#!/bin/bash\necho part\n"


def test_macros_of_a_template_may_give_what_was_looked_at(tmp_path: Path) -> None:
    text = "{% macro two(n) %}{{ sbatch(n, 1) }}\n{{ sbatch(n, 2) }}{% endmacro %}{{ two('a') }}\n"
    assert rendered(tmp_path, text) == "#!/bin/bash\n#SBATCH --a=1\n#SBATCH --a=2\n"
    assert isinstance(render.sbatch("a", 1), Text)
