#!/bin/sh
# Resolve pyproject.toml into requirements.lock and requirements-dev.lock, and envs/bench.in into
# envs/bench-peers.lock (the same torch and transformers): pins, no addresses.
set -eu
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$(sh envs/find_python.sh)" -m venv "$scratch/venv"
pip="$scratch/venv/bin/python -m pip --disable-pip-version-check"
mark='s/^((cuda-|nvidia-|triton).*)$/\1 ; sys_platform == "linux" and platform_machine == "x86_64"/'
$pip install --quiet . pygments
$pip freeze --exclude nnsweep >"$scratch/run"
$pip install --quiet -r envs/dev.in
$pip freeze --exclude nnsweep >"$scratch/all"
note() { echo "# Exact pins of $1, for Python 3.12 and 3.13. Made by \`make lock\`."; }
{
	note "everything nnsweep runs with"
	sed -E "$mark" "$scratch/run"
} >requirements.lock
{
	note "what tests and linters need on top of requirements.lock"
	grep -vxFf "$scratch/run" "$scratch/all"
} >requirements-dev.lock
python="$scratch/peers/bin/python"
"$(sh envs/find_python.sh)" -m venv "$scratch/peers"
"$python" -m pip install --quiet --constraint requirements.lock --requirement envs/bench.in
{
	note "the peers that \`make bench\` compares nnsweep with"
	"$python" -m pip freeze | sed -E "$mark"
} >envs/bench-peers.lock
