"""recipes.train with sequences of changing length: torchrun ... tests/gpu/bucket_training.py --job.config_file FILE ...

Every STEPS_OF_LENGTH steps the sequences get another length, each a bucket of the tuner in its turn. How many kernels
were compiled by the end of each step is left in compiled.json of the dump folder.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import recipes.train as recipe_train
from uniep.kernels.dispatch_gemm import _dispatch_gemm_kernel
from uniep.kernels.gemm_combine import _gemm_combine_kernel

# Of [training] seq_len; the first is the longest, as in a run that has met its longest sequences early.
SHARES = (1.0, 0.25, 0.5, 0.75, 0.3)
STEPS_OF_LENGTH = 4


def num_compiled() -> int:
    """Variants of the two fused kernels that Triton has compiled or loaded for this GPU."""
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in (_dispatch_gemm_kernel, _gemm_combine_kernel))


class BucketTrainer(recipe_train.RecipeTrainer):
    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Tensor], Tensor]]
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        return super().batch_generator(self._cut(data_iterable))

    def _cut(self, batches: Iterable[tuple[dict[str, Tensor], Tensor]]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for number, (inputs, labels) in zip(itertools.count(), batches):
            share = SHARES[number // STEPS_OF_LENGTH % len(SHARES)]
            length = int(share * labels.shape[1])
            yield {name: value[:, :length] for name, value in inputs.items()}, labels[:, :length].contiguous()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        super().train_step(data_iterator)
        self._compiled = [*getattr(self, "_compiled", ()), num_compiled()]
        if dist.get_rank() == 0:
            Path(self.job_config.job.dump_folder, "compiled.json").write_text(json.dumps(self._compiled))


if __name__ == "__main__":
    recipe_train.RecipeTrainer = BucketTrainer  # type: ignore[misc]
    sys.exit(recipe_train.main(sys.argv[1:]))
