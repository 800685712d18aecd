"""The gradient of the scores on one GPU, bit for bit torch.bmm's, and where its order is another one.

python -m pytest tests/gpu/test_score_grad.py
PYTHONPATH=. python tests/gpu/test_score_grad.py    # times
"""

import pytest
import torch
import triton
from torch import Tensor

from uniep.kernels.score_grad import dots_in_kernel, launch_score_grad

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def by_bmm(grad_TD: Tensor, y_TKD: Tensor) -> Tensor:
    return torch.bmm(grad_TD.float().unsqueeze(1), y_TKD.float().transpose(1, 2)).squeeze(1)


def by_kernel(grad_TD: Tensor, y_TKD: Tensor) -> Tensor:
    score_grad_TK = torch.full(y_TKD.shape[:2], float("nan"), device="cuda")
    launch_score_grad(grad_TD, y_TKD, score_grad_TK)
    return score_grad_TK


def draw(num_tokens: int, top_k: int, dim: int) -> tuple[Tensor, Tensor]:
    y_TKD = torch.randn(num_tokens, top_k, dim, device="cuda").bfloat16()
    return torch.randn(num_tokens, dim, device="cuda").bfloat16(), y_TKD


@pytest.mark.parametrize("top_k", range(1, 17))
@pytest.mark.parametrize("dim", [1024, 1032, 1280, 1800, 2048, 2304, 2880, 4096, 5120, 6144, 7168, 8192])
def test_bits(top_k: int, dim: int) -> None:
    for num_tokens in (1024, 1025, 2000, 4096, 8192, 16384):
        if num_tokens * top_k * dim <= 2**30:
            assert dots_in_kernel(num_tokens, top_k, dim)
            grad_TD, y_TKD = draw(num_tokens, top_k, dim)
            assert torch.equal(by_kernel(grad_TD, y_TKD), by_bmm(grad_TD, y_TKD)), num_tokens


def main() -> None:
    for num_tokens, top_k, dim in ((8192, 8, 2048), (8192, 6, 2048), (8192, 8, 7168), (32768, 8, 2048)):
        tensors = draw(num_tokens, top_k, dim)
        times = [
            triton.testing.do_bench(lambda run=run, tensors=tensors: run(*tensors), return_mode="median")
            for run in (by_bmm, by_kernel)
        ]
        gb_s = tensors[1].numel() * 2 / times[1] / 1e6
        print(
            f"T={num_tokens} K={top_k} D={dim}: torch.bmm {times[0]:.3f} ms, ours {times[1]:.3f} ms ({gb_s:.0f} GB/s)"
        )


if __name__ == "__main__":
    main()
