"""Trains: `torchrun ... -m recipes.train --job.config_file FILE [--section.key value ...]`, as run_train.sh does."""

import os
import sys

from recipes.checks import ConfigError, check_config
from recipes.load import load_config


def main(args: list[str]) -> int:
    """Runs TorchTitan's own training loop on a checked config. Returns the exit status."""
    from torchtitan import train

    try:
        config = load_config(args)
        check_config(config, int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    train.ConfigManager = lambda: _Parsed(config)  # type: ignore[assignment,misc]
    train.main(train.Trainer)
    return 0


class _Parsed:
    """Hands TorchTitan's main the config that was checked instead of having it parsed again."""

    def __init__(self, config):
        self._config = config

    def parse_args(self):
        return self._config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
