"""Container runtimes: how the command of a rank starts in an image. A row each.

Sources of the options:

    apptainer    https://apptainer.org/docs/user/1.2/cli/apptainer_exec.html, singularity too
    charliecloud https://manpages.ubuntu.com/manpages/lunar/man1/ch-run.1.html (release 0.31)
    pyxis        https://github.com/NVIDIA/pyxis/wiki/Usage, options of srun
    enroot       https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md, and image-format.md
                 for the fields of --mount
    podman-hpc   https://github.com/NERSC/podman-hpc, etc/modules.d/gpu.yaml for --gpu; the other
                 options are those of podman-run(1)
    shifter      https://github.com/NERSC/shifter/blob/master/doc/command/shifter.rst
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp.spec import ContainerSpec

BOTH = ("slurm", "local")
# enroot and podman-hpc begin with an empty environment: this shell passes on the names of all
# exported variables but those of the host itself. $0 is the option for a name; the first two
# arguments are the runtime's program and verb.
PASS_ON = (
    "names=(); for name in $(compgen -e); do "
    "[[ $name =~ ^(LD_.*|PYTHON.*|PATH|HOME|PWD|OLDPWD|SHLVL|_)$ ]] || "
    'names+=("$0" "$name"); done; exec "$1" "$2" "${names[@]}" "${@:3}"'
)
ENTER = 'cd -- "$0" && exec "$@"'  # for a runtime without an option for the working folder


class Runtime(NamedTuple):
    """One way to run a command in an image.

    Args:
        start: the program, its verb and fixed options; empty if srun itself starts the container.
        bind: the option for a folder, with its place {bind}, and {ro} if it can be read-only.
        ro: what stands there for a read-only folder.
        folder: the option for the working folder, with its place {folder}; "" for none.
        image: the option for the image; "" if the image follows the options.
        end: what separates the image from the command.
        gpus: kind -> options.
        passes: the option that passes on a variable by name; "" if the environment passes.
        points: a bound folder must exist in the image.
        shared: folders of the node that other runtimes share by themselves.
        enters: its command also starts a shell beside a rank.
        host_path: the host's PATH reaches the image.
        binds_tmp: after the first two words, it takes the node's folder for temporary files.
    """

    start: tuple[str, ...]
    bind: str
    folder: str = ""
    image: str = ""
    end: tuple[str, ...] = ()
    gpus: Mapping[str, tuple[str, ...]] = {}
    passes: str = ""
    points: bool = False
    shared: tuple[str, ...] = ()
    enters: bool = False
    host_path: bool = False
    binds_tmp: bool = False
    ro: str = ":ro"
    backends: tuple[str, ...] = BOTH

    @property
    def by_srun(self) -> bool:
        """Whether srun starts the container."""
        return not self.start


def _sif(program: str) -> Runtime:
    """apptainer, or singularity, which has the same options."""
    gpus = {"nvidia": ("--nv",), "rocm": ("--rocm",)}
    return Runtime((program, "exec"), "--bind={bind}{ro}", "--pwd={folder}", gpus=gpus,
                   enters=True, binds_tmp=True)  # fmt: skip


CONTAINERS = {
    "apptainer": _sif("apptainer"),
    "singularity": _sif("singularity"),
    # GPU libraries are copied into the image beforehand, by ch-fromhost.
    "charliecloud": Runtime(
        ("ch-run",), "--bind={bind}", "--cd={folder}", end=("--",), points=True, enters=True,
        host_path=True,
    ),
    # Its hook makes GPUs visible.
    "pyxis": Runtime(
        (), "--container-mounts={bind}{ro}", "--container-workdir={folder}",
        "--container-image={image}", shared=("/tmp",), backends=("slurm",),
    ),
    "enroot": Runtime(
        ("enroot", "start"), "--mount={bind}:none:x-create=dir,bind{ro}", passes="--env",
        ro=",ro", shared=("/tmp",),
    ),
    "podman-hpc": Runtime(
        ("podman-hpc", "run", "--rm", "--network=host", "--ipc=host", "--pid=host"),
        "--volume={bind}{ro}", "--workdir={folder}", gpus={"nvidia": ("--gpu",)}, passes="--env",
        shared=("/tmp",),
    ),
    "shifter": Runtime(
        ("shifter",), "--volume={bind}{ro}", image="--image={image}",
        gpus={"nvidia": ("--module=gpu",)}, enters=True,
    ),
}  # fmt: skip


def options(
    container: ContainerSpec, binds: Sequence[str], folder: str, *, gpus: bool
) -> list[str]:
    """The options of a runtime, with the image if it is one of them.

    Args:
        binds: SOURCE:TARGET or SOURCE:TARGET:ro.
        folder: where the command works.
        gpus: the job asks for GPUs.
    """
    row = CONTAINERS[container.runtime]
    words = list(row.gpus.get(container.gpus, ())) if gpus else []
    option, _, place = row.bind.partition("=")
    places = [
        place.format(bind=bind.removesuffix(":ro"), ro=row.ro if bind.endswith(":ro") else "")
        for bind in binds
    ]
    if row.by_srun:  # one option has all of them
        places = [",".join(places)] if places else []
    words += [f"{option}={each}" for each in places]
    if row.folder:
        words.append(row.folder.format(folder=folder))
    if row.image:
        words.append(row.image.format(image=container.image))
    return words


def command(
    container: ContainerSpec, binds: Sequence[str], folder: str, *, gpus: bool
) -> list[str]:
    """The words before the command of a rank; none if srun starts the container. ``options``
    explains the arguments."""
    row = CONTAINERS[container.runtime]
    if row.by_srun:
        return []
    words = [*row.start, *options(container, binds, folder, gpus=gpus)]
    words += [] if row.image else [container.image]
    words += row.end
    if row.passes:
        words = ["bash", "-c", PASS_ON, row.passes, *words]
    return words if row.folder else [*words, "sh", "-c", ENTER, folder]
