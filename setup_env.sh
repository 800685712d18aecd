# Sourced by run_train.sh and run_tests.sh: makes .venv and installs the recipe on the first start, then sets PYTHON.
# EXTRAS names the optional dependencies to install. PYTHON, when it is set already, is used as it is.
if [[ -z "${PYTHON:-}" ]]; then
  extras="${EXTRAS:-}"
  command -v nvidia-smi >/dev/null 2>&1 && extras="${extras:+$extras,}cuda"
  # The stamp holds what was installed, so that changed dependencies are installed anew.
  wanted="$(cksum pyproject.toml | cut -d' ' -f1,2) [$extras]"
  # One installation at a time: nodes of a cluster may share this folder.
  exec 9>.setup.lock
  if command -v flock >/dev/null 2>&1; then
    flock 9 || echo "warning: this file system has no locks: let no two first starts run at once" >&2
  fi
  if ! grep -qxF -- "$wanted" .venv/installed 2>/dev/null; then
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
      base=""
      for candidate in python3.12 python3.11 python3; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
          2>/dev/null; then
          base="$candidate"
          break
        fi
      done
      if [[ -z "$base" ]]; then
        echo "error: Python must be 3.11 or 3.12 with its modules venv and ensurepip, found none on the PATH" >&2
        exit 2
      fi
      echo "[setup 1/2] Making .venv with $("$base" --version)"
      "$base" -m venv --clear .venv
    fi
    echo "[setup 2/2] Installing the recipe${extras:+ with $extras} (about 1 GB without CUDA, several with it; minutes)"
    if ! .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off \
      --editable ".${extras:+[$extras]}" 2>&1 |
      tee .venv/install.log |
      { grep --line-buffered -E '^(Collecting|Downloading|Processing|Installing collected|ERROR)' || true; } |
      sed -u -E 's/^Installing collected packages.*/Installing the packages/; s/^/  /' | cut -c1-110; then
      echo "error: the installation failed; its log is .venv/install.log" >&2
      exit 1
    fi
    echo "$wanted" >>.venv/installed
    echo "[setup] Done"
  fi
  exec 9>&-
  PYTHON=.venv/bin/python
fi
