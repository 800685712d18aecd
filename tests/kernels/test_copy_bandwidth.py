"""The copies that a calibration times."""

import pytest
import torch

from tools.copy_bandwidth import launch_copy


@pytest.mark.parametrize(("num_rows", "dim", "num_programs"), [(1, 64, 3), (37, 72, 2), (64, 256, 1)])
def test_copies_all_rows(num_rows: int, dim: int, num_programs: int) -> None:
    source_RD = torch.randn(num_rows, dim).bfloat16()
    target_RD = torch.full((num_rows + 1, dim), -1.0).bfloat16()
    launch_copy(source_RD, target_RD.data_ptr(), num_programs=num_programs, num_warps=4, elements_of_warp=256)
    assert torch.equal(target_RD[:num_rows], source_RD)
    assert (target_RD[num_rows:] == -1).all()
