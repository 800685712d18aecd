"""Checks the config, then starts torchrun on this node.

Trains a MoE:  [CONFIG_FILE=FILE.toml] [NGPU=N] ./run_train.sh [--section.key VALUE ...]

  ./run_train.sh
  CONFIG_FILE=train_configs/deepseek_v3_cpu.toml ./run_train.sh --training.steps 20 --uniep.backend reference

Environment variables, as in TorchTitan's own script:

  CONFIG_FILE   the TOML of the run; without it a Qwen3 MoE that suits the machine
  NGPU          ranks on this node; without it one per GPU, or 2 on CPUs
  LOG_RANK      local ranks whose output is shown, such as 0 or 0,1 (0)
  PYTORCH_ALLOC_CONF
                settings of torch's allocator (expandable_segments:True)
  NO_COLOR      lines without colours if set, as in a file anyway
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                several nodes: start the script on each; taken from SLURM's variables when present (one task per node)

Every argument overrides the TOML. `--keys` prints every key with its default and its meaning.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import recipes  # noqa: F401  prepares the platform
from recipes.checks import check_config
from recipes.load import ConfigError, has_argument, load_config
from recipes.records import FolderInUseError, lock_folder

DEFAULT_CONFIG_CPU = "./train_configs/qwen3_cpu.toml"
DEFAULT_CONFIG_GPU = "./train_configs/qwen3_debug.toml"
_SCONTROL_TIMEOUT_S = 60
# The settings of torch's allocator; the second is the older name.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Nodes:
    """This node among those of the run."""

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int


def find_nodes(env: Mapping[str, str]) -> Nodes:
    """The nodes of a run, from NNODES and its companions or else from SLURM.

    Raises:
        ConfigError: the variables do not describe one run over these nodes. Each node would else train alone.
    """
    if not env.get("NNODES") and _int(env, "SLURM_NNODES", 1) == 1 and _int(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        raise ConfigError(
            "SLURM must start one task per node (srun --ntasks-per-node=1), "
            f"got {env['SLURM_STEP_NUM_TASKS']} on 1 node"
        )
    from_slurm = not env.get("NNODES") and _int(env, "SLURM_NNODES", 1) > 1
    if from_slurm:
        num_nodes = _int(env, "SLURM_NNODES", 1)
        if (tasks := _int(env, "SLURM_NTASKS", num_nodes)) != num_nodes:
            raise ConfigError(
                f"SLURM must start one task per node (srun --ntasks-per-node=1), got {tasks} on {num_nodes} nodes"
            )
        node_rank = _int(env, "NODE_RANK", _int(env, "SLURM_NODEID", -1))
        master_addr = env.get("MASTER_ADDR") or _first_slurm_host(env)
    else:
        num_nodes = _int(env, "NNODES", 1)
        node_rank = _int(env, "NODE_RANK", 0 if num_nodes == 1 else -1)
        master_addr = env.get("MASTER_ADDR") or ("localhost" if num_nodes == 1 else "")
    if num_nodes < 1:
        raise ConfigError(f"NNODES must be at least 1, got {num_nodes}")
    if not 0 <= node_rank < num_nodes:
        shown = node_rank if node_rank >= 0 else "nothing"
        raise ConfigError(f"NODE_RANK must be 0 to {num_nodes - 1} for {num_nodes} nodes, got {shown}")
    if not master_addr:
        raise ConfigError(f"MASTER_ADDR must name the first of {num_nodes} nodes, got nothing")
    return Nodes(num_nodes, node_rank, master_addr, _int(env, "MASTER_PORT", 29500))


def torchrun_command(nodes: Nodes, ranks_per_node: int, log_rank: str, args: list[str]) -> list[str]:
    """The command that trains on this node."""
    if nodes.num_nodes == 1:
        # Any free port: several runs may share a machine.
        rendezvous = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    else:
        rendezvous = [
            f"--nnodes={nodes.num_nodes}",
            f"--node_rank={nodes.node_rank}",
            f"--master_addr={nodes.master_addr}",
            f"--master_port={nodes.master_port}",
        ]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks_per_node}", *rendezvous,
        f"--local-ranks-filter={log_rank}", "--role=rank", "--tee=3", "-m", "recipes.train", *args,
    ]  # fmt: skip


def main(args: list[str], env: Mapping[str, str] = os.environ) -> int:
    if "--help" in args or "-h" in args:
        print(__doc__.split("\n\n", 1)[1], end="")
        return 0
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        ranks_per_node = _int(env, "NGPU", num_gpus or 2)
        if ranks_per_node < 1 or (num_gpus and ranks_per_node > num_gpus):
            limit = f"1 to {num_gpus}, the GPUs of this node" if num_gpus else "at least 1"
            raise ConfigError(f"NGPU must be {limit}, got {ranks_per_node}")
        nodes = find_nodes(env)
        if not 1 <= nodes.master_port < 1 << 16:
            raise ConfigError(f"MASTER_PORT must be 1 to 65535, got {nodes.master_port}")
        log_rank = env.get("LOG_RANK") or "0"
        if not all(rank.isdecimal() and int(rank) < ranks_per_node for rank in log_rank.split(",")):
            raise ConfigError(
                f"LOG_RANK must be local ranks from 0 to {ranks_per_node - 1}, separated by commas, got {log_rank!r}"
            )
        world_size = nodes.num_nodes * ranks_per_node
        if not has_argument(args, "job.config_file"):
            args = [*_config_arguments(env, args, has_gpu=num_gpus > 0, world_size=world_size), *args]
        if "--keys" in args:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may stop early
            args = [*(arg for arg in args if arg != "--keys"), "--help"]
        config = load_config(args)
        check_config(config, world_size)
        _check_writable(config.job.dump_folder)
        if nodes.node_rank == 0:  # no rank holds the folder before the first node's have started
            lock_folder(config.job.dump_folder).close()
    except (ConfigError, FolderInUseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not num_gpus and "OMP_NUM_THREADS" not in env:
        env = {**env, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks_per_node))}
    if num_gpus and not any(name in env for name in ALLOCATOR_VARIABLES):
        # As TorchTitan's own script does: the number of rows changes from step to step, and with it what is allocated.
        env = {**env, ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}
    if "NO_COLOR" not in env and not sys.stdout.isatty():
        env = {**env, "NO_COLOR": "1"}  # the ranks write to torchrun and cannot tell
    command = torchrun_command(nodes, ranks_per_node, log_rank, args)
    where = f"{ranks_per_node} GPUs" if num_gpus else f"CPUs, {ranks_per_node} ranks (no GPU is visible)"
    print(f"Training {config.job.config_file} on {nodes.num_nodes} node(s), {where}", flush=True)
    os.execve(command[0], command, dict(env))
    raise AssertionError("unreachable")


def _check_writable(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f'[job] dump_folder must be a folder that can be written, got "{folder}": {error}') from None


def _config_arguments(env: Mapping[str, str], args: list[str], *, has_gpu: bool, world_size: int) -> list[str]:
    if env.get("CONFIG_FILE"):
        return ["--job.config_file", env["CONFIG_FILE"]]
    chosen = ["--job.config_file", DEFAULT_CONFIG_GPU if has_gpu else DEFAULT_CONFIG_CPU]
    if not has_argument(args, "parallelism.expert_parallel_degree"):
        # The default must train on any number of ranks.
        degree = next(degree for degree in (8, 4, 2, 1) if world_size % degree == 0)
        chosen += ["--parallelism.expert_parallel_degree", str(degree)]
    return chosen


def _first_slurm_host(env: Mapping[str, str]) -> str:
    # A step's ranks may run on some of the job's nodes only.
    name = "SLURM_STEP_NODELIST" if env.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    node_list = env.get(name, "")
    scontrol = shutil.which("scontrol", path=env.get("PATH"))
    if scontrol is None:
        raise ConfigError(
            "SLURM's variables are set but scontrol is not found, so the first node is unknown: set MASTER_ADDR, "
            "or NNODES=1 to train on this node alone"
        )
    command = [scontrol, "show", "hostnames", node_list]
    try:
        hosts = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"scontrol must resolve {name} within {_SCONTROL_TIMEOUT_S} s, got no answer for {node_list!r}"
        ) from None
    if hosts.returncode or not hosts.stdout.strip():
        raise ConfigError(f"scontrol must resolve {name}, got {node_list!r}: {hosts.stderr.strip()}")
    return hosts.stdout.split()[0]


def _int(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f'{name} must be a whole number, got "{value}"') from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
