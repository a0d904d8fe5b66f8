from hpcddp.slurm import environment


def test_a_surrounding_job_leaves_nothing_in_the_environment() -> None:
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "RANKS": "1", "HPCDDP_RUNS": "/r",
            "OMPI_MCA_btl_tcp_if_include": "ib0", "PMIX_MCA_gds": "hash"}  # fmt: skip
    left = dict.fromkeys(
        (
            "SLURM_CPU_BIND", "SLURM_JOB_ID", "SBATCH_EXCLUSIVE", "SRUN_DEBUG", "PMI_RANK",
            "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess",
            "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK",
            "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR",
            "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT",
        ),
        "1",
    )  # fmt: skip
    assert environment.clean({**kept, **left}) == kept
