"""Commands that begin with a launcher of their own: they become their script, or are refused."""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from sites import Site, flags

from hpcddp.errors import UserError
from hpcddp.planning.asked import Asked


def ask(text: str, *pairs: tuple[str, Any], line: str = "", source: str = "command line") -> Asked:
    """What is asked with this command on 2 nodes of 4 GPUs."""
    layer = flags(("nodes", "2"), where="--nodes")
    for name, value in (("gpus", 4), ("cluster", "local"), *pairs):
        layer.put(name, value, f"--{name}")
    layer.put("command", shlex.split(text), source)
    layer.put("name", "train", source)
    layer.line = tuple(shlex.split(line))
    return Asked.read([layer], [], os.environ)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun train.py --lr 0.1", "python train.py --lr 0.1"),
        ("torchrun --nproc_per_node 4 --nnodes=2 train.py", "python train.py"),
        ("torchrun --nproc-per-node=gpu train.py", "python train.py"),
        (
            "torchrun --nproc_per_node auto -m pkg.train --nnodes 3",
            "python -m pkg.train --nnodes 3",
        ),
        ("torchrun --no_python ./train.sh a", "./train.sh a"),
        ("torchrun -- train.py", "python train.py"),
        ("python -m torch.distributed.run --nnodes 2 train.py", "python train.py"),
        ("python3 -um torch.distributed.run train.py", "python3 -u train.py"),
        ("python -W ignore -m torch.distributed.run train.py", "python -W ignore train.py"),
        ("python -m torch.distributed.launch --use_env train.py", "python train.py"),
        ("python /opt/bin/torchrun train.py", "python train.py"),
        ("accelerate launch --num_processes 8 --num_machines 2 train.py", "python train.py"),
        ("accelerate-launch --multi_gpu train.py", "python train.py"),
        ("python -m accelerate.commands.launch -m pkg.train", "python -m pkg.train"),
        ("python -m accelerate.commands.accelerate_cli launch train.py", "python train.py"),
        ("env A=b torchrun train.py", "env A=b python train.py"),
        ("env -u B A=b torchrun train.py", "env -u B A=b python train.py"),
        ("uv run torchrun train.py", "uv run python train.py"),
        ("uv run --with x torchrun train.py", "uv run --with x python train.py"),
        ("uv run -m torch.distributed.run train.py", "uv run python train.py"),
        ("uv run --module accelerate.commands.launch t.py", "uv run python t.py"),
        ("timeout -k 5 60 torchrun train.py", "timeout -k 5 60 python train.py"),
        ("nice -n 5 torchrun train.py", "nice -n 5 python train.py"),
        ("nohup nice torchrun train.py", "nohup nice python train.py"),
        (
            "apptainer exec --nv a.sif torchrun train.py",
            "apptainer exec --nv a.sif python train.py",
        ),
        ("conda run -n env torchrun train.py", "conda run -n env python train.py"),
    ],
)
def test_a_launcher_that_only_repeats_nodes_and_gpus_becomes_its_script(
    site: Site, text: str, words: str
) -> None:
    asked = ask(text)
    assert shlex.join(asked.spec.command) == words
    (note,) = asked.notes
    assert f"only repeats --nodes and --gpus: each of 8 ranks runs `{words}`" in note


@pytest.mark.parametrize(
    ("text", "what", "words"),
    [
        ("torchrun --nproc_per_node 2 t.py", "conflicts with --nodes 2 --gpus 4",
         "-- python t.py; or change to --gpus 2"),
        ("torchrun --nnodes 1 t.py", "--nnodes 1 conflicts with --nodes 2", "-- python t.py"),
        ("torchrun --standalone t.py", "--standalone conflicts with --nodes 2", "-- python t.py"),
        ("torchrun --max_restarts 3 t.py", "would be lost", "equivalent: --max_restarts 3"),
        ("torchrun --rdzv_backend=c10d t.py", "--rdzv_backend=c10d would be", "-- python t.py"),
        ("torchrun", "torchrun has no script", "-- python train.py"),
        ("python -m torch.distributed.launch t.py", "passes --local-rank", "-- python t.py"),
        ("accelerate launch --num_processes 4 t.py", "conflicts with", "-- python t.py"),
        ("accelerate launch --mixed_precision bf16 t.py", "would be lost",
         "--env ACCELERATE_MIXED_PRECISION=bf16 -- python t.py"),
        ("accelerate launch --use_fsdp t.py", "would be lost", "equivalent: --use_fsdp"),
        ("srun python t.py", "srun would start ranks inside each rank", "-- python t.py"),
        ("srun -l -n8 -p gpu --mem=9G ./a b", "srun would start",
         "--partition gpu --sbatch mem=9G -- ./a b"),
        ("mpirun -np 8 -x A=1 --mca btl tcp ./a", "mpirun would", "--env A=1 -- ./a"),
        ("mpiexec.hydra -n 8 -genv A 1 ./a", "mpiexec.hydra would", "--env A=1 -- ./a"),
        ("horovodrun -np 8 -H a:4,b:4 python t.py", "horovodrun would", "--launcher horovod -- py"),
        ("deepspeed --num_gpus 4 t.py --zero 1", "deepspeed would", "-- python t.py --zero 1"),
        ("timeout 60 srun ./a", "srun would start ranks", "-- timeout 60 ./a"),
        ("torchrun --log-dir test t.py", "would be lost", "-- python t.py; without"),
        ("srun torchrun --max-restarts 3 t.py", "srun would start",
         "-- python t.py; without equivalent: --max-restarts 3"),
        ("srun -", "srun would start ranks", "-- -"),
    ],
)  # fmt: skip
def test_any_other_option_or_launcher_is_refused_with_the_whole_command(
    site: Site, text: str, what: str, words: str
) -> None:
    for name in ("a", "t.py"):
        site.write(name, "")
    line = "submit toy --nodes 2 --gpus 4 --runs 'my runs' --dry-run -- ..."
    with pytest.raises(UserError) as caught:
        ask(text, line=line)
    assert what in caught.value.what and caught.value.where == "command line"
    start = "use: hpcddp submit toy --nodes 2 --gpus 4 --runs 'my runs' --dry-run "
    assert caught.value.hint.startswith(start)
    assert words in caught.value.hint


def test_a_size_that_only_the_launcher_names_is_in_the_corrected_command(site: Site) -> None:
    def refused(text: str, source: str = "command line") -> str:
        layer = flags(("cluster", "local"), where="--cluster")
        layer.put("command", shlex.split(text), source)
        layer.line = ("submit", "--cluster", "local", "--", *shlex.split(text))
        with pytest.raises(UserError) as caught:
            Asked.read([layer], [], os.environ)
        return caught.value.hint

    start = "use: hpcddp submit --cluster local"
    both = f"{start} --nodes 2 --gpus 4 -- python t.py"
    assert refused("torchrun --nnodes 2 --nproc_per_node 4 t.py") == both
    assert refused("accelerate launch --num_machines 2 --num_processes 8 t.py") == both
    assert refused("srun -N 2 -n 8 python t.py") == both
    assert refused("srun -N 2 --gres=gpu:a100:4 --ntasks-per-node=4 python t.py") == both
    agents = "srun --nodes=2 --ntasks-per-node=1 --gres=gpu:4 torchrun --nnodes 2"
    assert refused(f"{agents} --nproc-per-node=4 t.py") == both
    assert refused("srun -N 1-2 --gres=gpu:4 python t.py") == both.replace("2", "1-2")
    assert refused("mpirun -np 4 python t.py") == f"{start} --gpus 4 -- python t.py"
    some = refused("torchrun --nproc_per_node gpu t.py")
    assert some.startswith(f"{start} --gpus N -- python t.py; N is the number")
    assert refused("srun -n 2 python t.py", "/x/job.toml") == (
        'write gpus = 2 and command = ["python", "t.py"]'
    )


def test_under_slurm_mpirun_is_a_launcher_of_hpcddp(site: Site) -> None:
    with pytest.raises(UserError) as caught:
        ask("mpirun -np 8 ./a", ("cluster", "slurm"))
    assert "--launcher mpi -- ./a" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "python train.py torchrun",
        "python -c 'import torchrun'",
        "python -m pkg.train torchrun",
        "bash -c 'torchrun train.py'",  # seen when a rank starts
        "accelerate test",
        "uv sync",
        "env A=b python train.py",
        "./torchrun.py",
    ],
)
def test_any_other_command_stays_as_it_is(site: Site, text: str) -> None:
    asked = ask(text)
    assert (asked.spec.command, asked.notes) == (shlex.split(text), ())


def test_a_resume_command_is_looked_at_too(site: Site) -> None:
    again = ("resume_command", ["torchrun", "t.py", "--resume"])
    assert ask("python t.py", again).spec.resume_command == ["python", "t.py", "--resume"]
    with pytest.raises(UserError) as caught:
        ask("python t.py", ("resume_command", ["srun", "python", "t.py"]))
    assert caught.value.hint == "use: --set 'resume_command=python t.py'"


def test_the_python_of_a_script_is_the_one_beside_its_launcher(site: Site) -> None:
    for name in ("python", "torchrun"):
        site.program(name, "exit 0")
        site.write(f"env/bin/{name}", "").chmod(0o755)
    assert ask("torchrun t.py").spec.command[0] == "python"
    beside = site.folder / "env" / "bin"
    assert ask(f"{beside}/torchrun t.py").spec.command[0] == str(beside / "python")
    assert Path(sys.executable).name.startswith("python")
