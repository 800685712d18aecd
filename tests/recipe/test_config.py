"""recipes.load and recipes.checks: every bad input is one line that names the key, the rule and the value."""

import re
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from recipes import backend as backend_module
from recipes.checks import check_config
from recipes.config import Tune, UniEP
from recipes.load import ConfigError, load_config
from recipes.parallelize import _max_tokens
from tests.recipe.runs import ROOT, TOKENIZER
from uniep.autotune.hardware import TILES, shipped
from uniep.kernels.config import KernelConfig
from uniep.numerics import Numerics
from uniep.shapes import MoEShape
from uniep.symmetric.heap import HeapError, MissingPeerError

CONFIGS = ROOT / "train_configs"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def check(*overrides: str, config: str | Path = "train_configs/qwen3_cpu.toml", num_ranks: int = 2) -> Any:
    job = load_config([f"--job.config_file={config}", *overrides])
    check_config(job, num_ranks)
    return job


def says(*overrides: str, **kwargs: Any) -> str:
    """The error of a config that cannot run."""
    with pytest.raises(ConfigError) as caught:
        check(*overrides, **kwargs)
    text = str(caught.value)
    assert "\n" not in text.strip(), text
    return text


@pytest.fixture
def edited(tmp_path):
    """edited(old, new): a copy of qwen3_cpu.toml with one line changed."""

    def edit(old: str, new: str) -> Path:
        text = (CONFIGS / "qwen3_cpu.toml").read_text()
        assert text.count(old) == 1, old
        path = tmp_path / "edited.toml"
        path.write_text(text.replace(old, new))
        return path

    return edit


class Gpu:
    """What torch.cuda.get_device_properties says of one."""

    multi_processor_count = 132

    def __init__(self, name: str = "NVIDIA H200", major: int = 9):
        self.name, self.major = name, major


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(): this machine has an H200, or the given GPU."""

    def on(gpu: Gpu | None = None) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu or Gpu())

    return on


# Ranks that a config is meant for, from its first line.
INTENDED_RANKS = {
    "qwen3_cpu": 2,
    "deepseek_v3_cpu": 2,
    "qwen3_debug": 2,
    "deepseek_v3_debug": 2,
    "qwen3_30b_a3b_8layers": 2,
    "qwen3_30b_a3b": 8,
    "qwen3_235b_a22b": 128,
    "deepseek_v3_671b": 128,
    "kimi_k2": 256,
}


def test_every_config_is_listed():
    assert {path.stem for path in CONFIGS.glob("*.toml")} == INTENDED_RANKS.keys()


@pytest.mark.parametrize("name", INTENDED_RANKS)
def test_every_config_passes_for_its_ranks(name):
    overrides = []
    text = (CONFIGS / f"{name}.toml").read_text()
    if "./assets/hf/" in text:
        overrides.append(f"--model.hf_assets_path={TOKENIZER}")  # the real one is the user's to fetch
    job = check(*overrides, config=CONFIGS / f"{name}.toml", num_ranks=INTENDED_RANKS[name])
    assert job.uniep.backend == "auto"
    assert job.job.custom_config_module == "recipes.config"
    assert job.experimental.custom_import == "recipes.families"


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3_671b", "kimi_k2"])
@pytest.mark.parametrize("backend", ["torchtitan", "uniep"])
def test_large_configs_pass_on_gpus(name, backend, on_gpu):
    on_gpu()
    overrides = [f"--model.hf_assets_path={TOKENIZER}", f"--uniep.backend={backend}"]
    check(*overrides, config=CONFIGS / f"{name}.toml", num_ranks=INTENDED_RANKS[name])


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("[parallelism] expert_paralel_degree", "expert_parallel_degree"),
        ("[training] seq_length", "seq_len"),
        ("[uniep] backnd", "backend"),
        ("[model] n_layer", "n_layers"),
        ("[activation_checkpoint] mod", "mode"),
    ],
)
def test_misspelt_key_in_the_toml(key, near, tmp_path):
    section, name = re.fullmatch(r"\[(\w+)\] (\w+)", key).groups()
    path = tmp_path / "run.toml"
    path.write_text(f"[{section}]\n{name} = 1\n")
    text = says(config=path)
    assert f"{key} is not a known key" in text
    assert f"did you mean {near}?" in text
    assert str(path) in text


def test_key_without_a_neighbour_lists_the_known_ones(edited):
    text = says(config=edited('backend = "auto"', "zzz = 3"))
    assert "[uniep] zzz is not a known key; it has backend" in text


def test_misspelt_key_in_a_nested_section(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training.dataloader]\nnum_worker = 2\n")
    assert "[training.dataloader] num_worker is not a known key; did you mean num_workers?" in says(config=path)


@pytest.mark.parametrize(
    ("section", "near"), [("unipe", "uniep"), ("traning", "training"), ("parallelisms", "parallelism")]
)
def test_misspelt_section(section, near, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"[{section}]\nkey = 1\n")
    assert f"[{section}] is not a known section; did you mean {near}?" in says(config=path)


def test_a_token_budget(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[throughput]\ntoken_budget = 1e12\n")
    assert load_config([f"--job.config_file={path}"]).throughput.token_budget == 1e12
    path.write_text('[throughput]\ntoken_budget = "1T"\n')
    assert "[throughput] token_budget must be a number, got '1T'" in says(config=path)
    path.write_text("[throughput]\ntokens_budget = 1e12\n")
    assert "[throughput] tokens_budget is not a known key; did you mean token_budget?" in says(config=path)


def test_section_that_is_a_value(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('uniep = "reference"\n')
    assert "[uniep] must be a section, got 'reference'" in says(config=path)


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("--training.stepz=3", "--training.steps"),
        ("--parallelism.expert-paralel-degree=2", "--parallelism.expert_parallel_degree"),
        ("--uniep.backnd=reference", "--uniep.backend"),
        ("--unipe.backend=reference", "--uniep.backend"),
        ("--model.n_layer=1", "--model.n_layers"),
        ("--metrics.no_enable_wandbb", "--metrics.enable_wandb"),
    ],
)
def test_misspelt_argument(argument, near):
    text = says(argument)
    assert "is not a known key" in text
    assert f"did you mean {near}?" in text


def test_argument_apart_from_its_value():
    assert "did you mean --training.steps?" in says("--training.stepz", "3")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps = 400", 'steps = "400"', "[training] steps must be a whole number, got '400'"),
        ("steps = 400", "steps = 400.5", "[training] steps must be a whole number, got 400.5"),
        ("steps = 400", "steps = true", "[training] steps must be a whole number, got True"),
        ("lr = 4e-3", 'lr = "fast"', "[optimizer] lr must be a number, got 'fast'"),
        ("deterministic = true", "deterministic = 1", "[debug] deterministic must be true or false, got 1"),
        ('name = "qwen3"', "name = 3", "[model] name must be a string, got 3"),
        ('mode = "none"', 'mode = "some"', '[activation_checkpoint] mode must be one of "selective", "full"'),
        ('backend = "auto"', 'backend = "fused"', '[uniep] backend must be one of "auto", "uniep", "reference"'),
        ('flavor = "cpu"', 'flavor = "cpu"\nn_layers = "2"', "[model] n_layers must be a whole number, got '2'"),
        (
            'flavor = "cpu"',
            'flavor = "cpu"\nconverters = "a"',
            "[model] converters must be a list, each a string, got 'a'",
        ),
    ],
)
def test_wrong_value_in_the_toml(edited, old, new, expected):
    path = edited(old, new)
    text = says(config=path)
    assert expected in text
    assert str(path) in text


def test_whole_numbers_are_numbers(edited):
    assert check(config=edited("lr = 4e-3", "lr = 1")).optimizer.lr == 1


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--training.steps=abc", "--training.steps must be a whole number, got 'abc'"),
        ("--training.steps=1.5", "--training.steps must be a whole number, got '1.5'"),
        ("--optimizer.lr=high", "--optimizer.lr must be a number, got 'high'"),
        ("--uniep.backend=fused", '--uniep.backend must be one of "auto", "uniep", "reference", "torchtitan", got'),
        ("--activation_checkpoint.mode=some", "--activation_checkpoint.mode must be one of"),
        ("--training.steps", "--training.steps must be a whole number, got ''"),
    ],
)
def test_wrong_value_on_the_command_line(argument, expected):
    assert expected in says(argument)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("stray",), "arguments must be --section.key VALUE or --section.key=VALUE, got 'stray'"),
        (("--",), "arguments must be --section.key VALUE or --section.key=VALUE, got '--'"),
        (("--checkpoint.enable=true",), "write --checkpoint.enable for true, --checkpoint.no_enable for false"),
        (("--checkpoint.enable", "true"), "got 'true'"),
        (("--optimizer.lr=nan",), "[optimizer] lr must be a finite number of at least 0, got nan"),
        (("--optimizer.name=Foo",), "[optimizer] name must be"),
        (("--lr_scheduler.decay_ratio=7",), "[lr_scheduler] decay_ratio must be 0 to 1, got 7.0"),
        (("--checkpoint.interval=0",), "[checkpoint] interval must be at least 1, got 0"),
        (("--debug.seed=-1",), "[debug] seed must be 0 to 2^63 - 1, got -1"),
        (("--uniep.timeline_steps", "3", "0"), "[uniep] timeline_steps must be steps from 1 on, got [3, 0]"),
        (("--uniep.timeline_steps", "x"), "--uniep.timeline_steps must be a list, each a whole number, got 'x'"),
        (("--training.steps", "5", "6"), "arguments must be --section.key VALUE or --section.key=VALUE, got '6'"),
        (
            ("--uniep.backend=reference", "--uniep.timeline_steps", "10", "20"),
            '[uniep] timeline_steps must be empty with [uniep] backend = "reference", whose kernels record nothing, '
            "got [10, 20]",
        ),
        (("--training.dataset_path=/nope",), 'dataset_path is read with dataset = "local", got dataset = "stdlib"'),
    ],
)
def test_wrong_command_line(arguments, expected):
    assert expected in says(*arguments)


@pytest.mark.parametrize(
    "argument", ["--model.n_layers=1", "--model.n_layers=None", "--debug.seed=7", "--optimizer.lr=1"]
)
def test_right_value_on_the_command_line(argument):
    check(argument)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("--uniep.timeline_steps", "3", "x"),
            "--uniep.timeline_steps must be a list, each a whole number, got 'x'",
        ),
        (("--training.no_steps",), "--training.no_steps is not a known key; did you mean --training.steps?"),
        (("--optimizer.no-lr", "3"), "--optimizer.no_lr is not a known key; did you mean --optimizer.lr?"),
    ],
)
def test_arguments_that_no_key_takes(arguments, expected):
    assert says(*arguments) == expected


def test_a_toml_that_begins_with_a_mark(tmp_path):
    text = (CONFIGS / "qwen3_cpu.toml").read_text()
    (tmp_path / "mark.toml").write_text(text, encoding="utf-8-sig")
    job = check("--training.steps=7", config=tmp_path / "mark.toml")
    assert (job.model.flavor, job.training.steps) == ("cpu", 7)


def test_timeline_steps_of_the_fused_kernels(edited, on_gpu):
    on_gpu()
    path = edited('backend = "auto"', 'backend = "uniep"\ntimeline_steps = [10, 20]')
    assert check("--training.mixed_precision_param=bfloat16", config=path).uniep.timeline_steps == [10, 20]
    assert "timeline_steps must be a list, each a whole number" in says(
        config=edited('backend = "auto"', "timeline_steps = 3")
    )


def test_missing_file():
    text = says(config="train_configs/qwen3_cpo.toml")
    assert "--job.config_file must be a TOML file" in text
    assert '"train_configs/qwen3_cpo.toml"' in text
    assert "did you mean train_configs/qwen3_cpu.toml?" in text


def test_missing_file_in_a_missing_folder():
    assert 'got "no/such/folder.toml", which does not exist' in says(config="no/such/folder.toml")


def test_folder_instead_of_a_file():
    assert "--job.config_file must be a TOML file" in says(config="train_configs")


@pytest.mark.parametrize("text", ["[training\nsteps = 1", "steps = ", "[a]\nb = 1\nb = 2", "steps 3"])
def test_broken_toml(text, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    said = says(config=path)
    assert f"{path} must be valid TOML" in said
    assert re.search(r"\(at (line \d|end of document)", said)


def test_file_that_is_no_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "--job.config_file must be readable" in says(config=path)


def test_arguments_override_the_toml():
    job = check(
        "--training.steps", "7", "--optimizer.lr=0.5", "--metrics.no-enable-wandb", "--uniep.backend", "reference"
    )
    assert (job.training.steps, job.optimizer.lr, job.metrics.enable_wandb) == (7, 0.5, False)
    assert job.uniep.backend == "reference"


def test_our_modules_stay_when_the_toml_names_them(edited):
    path = edited("[model]", '[experimental]\ncustom_import = "recipes.families"\n\n[model]')
    assert check(config=path).experimental.custom_import == "recipes.families"


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "expected"),
    [
        # E not divisible by EP.
        (["--parallelism.expert_parallel_degree=3"], 3, ["expert_parallel_degree must divide the 8 experts", "got 3"]),
        (
            ["--parallelism.expert_parallel_degree=16"],
            16,
            ["expert_parallel_degree must divide the 8 experts", "got 16"],
        ),
        (
            ["--model.flavor=30B-A3B", "--parallelism.expert_parallel_degree=6"],
            6,
            ['must divide the 128 experts of [model] flavor = "30B-A3B"', "got 6"],
        ),
        # EP not dividing the ranks.
        (
            ["--parallelism.expert_parallel_degree=4"],
            2,
            ["expert_parallel_degree must divide the ranks", "= 2", "got 4"],
        ),
        (
            ["--parallelism.expert_parallel_degree=4"],
            6,
            ["expert_parallel_degree must divide the ranks", "= 6", "got 4"],
        ),
        (
            ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.expert_parallel_degree=4"],
            4,
            ["expert_parallel_degree must divide the ranks that share a replica = 2 (of 4", "got 4"],
        ),
        # Degrees that are none.
        (["--parallelism.expert_parallel_degree=0"], 2, ["expert_parallel_degree must be at least 1, got 0"]),
        (["--parallelism.tensor_parallel_degree=-1"], 2, ["tensor_parallel_degree must be at least 1, got -1"]),
        (["--parallelism.data_parallel_shard_degree=0"], 2, ["data_parallel_shard_degree must be at least 1, got 0"]),
        # Degrees that do not multiply to the ranks.
        (["--parallelism.data_parallel_shard_degree=3"], 4, ["number of ranks = 4", "got 3"]),
        (["--parallelism.tensor_parallel_degree=4"], 2, ["number of ranks = 2", "got 4"]),
        # TP with EP.
        (["--parallelism.tensor_parallel_degree=2"], 4, ["tensor_parallel_degree must be 1", "got 2", "reference"]),
    ],
)
def test_parallel_degrees(overrides, num_ranks, expected):
    text = says(*overrides, num_ranks=num_ranks)
    assert text.startswith("[parallelism] ")
    for part in expected:
        assert part in text


def test_sequence_that_tensor_parallel_ranks_cannot_share():
    text = says("--training.seq_len=127", "--parallelism.tensor_parallel_degree=2", num_ranks=4)
    assert "[training] seq_len must be divisible by" in text
    assert "got 127" in text


def test_expert_tensor_parallel_without_tensor_parallel():
    """TorchTitan asserts it only when it builds its meshes."""
    text = says("--parallelism.expert_tensor_parallel_degree=2", num_ranks=4)
    assert "[parallelism] expert_tensor_parallel_degree must be" in text
    assert "got 2" in text


@pytest.mark.parametrize("key", ["seq_len", "local_batch_size", "steps"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_of_training(key, value):
    text = says(f"--training.{key}={value}")
    assert f"[training] {key} must be " in text
    assert text.endswith(f"got {value}")


def test_global_batch_that_is_no_multiple():
    text = says("--training.global_batch_size=24", "--training.local_batch_size=8")
    assert "[training] global_batch_size must be -1 or a multiple of" in text
    assert "8 * 2, got 24" in text
    check("--training.global_batch_size=32", "--training.local_batch_size=8")


def test_global_batch_of_none():
    """-1 stands for one microbatch a step; 0 is what TorchTitan asserts against when the model stands."""
    text = says("--training.global_batch_size=0")
    assert "[training] global_batch_size must be" in text
    assert "got 0" in text


def test_model_that_is_not_ours():
    text = says("--model.name=qwen")
    assert '[model] name must be one of qwen3, deepseek_v3, got "qwen"; did you mean qwen3?' in text


def test_flavor_that_is_none():
    text = says("--model.flavor=30B-A3")
    assert '[model] flavor must be one of debugmodel_moe, 30B-A3B, 235B-A22B, cpu for name = "qwen3"' in text
    assert 'got "30B-A3"; did you mean 30B-A3B?' in text


def test_flavor_without_experts():
    assert "[model] flavor must be one of" in says("--model.flavor=0.6B")


@pytest.mark.parametrize("n_layers", [0, 3, -1])
def test_layers_that_the_flavor_lacks(n_layers):
    assert f'[model] n_layers must be 1 to 2 for flavor "cpu", got {n_layers}' in says(f"--model.n_layers={n_layers}")


@pytest.mark.parametrize("path", ["/no/such/folder", "train_configs", "train_configs/qwen3_cpu.toml"])
def test_folder_without_a_tokenizer(path):
    text = says(f"--model.hf_assets_path={path}")
    assert "[model] hf_assets_path must be a folder with a tokenizer" in text
    assert f'got "{path}"' in text


@pytest.mark.parametrize("backend", ["torchtitan", "uniep"])
def test_backend_that_this_machine_cannot_run(backend, monkeypatch):
    monkeypatch.setattr(backend_module.torch.cuda, "is_available", lambda: False)
    text = says(f"--uniep.backend={backend}")
    assert '[uniep] backend must be "auto" or "reference"' in text
    assert f'got "{backend}"' in text


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backend_that_this_machine_runs(backend, monkeypatch):
    monkeypatch.setattr(backend_module.torch.cuda, "is_available", lambda: False)
    check(f"--uniep.backend={backend}")


@pytest.mark.parametrize(("backend", "ran"), [("auto", "reference"), ("reference", "reference")])
def test_fast_numerics_are_refused_where_no_fused_kernel_runs(backend, ran, monkeypatch):
    monkeypatch.setattr(backend_module.torch.cuda, "is_available", lambda: False)
    text = says(f"--uniep.backend={backend}", "--uniep.numerics=fast")
    assert f'[uniep] numerics must be "bitwise" where backend "{ran}" runs, got "fast"' in text


@pytest.mark.parametrize("numerics", [None, "bitwise", "fast"])
def test_numerics_are_fast_by_name_only(numerics, on_gpu):
    on_gpu()
    overrides = ["--uniep.backend=uniep", "--training.mixed_precision_param=bfloat16"]
    job = check(*overrides, *([f"--uniep.numerics={numerics}"] if numerics else []))
    assert job.uniep.numerics == (numerics or "bitwise")


def test_a_rank_that_does_not_come_is_not_awaited_in_another_memory(monkeypatch):
    def open_after(error):
        monkeypatch.setattr(backend_module, "open_nvshmem", Mock(side_effect=error))
        return backend_module.open_heap(None, "group", torch.device("cpu"), UniEP())

    monkeypatch.setattr(backend_module, "open_torch_symmetric", lambda *_, **__: "heap")
    assert open_after(HeapError("no nvshmem4py")) == ("heap", "torch")
    with pytest.raises(MissingPeerError, match="rank 1"):
        open_after(MissingPeerError("rank 1"))


@pytest.mark.parametrize(("numerics", "fast"), [("bitwise", False), ("fast", True)])
def test_numerics_reach_the_layer_and_the_record(numerics, fast, monkeypatch):
    given = {}
    heap = types.SimpleNamespace(check=lambda: None, close=lambda: None)
    monkeypatch.setattr(backend_module, "open_heap", lambda *_: (heap, "none"))
    monkeypatch.setattr(backend_module, "default_config", lambda _: KernelConfig(num_programs=1))
    monkeypatch.setattr(backend_module, "fused_moe", lambda **options: given.update(options))
    monkeypatch.setattr(backend_module.torch.cuda, "current_device", lambda: 0)
    shape = MoEShape(8, 2, 64, 64)
    options = UniEP(numerics=numerics, tune=Tune(mode="off"))
    backend = backend_module.open_backend(
        "uniep", shape, max_tokens=4, ep_mesh=None, options=options, score_before_experts=True, compiled=True
    )
    backend.run()
    assert given["numerics"] == Numerics(score_before_experts=True, compiled=True, fast=fast)
    assert backend.facts["numerics"] == numerics


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--training.dataset=stdlb"], ["[training] dataset must be one of", "stdlib", 'got "stdlb"']),
        (["--training.dataset=local"], ['[training] dataset_path must name text files for dataset = "local"']),
        (
            ["--training.dataset=local", "--training.dataset_path=/no/such"],
            ["[training] dataset_path", 'got "/no/such"'],
        ),
    ],
)
def test_data_that_is_not_there(overrides, expected):
    text = says(*overrides)
    for part in expected:
        assert part in text


def test_data_without_text(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n\n")
    text = says("--training.dataset=local", f"--training.dataset_path={tmp_path}/empty.txt")
    assert "[training] dataset_path must hold text" in text
    assert f"{tmp_path}/empty.txt" in text


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--optimizer.weight_decay=-1", "[optimizer] weight_decay must be a finite number of at least 0, got -1.0"),
        ("--optimizer.weight_decay=nan", "[optimizer] weight_decay must be a finite number of at least 0, got nan"),
        ("--optimizer.beta1=1", "[optimizer] beta1 must be at least 0 and less than 1, got 1.0"),
        ("--optimizer.beta2=-0.5", "[optimizer] beta2 must be at least 0 and less than 1, got -0.5"),
        ("--optimizer.eps=0", "[optimizer] eps must be a finite number greater than 0, got 0.0"),
        ("--checkpoint.keep_latest_k=1", "[checkpoint] keep_latest_k must be 0, for all, or at least 2, got 1"),
        ("--training.gc_freq=0", "[training] gc_freq must be at least 1, got 0"),
        ("--training.local_batch_size=99999999999", "[training] local_batch_size must be 1 to 2^24, got 99999999999"),
        ("--comm.init_timeout_seconds=0", "[comm] init_timeout_seconds must be at least 1, got 0"),
        ("--comm.train_timeout_seconds=-1", "[comm] train_timeout_seconds must be at least 1, got -1"),
        ("--profiling.profile_freq=0", "[profiling] profile_freq must be at least 1, got 0"),
        ("--profiling.profile_freq=3", "[profiling] profile_freq must be at least profiler_warmup + profiler_active"),
        ("--checkpoint.load_step=7", "[checkpoint] load_step must be -1, for the last, or a step of"),
        ("--training.dataloader.num_workers=2", "[training.dataloader] num_workers must be 0 or 1, "),
        ("--uniep.tune.up.num_relay=-1", "[uniep.tune.up] num_relay must be at least 1, got -1"),
        ("--uniep.tune.up_grad.num_combine=0", "[uniep.tune.up_grad] num_combine must be at least 1, got 0"),
        ("--experimental.custom_import=no.such", "[experimental] custom_import must be a module that can be imported"),
        ("--job.custom_config_module=no.such", "[job] custom_config_module must be a module with a JobConfig"),
        ("--job.custom_config_module=json", "[job] custom_config_module must be a module with a JobConfig"),
        ("--model.converters=flaot8", "[model] converters must be of quantize.linear.float8, "),
        ("--training.dataset=c4_test", "[training] dataset must be one of c4, c4_validation, local, stdlib, got"),
    ],
)
def test_values_that_would_end_or_spoil_a_run(argument, expected):
    assert says("--profiling.enable_profiling", "--checkpoint.enable", argument).startswith(expected)


def test_a_step_that_is_loaded(tmp_path):
    (tmp_path / "checkpoint" / "step-7").mkdir(parents=True)
    check("--checkpoint.enable", "--checkpoint.load_step=7", f"--job.dump_folder={tmp_path}")


def test_context_parallel_ranks_on_cpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = says("--parallelism.context_parallel_degree=2")
    assert text.startswith("[parallelism] context_parallel_degree must be 1 on CPUs")


def test_timeline_steps_behind_the_last(on_gpu):
    on_gpu()
    text = says(BF16, "--uniep.backend=uniep", "--training.steps=5", "--uniep.timeline_steps", "5", "6")
    assert text == "[uniep] timeline_steps must be steps up to [training] steps = 5, got 6"


def test_misspelt_dataset_names_the_nearest():
    assert "did you mean stdlib?" in says("--training.dataset=stdlb")


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (
            ("--throughput.token_budget=0",),
            {},
            "[throughput] token_budget must be 1 to 1e18, got 0.0",
        ),
        (
            ("--throughput.token_budget=inf",),
            {},
            "[throughput] token_budget must be 1 to 1e18, got inf",
        ),
        (("--uniep.wait_timeout_s=0",), {}, "[uniep] wait_timeout_s must be 0.001 to 1e6, got 0.0"),
        ((), {}, '[training] mixed_precision_param must be "bfloat16" with [uniep] backend = "uniep", got "float32"'),
        (
            ("--training.mixed_precision_param=bfloat16",),
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            "CUDA_DEVICE_MAX_CONNECTIONS must be unset or at least 2",
        ),
    ],
)
def test_what_the_fused_kernels_need(arguments, env, expected, on_gpu, monkeypatch):
    on_gpu()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert expected in says("--uniep.backend=uniep", *arguments)


WITHOUT_FSDP = '[uniep] backend must be "auto", "reference" or "torchtitan" without FSDP'


@pytest.mark.parametrize(
    ("config", "arguments", "num_ranks", "expected"),
    [
        ("qwen3_debug", [], 2, None),
        ("qwen3_debug", [], 1, WITHOUT_FSDP),
        ("qwen3_debug", ["--training.dtype=bfloat16"], 1, WITHOUT_FSDP),
        ("qwen3_debug", ["--parallelism.data_parallel_replicate_degree=2"], 2, WITHOUT_FSDP),
        (
            "qwen3_debug",
            ["--training.mixed_precision_param=float32"],
            2,
            '[training] mixed_precision_param must be "bfloat16" with [uniep] backend = "uniep", got "float32"',
        ),
        (
            "deepseek_v3_debug",
            ["--parallelism.pipeline_parallel_degree=2"],
            2,
            '[training] dtype must be "bfloat16" with [uniep] backend = "uniep" in pipeline stages without FSDP',
        ),
        ("deepseek_v3_debug", ["--parallelism.pipeline_parallel_degree=2", "--training.dtype=bfloat16"], 2, None),
    ],
)
def test_auto_takes_the_reference_where_the_tokens_are_not_bf16(config, arguments, num_ranks, expected, on_gpu):
    on_gpu()
    options = {"config": f"train_configs/{config}.toml", "num_ranks": num_ranks}
    arguments = ["--parallelism.expert_parallel_degree=1", *arguments]
    job = check(*arguments, **options)
    assert backend_module.resolve_backend(job, num_ranks) == ("reference" if expected else "uniep")
    if expected:
        assert says("--uniep.backend=uniep", *arguments, **options).startswith(expected)
    else:
        check("--uniep.backend=uniep", *arguments, **options)


@pytest.mark.parametrize("backend", ["uniep", "reference"])
def test_no_block_of_ours_runs_beside_a_backward(backend, on_gpu):
    on_gpu()
    pipelined = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=2"]
    pipelined += ["--parallelism.pipeline_parallel_schedule=DualPipeV", f"--uniep.backend={backend}"]
    options = {"config": "train_configs/deepseek_v3_debug.toml", "num_ranks": 4}
    assert says(*pipelined, **options).startswith(
        "[parallelism] pipeline_parallel_expert_parallel_overlap must be false with pipeline_parallel_schedule = "
        f'"DualPipeV" and [uniep] backend = "{backend}"'
    )
    check(*pipelined, "--parallelism.no-pipeline_parallel_expert_parallel_overlap", **options)


def test_quantized_experts_are_stocks(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    text = says("--model.converters=quantize.grouped_mm.mx")
    assert text.startswith("[model] converters must not quantize grouped_mm with [uniep] backend")


def test_a_model_keeps_a_moe_layer():
    config = {"config": "train_configs/deepseek_v3_cpu.toml"}
    assert says("--model.n_layers=1", **config).startswith("[model] n_layers must be 2 to ")
    check("--model.n_layers=2", **config)


def tune_section(text: str, folder: Path) -> Path:
    """A config that runs "uniep", with a [uniep.tune] section."""
    config = (CONFIGS / "qwen3_cpu.toml").read_text().replace('backend = "auto"', 'backend = "uniep"')
    assert '"uniep"' in config
    path = folder / "tuned.toml"
    path.write_text(config + text)
    return path


BF16 = "--training.mixed_precision_param=bfloat16"


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[uniep.tune]\nmode = "model"\n',
        '[uniep.tune]\nmode = "measured"\nbucket_tokens = 2048\ncache = "/tmp"\n',
        '[uniep.tune]\nmode = "off"\n[uniep.tune.up]\nnum_relay = 40\n',
        '[uniep.tune]\nmode = "model"\n[uniep.tune.up]\ntile = "wide4"\nnum_dispatch = 8\nnum_relay = 40\n',
        '[uniep.tune.down]\ntile = "narrow"\nnum_combine = 263\n',
    ],
)
def test_tuning_that_works(text, tmp_path, on_gpu):
    on_gpu(Gpu())
    check(BF16, config=tune_section(text, tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[uniep.tune]\nmode = "modle"', "[uniep.tune] mode must be one of"),
        ("[uniep.tune]\nbucket_token = 3", "[uniep.tune] bucket_token is not a known key; did you mean bucket_tokens?"),
        ("[uniep.tune]\nbucket_tokens = 0", "[uniep.tune] bucket_tokens must be 1 to 2^24, got 0"),
        ("[uniep.tune]\nnum_candidates = 0", "[uniep.tune] num_candidates must be at least 1, got 0"),
        ("[uniep.tune]\nwatch_calls = -1", "[uniep.tune] watch_calls must be at least 0, got -1"),
        ("[uniep.tune]\nwatch_share = 0.0", "[uniep.tune] watch_share must be greater than 0, got 0.0"),
        ("[uniep.tune]\nwatch_samples = 0", "[uniep.tune] watch_samples must be 1 to 1e6, got 0"),
        ('[uniep.tune.up]\ntile = "huge"', "[uniep.tune.up] tile must be one of"),
        ("[uniep.tune.up]\nnum_dispatch = 0", "[uniep.tune.up] num_dispatch must be at least 1, got 0"),
        (
            '[uniep.tune]\nmode = "off"\n[uniep.tune.up]\nnum_dispatch = 100\nnum_relay = 32',
            "[uniep.tune.up] num_dispatch + num_relay must be less than the programs of the launch = 132 "
            "(multiprocessors * programs on each), got 100 + 32",
        ),
        (
            '[uniep.tune]\nmode = "off"\n[uniep.tune.down_grad]\nnum_relay = 240',
            "[uniep.tune.down_grad] num_dispatch + num_relay must be less than the programs of the launch = 264 "
            "(multiprocessors * programs on each), got 24 + 240",
        ),
        (
            '[uniep.tune]\nmode = "off"\n[uniep.tune.up_grad]\nnum_combine = 264',
            "[uniep.tune.up_grad] num_combine must be less than the programs of the launch = 264",
        ),
        (
            "[uniep.tune.up]\nnum_relay = 40",
            '[uniep.tune.up] tile must be given with num_relay, or neither, unless [uniep.tune] mode is "off", '
            'got none with mode = "auto"',
        ),
        (
            '[uniep.tune]\nmode = "model"\nhardware = "/none.json"',
            "[uniep.tune] hardware: /none.json must be a hardware file of tools.calibrate",
        ),
    ],
)
def test_tuning_that_cannot_work(text, expected, tmp_path, on_gpu):
    on_gpu(Gpu())
    assert expected in says(BF16, config=tune_section(text + "\n", tmp_path))


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (Gpu("NVIDIA H100", 9), "[uniep.tune] hardware must name a file of `python -m tools.calibrate`"),
        (Gpu("NVIDIA A100", 8), '[uniep.tune] mode must be "off" on a GPU before compute capability 9, got "model"'),
    ],
)
def test_tuning_on_another_gpu(gpu, expected, tmp_path, on_gpu):
    on_gpu(gpu)
    assert expected in says(BF16, config=tune_section('[uniep.tune]\nmode = "model"\n', tmp_path))
    assert gpu.name in says(BF16, config=tune_section('[uniep.tune]\nmode = "model"\n', tmp_path))


def test_a_tile_by_hand_on_an_older_gpu(tmp_path, on_gpu):
    """Its stages are larger than that one's shared memory."""
    on_gpu(Gpu("NVIDIA A100", 8))
    text = says(BF16, config=tune_section('[uniep.tune.up]\ntile = "wide4"\n', tmp_path))
    assert '[uniep.tune.up] tile must be left out on a GPU before compute capability 9, got "wide4"' in text


def test_a_cache_that_cannot_be_written(tmp_path, on_gpu):
    on_gpu(Gpu())
    (tmp_path / "file").touch()
    path = tune_section(f'[uniep.tune]\nmode = "measured"\ncache = "{tmp_path}/file/cache"\n', tmp_path)
    assert "[uniep.tune] cache must be a folder that can be written, got" in says(BF16, config=path)
    path = tune_section(f'[uniep.tune]\nmode = "model"\ncache = "{tmp_path}/file/cache"\n', tmp_path)
    check(BF16, config=path)


@pytest.mark.parametrize("gpu", [Gpu(), Gpu("NVIDIA H100"), Gpu("NVIDIA A100", 8)])
def test_tuning_where_the_gpu_is_known(gpu, tmp_path, on_gpu):
    """The default works everywhere; a launch half by hand is refused only where the rest is chosen."""
    on_gpu(gpu)
    check(BF16, config=tune_section("", tmp_path))
    path = tune_section("[uniep.tune.up]\nnum_relay = 40\n", tmp_path)
    if gpu.name == "NVIDIA H200":
        assert "[uniep.tune.up] tile must be given with num_relay, or neither" in says(BF16, config=path)
    else:
        check(BF16, config=path)


def test_tuning_by_arguments(on_gpu):
    on_gpu(Gpu())
    job = check(BF16, "--uniep.backend=uniep", "--uniep.tune.mode=model", "--uniep.tune.bucket_tokens=512")
    assert (job.uniep.tune.mode, job.uniep.tune.bucket_tokens) == ("model", 512)
    text = says(BF16, "--uniep.backend=uniep", "--uniep.tune.mode=off", "--uniep.tune.up.num_dispatch=140")
    assert "[uniep.tune.up] num_dispatch + num_relay must be less than" in text


def test_tuning_asks_nothing_of_other_backends(tmp_path):
    path = tune_section('[uniep.tune]\nmode = "model"\n', tmp_path)
    path.write_text(path.read_text().replace('backend = "uniep"', 'backend = "reference"'))
    check(config=path)


def test_hardware_without_a_timed_tile(tmp_path, on_gpu):
    """As a fit of some launches only writes it."""
    on_gpu(Gpu())
    path = tmp_path / "partial.json"
    partial = replace(next(iter(shipped())), assumed=tuple(f"down.{tile}.step_us" for tile in TILES))
    partial.save(path)
    section = tune_section(f'[uniep.tune]\nmode = "model"\nhardware = "{path}"\n', tmp_path)
    assert "[uniep.tune] hardware: down must have a tile that was timed" in says(BF16, config=section)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--model.name=llama3"], 'name must be one of qwen3, deepseek_v3, got "llama3", TorchTitan\'s default'),
        (
            ["--activation_checkpoint.mode=memory_budget"],
            '[activation_checkpoint] mode must not be "memory_budget" without [compile] enable = true',
        ),
        (["--activation_checkpoint.selective_ac_option=²"], "[activation_checkpoint] selective_ac_option must be"),
        (["--activation_checkpoint.memory_budget=7"], "[activation_checkpoint] memory_budget must be 0 to 1, got 7.0"),
        (["--optimizer.early_step_in_backward"], "[optimizer] early_step_in_backward must be false with"),
        (["--lr_scheduler.total_steps=0"], "[lr_scheduler] total_steps must be at least 1, got 0"),
        (
            ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"],
            "[checkpoint] create_seed_checkpoint must be false with more ranks than one, got true with 2",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path=/tmp"],
            "[checkpoint] initial_load_path must be a checkpoint's step-N, got \"/tmp\"",
        ),
        (["--compile.enable", "--compile.backend=inductr"], 'got "inductr"; did you mean inductor?'),
        (["--compile.enable", "--compile.components", "x"], '[compile] components must be of "model", "loss", got "x"'),
        (["--validation.enable"], "[validation] seq_len must be up to [training] seq_len = 256 and divisible by 2"),
        (["--validation.freq=0"], "[validation] freq must be at least 1, got 0"),
        (
            ["--validation.enable", "--validation.seq_len=64", "--validation.dataset=foo"],
            '[validation] dataset must be one of',
        ),
        (
            ["--model.name=deepseek_v3", "--validation.enable"],
            '[validation] enable must be false for [model] name = "deepseek_v3", which TorchTitan cannot validate',
        ),
    ],
)  # fmt: skip
def test_what_torchtitan_would_refuse_late(overrides, expected):
    assert expected in says(*overrides)


def test_the_kernels_have_room_for_the_batches_of_validation():
    job = check("--validation.enable", "--validation.dataset=stdlib", "--validation.seq_len=128")
    assert _max_tokens(job) == job.training.local_batch_size * 256
    job.validation.local_batch_size = 2 * job.training.local_batch_size + 1
    assert _max_tokens(job) == job.validation.local_batch_size * 128
    job.validation.enable = False
    assert _max_tokens(job) == job.training.local_batch_size * 256
