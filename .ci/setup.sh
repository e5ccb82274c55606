#!/bin/sh
# Make a virtual environment that holds specnb with its extras, or say plainly why that is not possible here.
#
#   PYTHON=python3 TORCH_INDEX= sh .ci/setup.sh FOLDER [REQUIREMENT...]
#
# FOLDER/.installed is written at the very end. FOLDER/.unfinished is there while a new environment is being made:
# what a killed run leaves behind is made anew from scratch, since pip takes a half-copied package for installed.
set -eu

PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-}
CPU_INDEX=https://download.pytorch.org/whl/cpu
MB_NEEDED=3000
venv=$1
shift

fail() {
    printf '\nspecnb: %s\n' "$*" >&2
    exit 1
}

check_python() {
    command -v "$PYTHON" >/dev/null ||
        fail "there is no '$PYTHON'. Install Python 3.11 or newer, or name yours: make lab PYTHON=/path/to/python3"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "'$PYTHON' is $("$PYTHON" --version 2>&1), and specnb needs 3.11 or newer." \
            "Name a newer one: make lab PYTHON=python3.12"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "'$PYTHON' cannot make virtual environments: its venv or ensurepip module is missing." \
            "On Debian and Ubuntu: sudo apt install python3-venv"
}

check_room() {
    free=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$MB_NEEDED" ] ||
        fail "only $free MB are free on this disk, and an environment needs about $MB_NEEDED." \
            "Make room and run the same command again."
}

usable() { # ours from a finished run, or somebody's own
    [ ! -e "$venv/.unfinished" ] &&
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null &&
        { "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip >/dev/null 2>&1; }
}

make_environment() {
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/.unfinished" ]; then
        fail "'$venv' is in the way: it is not a virtual environment. Move it and run the same command again."
    fi
    check_python
    check_room
    [ ! -e "$venv" ] || echo "specnb: $venv is unfinished or broken; making it again."
    rm -rf "$venv"
    mkdir "$venv" && touch "$venv/.unfinished" || fail "cannot write in $(pwd)."
    "$PYTHON" -m venv "$venv" || fail "'$PYTHON -m venv' failed; its message is above." \
        "On Debian and Ubuntu: sudo apt install python3-venv"
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
}

# On Linux the package index's own torch brings several GB of CUDA libraries along; PyTorch's index has the small build.
install_torch() {
    if [ -n "$TORCH_INDEX" ]; then
        "$venv/bin/python" -m pip uninstall --quiet --yes torch
        pip_install --index-url "$TORCH_INDEX" torch || give_up
    elif [ "$(uname -s)" = Linux ] && ! "$venv/bin/python" -m pip show --quiet torch 2>/dev/null; then
        pip_install --quiet --no-deps --retries 0 --timeout 20 --index-url "$CPU_INDEX" -c constraints.txt torch ||
            echo "specnb: no CPU build of torch from $CPU_INDEX; taking what the package index has."
    fi
}

give_up() {
    fail "pip could not install everything; its message is above. No network? Connect, or behind a" \
        "proxy set HTTPS_PROXY. No space left on device? Make room here, or point TMPDIR to a larger disk." \
        "Then run the same command again: it starts where it is safe to."
}

usable || make_environment
install_torch
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
if [ -n "$TORCH_INDEX" ]; then # the chosen build may be of another version than the pin
    grep -v '^torch==' constraints.txt >"$constraints" || true
else
    cp constraints.txt "$constraints"
fi
pip_install -c "$constraints" -e '.[lab,test]' "$@" || give_up
"$venv/bin/python" -c 'import torch, transformers' || fail "the installed packages do not work together; their message" \
    "is above. 'make clean' removes the environment; then run the same command again."
rm -f "$venv/.unfinished"
printf '%s\n' "$(pwd)" "$TORCH_INDEX" >"$venv/.installed"
