"""Choices on disk, and watching: both without a GPU and without a clock."""

import dataclasses
import json
import os

import pytest

from uniep.autotune.cache import CacheKey, load_choices, store_choices
from uniep.autotune.search import Choice, LaunchChoice
from uniep.autotune.watch import Watch
from uniep.shapes import MoEShape

KEY = CacheKey(MoEShape(8, 2, 64, 64, 2), "abc", {"triton": "3.7"}, 4096, 10_000)
LAUNCHES = {
    "up": LaunchChoice("wide4", 16, 16, 840.0),
    "down": LaunchChoice("narrow", 2, 0, 660.5),
    "down_grad": LaunchChoice("wide3", 4, 20, 1.25),
    "up_grad": LaunchChoice("narrow", 8, 0, 2),
}
CHOICES = {1: Choice(LAUNCHES), 3: Choice(LAUNCHES | {"up": LaunchChoice("wide3", 4, 20, 1.25)})}


def test_what_is_stored_is_found(tmp_path):
    store_choices(tmp_path / "new", KEY, CHOICES)
    assert load_choices(tmp_path / "new", KEY) == CHOICES
    assert [path.name for path in (tmp_path / "new").iterdir()] == [KEY.file_name]  # nothing partial is left


@pytest.mark.parametrize(
    "change",
    [
        {"shape": MoEShape(8, 2, 64, 64, 4)},
        {"shape": MoEShape(8, 3, 64, 64, 2)},
        {"hardware": "abd"},
        {"versions": {"triton": "3.6"}},
        {"bucket_tokens": 2048},
        {"max_tokens": 8192},
    ],
)
def test_another_key_finds_nothing(change, tmp_path):
    store_choices(tmp_path, KEY, CHOICES)
    assert load_choices(tmp_path, dataclasses.replace(KEY, **change)) == {}


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": {}}', "\x00\xff"])
def test_a_corrupt_file_is_ignored_with_one_line(content, tmp_path, caplog):
    path = tmp_path / KEY.file_name
    path.write_text(content)
    assert load_choices(tmp_path, KEY) == {}
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    store_choices(tmp_path, KEY, CHOICES)
    assert load_choices(tmp_path, KEY) == CHOICES


def test_a_file_of_another_layer_is_ignored(tmp_path, caplog):
    """Two keys of one hash, or a file that was renamed by hand."""
    store_choices(tmp_path, KEY, CHOICES)
    other = dataclasses.replace(KEY, hardware="other")
    os.rename(tmp_path / KEY.file_name, tmp_path / other.file_name)
    assert load_choices(tmp_path, other) == {}
    assert "key must be" in caplog.text


def test_an_unknown_tile_is_ignored(tmp_path, caplog):
    store_choices(tmp_path, KEY, CHOICES)
    path = tmp_path / KEY.file_name
    path.write_text(path.read_text().replace("wide3", "wide9"))
    assert load_choices(tmp_path, KEY) == {}
    assert "wide9" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"predicted_us": 0},
        {"predicted_us": -1.0},
        {"predicted_us": None},
        {"predicted_us": "1"},
        {"predicted_us": float("inf")},
        {"num_link": 0},
        {"num_link": 8.5},
        {"num_link": "8"},
        {"num_local": 0},
        {"num_local": True},
        None,
    ],
)
def test_values_that_cannot_be_are_ignored(change, tmp_path, caplog):
    store_choices(tmp_path, KEY, CHOICES)
    path = tmp_path / KEY.file_name
    values = json.loads(path.read_text())
    launches = values["buckets"]["1"]["launches"]
    if change is None:
        del launches["up"]
    else:
        launches["up"] |= change
    path.write_text(json.dumps(values))
    assert load_choices(tmp_path, KEY) == {}
    assert "is not used" in caplog.text


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, caplog):
    store_choices(tmp_path, KEY, CHOICES)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    store_choices(tmp_path, KEY, {1: CHOICES[3]})
    assert "cannot be written, the next start measures again: disk full" in caplog.text
    assert load_choices(tmp_path, KEY) == CHOICES
    json.loads((tmp_path / KEY.file_name).read_text())


def test_watching_speaks_after_enough_samples_in_a_row():
    watch = Watch(share=0.2, num_samples=3)
    assert [watch.see(us, 100.0) for us in (130.0, 150.0, 140.0)] == [None, None, 1.4]
    # It starts anew.
    assert [watch.see(us, 100.0) for us in (130.0, 150.0)] == [None, None]


def test_a_good_sample_or_the_other_side_starts_anew():
    watch = Watch(share=0.2, num_samples=3)
    assert [watch.see(us, 100.0) for us in (130.0, 150.0, 110.0, 130.0, 130.0)] == [None] * 5
    assert [watch.see(us, 100.0) for us in (70.0, 60.0, 50.0)] == [None, None, 0.6]


def test_noise_around_the_prediction_says_nothing():
    watch = Watch(share=0.2, num_samples=2)
    assert all(watch.see(us, 100.0) is None for us in (121.0, 79.0) * 50)


@pytest.mark.parametrize(("share", "num_samples"), [(0.0, 3), (-1.0, 3), (0.1, 0)])
def test_watching_needs_bounds(share, num_samples):
    with pytest.raises(ValueError, match="share must be positive"):
        Watch(share=share, num_samples=num_samples)
