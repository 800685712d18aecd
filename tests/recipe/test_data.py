"""recipes.data and the tokenizer: what is read, what is refused, and what is hashed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS

from recipes import data, make_tokenizer
from recipes.data import DataError, check_data, fingerprint, local_files, stdlib_files
from recipes.families import FAMILIES
from recipes.load import load_config
from tests.recipe.runs import TOKENIZER

TEXTS = ["def f():\n    return 1\n", "naïve café, 你好", "one line"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def job(dataset: str, path: str | Path | None = None, tokenizer: Path = TOKENIZER) -> Any:
    return SimpleNamespace(
        training=SimpleNamespace(dataset=dataset, dataset_path=None if path is None else str(path)),
        validation=SimpleNamespace(enable=False),
        model=SimpleNamespace(hf_assets_path=str(tokenizer)),
    )


def load(path: str | Path) -> list[str]:
    check_data(job("local", path), 1)
    config = DATASETS["local"]
    return [config.sample_processor(sample) for sample in config.loader(str(path))]


def refused(path: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        check_data(job("local", path), 1)
    text = str(caught.value)
    assert "[training] dataset_path" in text
    assert str(path) in text
    return text


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "stdlib"
    for name in ("a.py", "b/__init__.py", "b/c.py", "b/test/t.py", "site-packages/s.py", "__pycache__/p.py", "x.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n" * 40)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(root))
    return root


def test_stdlib_files_are_the_running_pythons():
    files = stdlib_files()
    names = [name for name, _ in files]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not {"test", "tests", "site-packages"} & {part for name in names for part in name.split("/")}
    assert len(set(names)) == len(names) > 300
    assert files == stdlib_files()


def test_stdlib_files_come_in_one_order_wherever_they_lie(small_stdlib, monkeypatch):
    names = [name for name, _ in stdlib_files()]
    assert sorted(names) == ["a.py", "b/__init__.py", "b/c.py"]
    stock_walk = data.os.walk

    def backwards(root: Path):
        for folder, folders, files in stock_walk(root):
            folders.reverse()
            yield folder, folders, files[::-1]

    monkeypatch.setattr(data.os, "walk", backwards)
    assert [name for name, _ in stdlib_files()] == names


def test_stdlib_dataset_is_deterministic_and_whole(small_stdlib):
    config = DATASETS["stdlib"]
    texts = [config.sample_processor(sample) for sample in config.loader("")]
    assert texts == [config.sample_processor(sample) for sample in config.loader("")]
    expected = "".join(sorted("".join((small_stdlib / n).read_text() for n in ("a.py", "b/__init__.py", "b/c.py"))))
    assert "".join(sorted("".join(texts))) == expected


def test_fingerprint_of_the_stdlib_follows_its_contents(small_stdlib):
    first = fingerprint(job("stdlib"))
    assert first.sha256_of == "contents"
    assert len(first.sha256) == 64
    assert fingerprint(job("stdlib")) == first
    (small_stdlib / "b" / "c.py").write_text("# b/c.pY\n" * 40)
    changed = fingerprint(job("stdlib"))
    assert changed.sha256 != first.sha256
    assert changed.tokenizer_sha256 == first.tokenizer_sha256
    (small_stdlib / "b" / "c.py").rename(small_stdlib / "b" / "d.py")
    assert fingerprint(job("stdlib")).sha256 != changed.sha256


def test_fingerprint_of_local_text_follows_its_contents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc")
    first = fingerprint(job("local", path))
    assert first.sha256_of == "contents"
    path.write_text("abd")
    assert fingerprint(job("local", path)).sha256 != first.sha256


def test_fingerprint_tells_where_one_file_ends(tmp_path):
    for folder, cut in (("one", 2), ("two", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("abcdef"[:cut])
        (tmp_path / folder / "b.txt").write_text("abcdef"[cut:])
    hashes = {fingerprint(job("local", tmp_path / folder)).sha256 for folder in ("one", "two")}
    assert len(hashes) == 2


def test_fingerprint_of_large_data_is_of_names_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_HASH_CONTENT_UP_TO_BYTES", 2)
    (tmp_path / "a.txt").write_text("abc")
    first = fingerprint(job("local", tmp_path / "a.txt"))
    assert first.sha256_of == "names and sizes"
    (tmp_path / "a.txt").write_text("abcd")
    assert fingerprint(job("local", tmp_path / "a.txt")).sha256 != first.sha256


def test_fingerprint_of_remote_data_says_so():
    remote = fingerprint(job("c4"))
    assert (remote.sha256, remote.sha256_of) == (None, "nothing (remote)")


def test_fingerprint_follows_the_tokenizer(tmp_path):
    for folder, text in (("one", "{}"), ("two", "{ }")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer.json").write_text(text)
    one, two = (fingerprint(job("stdlib", None, tmp_path / folder)) for folder in ("one", "two"))
    assert one.sha256 == two.sha256
    assert one.tokenizer_sha256 != two.tokenizer_sha256


def test_jsonl(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": i} for i, text in enumerate(TEXTS)])
    assert load(path) == TEXTS


def test_jsonl_records_without_text_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": TEXTS[0]}, {"text": " \n"}, {"text": ""}, {"text": TEXTS[2]}])
    assert load(path) == [TEXTS[0], TEXTS[2]]


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3]}), path)
    assert load(path) == TEXTS


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first\n\nsecond\n", encoding="utf-8")
    assert load(path) == ["first\n\nsecond\n"]


def test_a_folder_is_searched_through_in_order(tmp_path):
    folder = tmp_path / "text"
    for name in ("b.txt", "a.txt", "sub/c.md", "ignored.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert load(folder) == ["a.txt", "b.txt", "sub/c.md"]


def test_a_pattern(tmp_path):
    for name in ("b1.txt", "a1.txt", "a2.txt"):
        (tmp_path / name).write_text(name)
    assert load(tmp_path / "a*.txt") == ["a1.txt", "a2.txt"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a3.txt").write_text("a3.txt")
    assert [p.name for p in local_files(f"{tmp_path}/**/a*.txt")] == ["a1.txt", "a2.txt", "a3.txt"]


def test_data_is_read_again_after_it_changed(tmp_path):
    """Not from the cache of the datasets library."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "before"}])
    assert load(path) == ["before"]
    write_jsonl(path, [{"text": "after!"}])
    assert load(path) == ["after!"]


@pytest.mark.parametrize("name", ["nothing.txt", "no/such/folder", "*.jsonl"])
def test_nothing_there(tmp_path, name):
    assert "where there is none" in refused(tmp_path / name)


def test_a_folder_without_text_files(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.bin").write_bytes(b"\0")
    assert "where there is none" in refused(tmp_path / "text")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "data"])
def test_unknown_suffix(tmp_path, name):
    (tmp_path / name).write_text("text\n")
    assert ".jsonl" in refused(tmp_path / name)


def test_files_of_several_kinds(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    write_jsonl(folder / "b.jsonl", [{"text": "b"}])
    assert "of one kind" in refused(folder)


@pytest.mark.parametrize("text", ["", " \n\t\n"])
def test_text_file_without_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert "must hold text" in refused(tmp_path / "a.txt")


def test_every_rank_has_a_text(tmp_path):
    """Also more ranks than records are looked at in any case, and behind records without a text."""
    records = [{"text": ""}] * 1000 + [{"text": "a text"}] * 1100
    path = write_jsonl(tmp_path / "a.jsonl", records)
    check_data(job("local", path), 1100)
    with pytest.raises(DataError, match=r"must hold a text for each of 1101 data-parallel ranks, got .* with 1100"):
        check_data(job("local", path), 1101)


def test_jsonl_without_text(tmp_path):
    assert "must hold text" in refused(write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": "  "}]))


def test_jsonl_without_a_line(tmp_path):
    refused(write_jsonl(tmp_path / "a.jsonl", []))


def test_wrong_field(tmp_path):
    text = refused(write_jsonl(tmp_path / "a.jsonl", [{"content": "a", "id": 1}]))
    assert 'field "text"' in text
    assert "content" in text


@pytest.mark.parametrize("value", [3, ["a"], {"a": "b"}])
def test_text_that_is_no_string(tmp_path, value):
    assert 'field "text"' in refused(write_jsonl(tmp_path / "a.jsonl", [{"text": value}]))


def test_wrong_field_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), path)
    assert 'field "text"' in refused(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_file_that_is_not_what_its_suffix_says(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is { no json \xff\n" * 3)
    text = refused(tmp_path / name)
    assert "\n" not in text


def test_text_file_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00abc")
    assert "readable text" in refused(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "decoy"), [("a[1].jsonl", "a1.jsonl"), ("b*.jsonl", "bb.jsonl"), ("c?.jsonl", "cc.jsonl")]
)
def test_a_file_name_is_no_pattern(tmp_path, name, decoy):
    write_jsonl(tmp_path / decoy, [{"text": "another file"}])
    assert load(write_jsonl(tmp_path / name, [{"text": "this one"}])) == ["this one"]


def test_a_folder_name_is_no_pattern(tmp_path):
    for folder in ("d[ab]", "da"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "t.jsonl", [{"text": folder}])
    assert load(tmp_path / "d[ab]") == ["d[ab]"]


NULL = {"text": None}
TEXT = {"text": "a"}


@pytest.mark.parametrize("records", [[NULL, TEXT], [TEXT, NULL], [*([TEXT] * 1500), NULL], [*([NULL] * 999), TEXT]])
def test_null_is_left_out_wherever_it_stands(tmp_path, records, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", records)
    with caplog.at_level("WARNING"):
        assert load(path) == ["a"] * records.count(TEXT)
    assert f"{records.count(NULL)} of {len(records)} records of {path} hold no text and are left out" in caplog.text


def broken(folder: Path, name: str) -> Path:
    """A folder of two files, the second of which is read too late for the check before the start."""
    text = folder / "text"
    text.mkdir()
    write_jsonl(text / "a.jsonl", [TEXT] * 1500)
    write_jsonl(text / name, [{"body": "b"}])
    if name == "bytes.jsonl":
        (text / name).write_bytes(b'{"text": "\xff\xfe"}\n')
    return text


@pytest.mark.parametrize(("name", "why"), [("bytes.jsonl", "utf-8"), ("fields.jsonl", "has the fields ['body']")])
def test_what_is_found_late_names_the_file(tmp_path, name, why):
    folder = broken(tmp_path, name)
    with pytest.raises(DataError) as caught:
        load(folder)
    text = str(caught.value)
    assert f'dataset_path must hold readable text, got "{folder}": {folder / name}: ' in text
    assert why in text
    assert "\n" not in text


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_what_is_found_late_is_one_line_of_a_rank(family, tmp_path, capsys):
    run = job("local", broken(tmp_path, "bytes.jsonl"))
    run.training.seq_len, run.training.local_batch_size = 8, 1
    with pytest.raises(SystemExit) as ended:
        FAMILIES[family].build_dataloader_fn(dp_world_size=1, dp_rank=0, tokenizer=None, job_config=run)
    assert ended.value.code == 2
    assert "error: dataset_path must hold readable text" in capsys.readouterr().err


def test_parquet_without_rows(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), folder / "a.parquet")
    assert "must hold text" in refused(folder)
    assert "must hold text" in refused(folder / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "b.parquet")
    assert load(folder) == TEXTS


def test_local_needs_a_path():
    with pytest.raises(DataError, match="dataset_path must name text files"):
        check_data(job("local"), 1)


def test_the_tokenizer_knows_every_byte():
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == make_tokenizer.VOCAB_SIZE
    for symbol in pre_tokenizers.ByteLevel.alphabet():
        assert tokenizer.token_to_id(symbol) is not None
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256


@pytest.mark.parametrize(
    "text",
    [
        "".join(map(chr, range(256))),
        "def f(x):\n\treturn x  # naïve\r\n",
        "你好, мир, 🤖👩‍👩‍👧, \u200b\ufeff, \U0010ffff",
        " leading and trailing ",
        "",
    ],
)
def test_the_tokenizer_round_trips(text):
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_torchtitan_takes_the_tokenizer():
    tokenizer = HuggingFaceTokenizer(str(TOKENIZER))
    ids = tokenizer.encode("x = 1", add_bos=True, add_eos=True)
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.bos_id != tokenizer.eos_id
    assert max(ids) < make_tokenizer.VOCAB_SIZE


def test_making_the_tokenizer_twice_gives_one_file(tmp_path, monkeypatch):
    corpus = [(name, tmp_path / name) for name in ("a.py", "b.py")]
    for name, path in corpus:
        path.write_text(f"def {name[0]}(self, value):\n    return self.value + value\n" * 20)
    monkeypatch.setattr(make_tokenizer, "stdlib_files", lambda: corpus)
    made = []
    for name in ("one", "two"):
        make_tokenizer.make_tokenizer(300).save(str(tmp_path / name))
        made.append((tmp_path / name).read_bytes())
    assert made[0] == made[1]
    tokenizer = Tokenizer.from_file(str(tmp_path / "one"))
    assert 256 + 2 < tokenizer.get_vocab_size() <= 300
    assert len(tokenizer.encode("return self.value").ids) < len("return self.value")
    assert tokenizer.decode(tokenizer.encode("zß🤖").ids) == "zß🤖"


def test_a_worker_reads_the_same_batches_and_goes_on_where_it_stopped():
    def loader(num_workers: int):
        config = load_config(["--job.config_file", "train_configs/qwen3_cpu.toml"])
        config.training.dataloader.num_workers = num_workers
        family = FAMILIES[config.model.name]
        tokenizer = family.build_tokenizer_fn(config)
        return family.build_dataloader_fn(dp_world_size=2, dp_rank=1, tokenizer=tokenizer, job_config=config)

    def labels(batches, count: int) -> list[Tensor]:
        return [next(batches)[1] for _ in range(count)]

    want = labels(iter(loader(0)), 6)
    first = loader(1)
    got = labels(iter(first), 3)
    second = loader(1)
    second.load_state_dict(first.state_dict())
    got += labels(iter(second), 3)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert len({tuple(one.flatten().tolist()) for one in want}) == 6
