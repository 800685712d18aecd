"""recipes.launch: the nodes of a run, the command for this one, and exit statuses."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes import launch
from recipes.launch import ConfigError, Nodes, find_nodes, torchrun_command
from recipes.records import lock_folder
from tests.processes import run_command
from tests.recipe.runs import ROOT, SHRINK

SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """scontrol(body): puts a script of this name alone on the PATH."""

    def install(body: str) -> None:
        script = tmp_path / "bin" / "scontrol"
        script.parent.mkdir()
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")

    return install


@pytest.fixture
def no_scontrol(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def slurm_env(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], **SLURM, **more}


def error_of(env: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        find_nodes(env)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_another_run_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    args = ["--job.config_file=train_configs/qwen3_cpu.toml", f"--job.dump_folder={tmp_path}"]
    with lock_folder(tmp_path):
        assert launch.main(args, {}) == 2
    error = capsys.readouterr().err
    assert error == (
        f'error: [job] dump_folder must be a folder that no other run writes at the same time, got "{tmp_path}"\n'
    )


def test_one_node_needs_no_variables():
    assert find_nodes({}) == Nodes(1, 0, "localhost", 29500)


def test_nodes_from_the_variables():
    env = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert find_nodes(env) == Nodes(4, 3, "10.0.0.1", 1234)
    assert find_nodes({**env, "MASTER_PORT": ""}) == Nodes(4, 3, "10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK must be 0 to 1 for 2 nodes, got nothing"),
        ({"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}, "NODE_RANK must be 0 to 1 for 2 nodes, got 2"),
        ({"NODE_RANK": "1"}, "NODE_RANK must be 0 to 0 for 1 nodes, got 1"),
        ({"NNODES": "2", "NODE_RANK": "1"}, "MASTER_ADDR must name the first of 2 nodes, got nothing"),
        ({"NNODES": "0"}, "NNODES must be at least 1, got 0"),
        ({"NNODES": "two"}, 'NNODES must be a whole number, got "two"'),
        ({"NNODES": "2", "NODE_RANK": "x", "MASTER_ADDR": "a"}, 'NODE_RANK must be a whole number, got "x"'),
        ({"MASTER_PORT": "http"}, 'MASTER_PORT must be a whole number, got "http"'),
    ],
)
def test_variables_that_describe_no_run(env, expected):
    assert error_of(env) == expected


def test_slurm_names_the_first_node(scontrol):
    scontrol('[ "$1 $2 $3" = "show hostnames gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"')
    assert find_nodes(slurm_env()) == Nodes(2, 1, "gpu07", 29500)


def test_slurm_names_the_first_node_of_a_step(scontrol):
    scontrol('[ "$1 $2 $3" = "show hostnames gpu08" ] && echo gpu08')
    assert find_nodes(slurm_env(SLURM_STEP_NODELIST="gpu08")) == Nodes(2, 1, "gpu08", 29500)


def test_slurm_without_scontrol_is_refused(no_scontrol):
    text = error_of(slurm_env())
    assert "scontrol is not found" in text
    assert "MASTER_ADDR" in text
    assert "NNODES=1" in text


def test_slurm_without_scontrol_but_with_a_master(no_scontrol):
    assert find_nodes(slurm_env(MASTER_ADDR="gpu07", MASTER_PORT="77")) == Nodes(2, 1, "gpu07", 77)


@pytest.mark.parametrize("body", ["echo no such host >&2; exit 1", "exit 0"])
def test_slurm_with_a_failing_scontrol_is_refused(scontrol, body):
    scontrol(body)
    text = error_of(slurm_env())
    assert "scontrol must resolve SLURM_JOB_NODELIST" in text
    assert "gpu[07-08]" in text


def test_a_silent_scontrol_is_not_waited_for(scontrol, monkeypatch):
    monkeypatch.setattr("recipes.launch._SCONTROL_TIMEOUT_S", 0.2)
    scontrol("exec sleep 30")
    assert "scontrol must resolve SLURM_JOB_NODELIST within 0.2 s, got no answer" in error_of(slurm_env())


def test_scontrol_is_run_from_the_path_of_the_given_environment(scontrol, monkeypatch):
    scontrol("echo gpu07")
    env = slurm_env()
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert find_nodes(env).master_addr == "gpu07"


def test_slurm_with_several_tasks_a_node_is_refused():
    text = error_of(slurm_env(SLURM_NTASKS="16", MASTER_ADDR="gpu07"))
    assert "SLURM must start one task per node" in text
    assert "got 16 on 2 nodes" in text


def test_slurm_without_a_node_id_is_refused():
    env = slurm_env(MASTER_ADDR="gpu07")
    del env["SLURM_NODEID"]
    assert "NODE_RANK must be 0 to 1 for 2 nodes, got nothing" in error_of(env)


def test_nnodes_goes_before_slurm(no_scontrol):
    assert find_nodes(slurm_env(NNODES="1")) == Nodes(1, 0, "localhost", 29500)


def test_slurm_on_one_node_needs_no_scontrol(no_scontrol):
    assert find_nodes({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}) == Nodes(1, 0, "localhost", 29500)


def test_empty_nnodes_is_as_good_as_none(no_scontrol):
    """Else each of SLURM's nodes would train alone."""
    assert "scontrol is not found" in error_of(slurm_env(NNODES=""))


def test_command_for_one_node():
    command = torchrun_command(Nodes(1, 0, "localhost", 29500), 4, "0,1", ["--training.steps", "3"])
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert "--nproc_per_node=4" in command
    assert "--rdzv_endpoint=localhost:0" in command
    assert not any(part.startswith("--nnodes") for part in command)
    assert "--local-ranks-filter=0,1" in command
    assert command[-4:] == ["-m", "recipes.train", "--training.steps", "3"]


def test_command_for_many_nodes():
    command = torchrun_command(Nodes(16, 5, "gpu07", 1234), 8, "0", [])
    for part in ("--nnodes=16", "--node_rank=5", "--master_addr=gpu07", "--master_port=1234", "--nproc_per_node=8"):
        assert part in command
    assert not any("rdzv" in part for part in command)


@pytest.fixture
def executed(tmp_path, monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """The command and the environment that main ends in, instead of running it; also a machine without GPUs.

    The configs' ./outputs lies in tmp_path.
    """
    calls: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, command: list[str], env: dict[str, str]) -> None:
        assert path == command[0]
        calls.append((command, env))
        raise SystemExit(0)

    monkeypatch.setattr(launch.os, "execve", execve)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    monkeypatch.chdir(tmp_path)
    return calls


def run_main(*args: str, **env: str) -> None:
    with pytest.raises(SystemExit):
        launch.main(list(args), env)


def test_main_checks_and_starts_torchrun(executed, capsys):
    run_main("--training.steps", "20", NGPU="2", LOG_RANK="1")
    ((command, env),) = executed
    assert "--nproc_per_node=2" in command
    assert "--local-ranks-filter=1" in command
    assert command[-2:] == ["--training.steps", "20"]
    assert command[command.index("--job.config_file") + 1] == "./train_configs/qwen3_cpu.toml"
    assert int(env["OMP_NUM_THREADS"]) == max(1, (os.cpu_count() or 1) // 2)
    assert "Training ./train_configs/qwen3_cpu.toml on 1 node(s), CPUs, 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("is_terminal", "given", "want"),
    [(True, {}, None), (False, {}, "1"), (False, {"NO_COLOR": ""}, ""), (True, {"NO_COLOR": "1"}, "1")],
)
def test_main_asks_for_no_colours_outside_a_terminal(executed, monkeypatch, is_terminal, given, want):
    monkeypatch.setattr(launch.sys.stdout, "isatty", lambda: is_terminal)
    run_main(**given)
    assert executed[0][1].get("NO_COLOR") == want


@pytest.mark.parametrize(
    "form", [["--job.config_file", "FILE"], ["--job.config-file=FILE"], ["--job.config_file=FILE"]]
)
@pytest.mark.parametrize("before", [[], ["--training.steps=3"]])
def test_main_takes_the_file_in_every_form(executed, capsys, form, before):
    file = "train_configs/deepseek_v3_cpu.toml"
    run_main(*before, *(part.replace("FILE", file) for part in form))
    assert f"Training {file} on 1 node(s)" in capsys.readouterr().out


def test_main_takes_the_file_from_the_environment(executed, capsys):
    run_main(CONFIG_FILE="train_configs/deepseek_v3_cpu.toml")
    assert "Training train_configs/deepseek_v3_cpu.toml" in capsys.readouterr().out


def test_an_argument_goes_before_config_file(executed, capsys):
    run_main("--job.config_file=train_configs/qwen3_cpu.toml", CONFIG_FILE="train_configs/deepseek_v3_cpu.toml")
    assert "Training train_configs/qwen3_cpu.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("num_ranks", "degree"), [("1", "1"), ("2", "2"), ("3", "1"), ("4", "4"), ("6", "2"), ("16", "8")]
)
def test_the_default_config_runs_on_any_number_of_ranks(executed, num_ranks, degree):
    run_main(NGPU=num_ranks)
    command, _ = executed[0]
    assert command[command.index("--parallelism.expert_parallel_degree") + 1] == degree


def test_threads_that_are_set_stay(executed):
    run_main(OMP_NUM_THREADS="7")
    assert executed[0][1]["OMP_NUM_THREADS"] == "7"


def test_on_gpus_the_allocators_segments_grow(executed, monkeypatch):
    """As TorchTitan's script starts it, unless the user has chosen under either name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    run_main()
    assert executed[0][1]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        run_main(**{name: "backend:native"})
        chosen = {key: value for key, value in executed[-1][1].items() if key.endswith("ALLOC_CONF")}
        assert chosen == {name: "backend:native"}


def test_the_world_is_checked_over_all_nodes(executed, capsys):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "gpu07", "NGPU": "2"}
    file = "--job.config_file=train_configs/qwen3_cpu.toml"
    run_main(file, "--parallelism.expert_parallel_degree=4", **nodes)
    assert "--nnodes=2" in executed[0][0]
    assert launch.main([file, "--parallelism.expert_parallel_degree=8"], nodes) == 2
    assert "must divide the ranks that share a replica = 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "env", "expected"),
    [
        (["--training.stepz=3"], {}, "--training.stepz is not a known key; did you mean --training.steps?"),
        ([], {"CONFIG_FILE": "train_configs/nothing.toml"}, "train_configs/nothing.toml"),
        ([], {"NGPU": "0"}, "NGPU must be at least 1, got 0"),
        ([], {"NGPU": "two"}, 'NGPU must be a whole number, got "two"'),
        ([], {"NNODES": "2"}, "NODE_RANK must be 0 to 1 for 2 nodes, got nothing"),
    ],
)
def test_bad_input_is_one_line_and_status_2(executed, capsys, args, env, expected):
    assert launch.main(args, env) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")
    assert not executed


def test_more_ranks_than_gpus_are_refused(executed, capsys, monkeypatch):
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 4)
    assert launch.main([], {"NGPU": "8"}) == 2
    assert "NGPU must be 1 to 4, the GPUs of this node, got 8" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(executed, capsys, flag):
    assert launch.main([flag], {}) == 0
    said = capsys.readouterr().out
    for word in ("CONFIG_FILE", "NGPU", "LOG_RANK", "NNODES", "MASTER_ADDR", "SLURM"):
        assert word in said


def test_keys_lists_our_keys_too(executed, capsys):
    run_main("--keys")
    said = capsys.readouterr().out
    assert "--uniep.backend" in said
    assert "--model.n-layers" in said or "--model.n_layers" in said


def print_keys_to_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.chdir(ROOT)
    launch.main(["--keys"], {})


def test_a_reader_of_the_keys_may_stop_early():
    """As any command line, it then ends by SIGPIPE."""
    process = multiprocessing.get_context("forkserver").Process(target=print_keys_to_nobody)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGPIPE


def test_a_failing_rank_makes_the_exit_status(tmp_path: Path):
    (tmp_path / ".metadata").write_text("damaged, which only the ranks find")
    command = [sys.executable, "-m", "recipes.launch", f"--job.dump_folder={tmp_path}/run", "--metrics.no_enable_wandb"]
    command += ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}", "--training.steps=1", *SHRINK]
    kept = {name: value for name, value in os.environ.items() if name not in ("NNODES", "CONFIG_FILE", "SLURM_NNODES")}
    done = run_command(command, env={**kept, "NGPU": "2"}, timeout_s=120.0)
    assert "Training " in done.stdout, done.stderr
    assert done.returncode not in (0, 2)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LOG_RANK": "abc"}, "LOG_RANK must be local ranks from 0 to 1"),
        ({"LOG_RANK": "0,2"}, "LOG_RANK must be local ranks from 0 to 1"),
        ({"MASTER_PORT": "99999999"}, "MASTER_PORT must be 1 to 65535"),
    ],
)
def test_wrong_variables(env, expected, capsys):
    assert launch.main([], {"NGPU": "2", **env}) == 2
    assert expected in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert launch.main([f"--job.dump_folder={tmp_path}/file/run"], {"NGPU": "2"}) == 2
    assert "[job] dump_folder must be a folder that can be written" in capsys.readouterr().err
