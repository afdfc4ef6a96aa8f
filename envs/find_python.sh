#!/bin/sh
# Print a Python that nnsweep runs on (3.12 or 3.13), or say in one line that there is none.
for candidate in python3.12 python3.13 "$HOME"/.pyenv/versions/3.12.*/bin/python \
	"$HOME"/.pyenv/versions/3.13.*/bin/python "${PYENV_ROOT:-/nonexistent}"/versions/3.1[23].*/bin/python \
	python3 python; do
	if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
		2>/dev/null; then
		command -v "$candidate"
		exit 0
	fi
done
echo "nnsweep needs Python 3.12 or 3.13; install one (python3.12, or pyenv install 3.12)." >&2
echo false
exit 1
