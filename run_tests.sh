#!/usr/bin/env bash
# Lints, type-checks and tests. Sets up .venv on the first start. Arguments go to pytest: `./run_tests.sh tests/unit -k plan`.
# Without a GPU the kernels run interpreted and the tests of tests/gpu skip themselves; with one the kernels run twice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
EXTRAS=dev source ./setup_env.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy uniep recipes tools
if "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.is_available())'; then
  echo "No GPU is visible: kernels run interpreted, tests/gpu is skipped"
  TRITON_INTERPRET=1 exec "$PYTHON" -m pytest -rs "$@"
fi
if [[ $# -eq 0 ]]; then
  CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1 "$PYTHON" -m pytest tests/kernels
fi
exec "$PYTHON" -m pytest -rs "$@"
