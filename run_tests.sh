#!/usr/bin/env bash
# Lints, type-checks and tests. Sets up .venv on the first start. Arguments go to pytest: `./run_tests.sh tests/unit -k plan`.
# Without a GPU the kernels run interpreted and the tests of tests/gpu skip themselves. With one, and without arguments,
# the interpreted kernels are tested first, then tests/gpu on it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
EXTRAS=dev source ./setup_env.sh
# The dashboard's page is opened in a real browser. Only a CI's machine, which is thrown away, gets one installed.
if [[ "${CI:-}" == true && $EUID -eq 0 ]] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  echo "Installing chromium"
  { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 ||
    echo "chromium could not be installed: the test that opens a page is skipped"
fi
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
