#!/usr/bin/env bash
# Lints, type-checks and tests. Sets up .venv on the first start. Arguments go to pytest: `./run_tests.sh tests/unit -k plan`.
# Tests that need GPUs skip themselves without them and say so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
EXTRAS=dev source ./setup_env.sh
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy uniep recipes tools
exec "$PYTHON" -m pytest "$@"
