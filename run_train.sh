#!/usr/bin/env bash
# Trains a MoE: sets up .venv on the first start, checks the config and starts torchrun. `./run_train.sh --help` helps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./setup_env.sh
exec "$PYTHON" -m recipes.launch "$@"
