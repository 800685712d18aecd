"""recipes.train with a routing that drifts to skew: torchrun ... tests/gpu/drift_training.py --job.config_file FILE ...

The first top_k experts, all of the first rank, are favoured a little more at each step, through the router's own bias:
from halfway on every token goes to them, and the other experts and ranks receive none.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

import recipes.train as recipe_train

# Of the bias by the middle of the run: more than any score.
FULL_BIAS = 4.0


class DriftTrainer(recipe_train.RecipeTrainer):
    def train_step(self, data_iterator: Iterator[Any]) -> None:
        bias = FULL_BIAS * min(2 * self.step / self.job_config.training.steps, 1.0) ** 3  # scores start close together
        with torch.no_grad():
            for part in self.model_parts:
                for block in part.modules():
                    if hasattr(block, "expert_bias"):
                        block.expert_bias.zero_()
                        block.expert_bias[: block.router.top_k] = bias
        super().train_step(data_iterator)


if __name__ == "__main__":
    recipe_train.RecipeTrainer = DriftTrainer  # type: ignore[misc]
    sys.exit(recipe_train.main(sys.argv[1:]))
