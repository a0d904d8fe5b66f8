"""The reference of templates: blocks, facts and shell variables, each with one line of text.

render.py gives the facts, plan.py the variables; the blocks are those of templates/*.j2.
"""

# Blocks of the shipped templates that a site's template may fill; {{ super() }} keeps the text.
BLOCKS = {
    "directives": "the #SBATCH lines",
    "setup": "the environment of the ranks: variables, and the steps of [software]",
    "launch": "the start of the ranks, in the background (`&`)",
    "finish": "commands after the ranks have ended; $code is their exit code",
}
# Blocks that differ between the shipped templates only.
INNER_BLOCKS = ("arrive", "knowing", "begun", "requeue")
# The names that a template can use.
FACTS = {
    "directives": "list of (name, value): the sbatch options in order; True is an option without "
    "a value",
    "sbatch": "sbatch(name, value): one #SBATCH line, quoted as sbatch requires",
    "header": "header(): comments that say how the script was made, and what it runs",
    "variables": "variables(): all shell variables of the script, quoted",
    "launcher": "the template of the commands that start the ranks",
    "ending": "the template of the commands after their end; empty for none",
    "software": "the steps of [software] that the job has: software.purge, .modules, .setup, "
    ".conda, .venv, .uv and .container; software.python, if the ranks have a Python of their own",
    "program": "whether the ranks run a command, not a task",
    "trackers": "whether trackers get the metrics during training",
    "backend": "slurm or local",
    "returns": "whether the job may be requeued",
    "here": "whether the job may start an attempt again in the same allocation",
    "no_kill": "whether the job may continue in the same allocation when a node is lost",
    "preflight": "whether the nodes are checked while the ranks start",
}
# Read-only shell variables of each script, besides those of [variables] in the cluster profile.
VARIABLES = {
    "RUN": "the run folder",
    "WORKDIR": "the folder where the job works",
    "PYTHON": "the Python of hpcddp",
    "NODES": "the largest number of nodes",
    "GPUS_PER_NODE": "ranks per node: one per GPU, or one that uses all GPUs (strategy dp)",
    "CPUS_PER_TASK": "CPUs per rank",
    "MODULES": "array: the modules of software.modules; only if there are some",
    "SETUP": "array: the lines of software.setup; only if there are some",
    "CONDA": "the environment of software.conda; only if there is one",
    "VENV": "the folder of software.venv, or the .venv of software.uv; only if there is one",
    "IMAGE": "the image of software.container; only if there is one",
    "RUNTIME": "the program of software.container.runtime, unless srun starts the container",
    "BINDS": "array: the folders that a container binds; only for a runtime that makes none in an "
    "image",
    "CONTAINER": "array: the command that runs another one in the container; only if there is one",
    "SRUN_OPTIONS": "array: the options of srun for a container; only for the runtime pyxis",
    "ENVIRONMENT": "array of NAME=VALUE: the variables of [env], and some of hpcddp",
    "COMMAND": "array: the command that starts a rank",
    "TRACKERS": "array: the trackers of metrics.trackers; only if the job has some",
}
# Variables that the script exports when its attempt begins: for the blocks launch and finish.
ATTEMPT_VARIABLES = {
    "HPCDDP_ATTEMPT": "the number of the attempt, from 1",
    "MASTER_ADDR": "the host name of rank 0, with host_suffix",
    "MASTER_PORT": "a free port on that host, new in each attempt",
    "HPCDDP_DEADLINE": "the end of the time limit, in seconds since the epoch; 0 without one",
    "HPCDDP_RUN_DIR": "the run folder of this attempt; of an array element that of the element",
}
