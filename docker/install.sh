#!/usr/bin/env bash
# The image's install steps, one verb each, so that they also run where there is no Docker.
#   install.sh dependencies FOLDER PYPROJECT   a virtual environment with torch and what we need
#   install.sh package FOLDER SOURCE           this project into it: a checkout or a wheel
#   install.sh kernels FOLDER CACHE            every Hopper kernel into CACHE; needs no GPU
# $PYTHON is the interpreter that the server's Python backend embeds, $TORCH what pip installs for
# torch (options allowed, an index among them), $EXTRAS the project's extras, by commas, $RANKS of
# how many GPUs a model may be cut for.
set -euo pipefail
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
EXTRAS=${EXTRAS:-gpu,openai}

fail() { echo "install.sh: $*" >&2; exit 1; }
[[ $# -eq 3 ]] || fail "needs a verb, a folder and what it is made of; got $# arguments"
verb=$1 folder=$2 what=$3
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

# From pyproject.toml alone: a change of code leaves torch's layer as it is.
requirements() {
  "$PYTHON" - "$1" "$EXTRAS" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = [name for name in sys.argv[2].split(",") if name]
if unknown := [name for name in names if name not in extras]:
    raise SystemExit(f"install.sh: no extra {', '.join(unknown)}; there are {', '.join(extras)}")
print("\n".join(project["dependencies"] + [line for name in names for line in extras[name]]))
PYTHON
}

dependencies() {
  list=$(requirements "$what")
  # The system's packages stay visible: numpy is the image's, which its Python backend was made for.
  "$PYTHON" -m venv --system-site-packages "$folder"
  # shellcheck disable=SC2086  # TORCH may carry options
  pip install $TORCH
  pip install --requirement <(printf '%s\n' "$list")
}

case $verb in
  dependencies) dependencies ;;
  package) pip install --no-deps "$what" ;;
  kernels) "$folder/bin/gptoss" build-kernels --output "$what" --ranks "${RANKS:-1}" ;;
  *) fail "unknown verb '$verb'; there are dependencies, package and kernels" ;;
esac
