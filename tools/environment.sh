# Makes and enters the environment that tools/test and tools/demo share. Sourced by them, with bash.
#
# A fresh machine needs only Python 3.10 to 3.13 with pip and venv; PYTHON names one when several are there. The
# environment lies in .venv-tools and holds exactly what tools/requirements.lock lists, with this folder's tf_memsaver
# installed editable. It is made once, and made anew when the lock file or the Python changes.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

is_suitable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_suitable "$PYTHON" && { echo "$PYTHON"; return; }
    echo "PYTHON=$PYTHON is not a Python 3.10 to 3.13 with the venv and ensurepip modules." >&2
    return 1
  fi
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3.10 python3 python; do
    is_suitable "$candidate" && { echo "$candidate"; return; }
  done
  echo "found no Python 3.10 to 3.13 with the venv and ensurepip modules on PATH." >&2
  echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: PYTHON=/path/to/python $0" >&2
  return 1
}

make_environment() {
  local python=$1 environment=$root/.venv-tools stamp fresh
  # What the environment was made from: another Python, lock file, project file or place makes it anew.
  stamp=$("$python" - "$root" tools/requirements.lock pyproject.toml <<'PY'
import hashlib, pathlib, sys
parts = [sys.version.encode(), sys.argv[1].encode()] + [pathlib.Path(p).read_bytes() for p in sys.argv[2:]]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
PY
)
  fresh=$environment/.stamp
  if [ ! -f "$fresh" ] || [ "$(cat "$fresh")" != "$stamp" ]; then
    echo "making the environment .venv-tools with $("$python" --version) (once; a minute or two)" >&2
    "$python" -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r tools/requirements.lock >&2
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e . >&2
    # Last, so that an interrupted install is made anew.
    echo "$stamp" >"$fresh"
  fi
  export VIRTUAL_ENV=$environment PATH=$environment/bin:$PATH
  unset PYTHONHOME
}

chosen_python=$(find_python)
make_environment "$chosen_python"
# TensorFlow's start-up messages; errors stay visible.
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
