"""Kernels run interpreted, on CPU memory; ranks are forked processes that share it."""

import pytest
import triton


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
