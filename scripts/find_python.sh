#!/bin/sh
# Prints the path of a Python that can carry attnlab: 3.12 or later and able to make virtual environments.
# usage: find_python.sh [VERSION]   VERSION, such as 3.12, asks for just that one; otherwise the newest of 3.14 to 3.12 wins.
# The variable PYTHON, when set, is the only candidate. A candidate counts by what it does when run, not by its name:
# pyenv's shims are on the PATH under names of versions that are not installed.
wanted=${1:-}
found=

try() {
    case "$found" in *", $1 ("*) return 1 ;; esac
    report=$("$1" - "$wanted" 2>/dev/null <<'CHECK'
import sys
version = '%d.%d' % sys.version_info[:2]
print('Python %d.%d.%d' % sys.version_info[:3])
try:
    import venv, ensurepip
except ImportError:
    sys.exit('no venv')
print(sys._base_executable if sys.version_info >= (3, 12) and sys.argv[1] in ('', version) else '')
CHECK
    ) || { [ -n "$report" ] && found="$found, $1 ($report without the venv module)"; return 1; }
    path=$(printf '%s\n' "$report" | sed -n 2p)
    if [ -n "$path" ]; then echo "$path"; exit 0; fi
    found="$found, $1 ($(printf '%s\n' "$report" | sed -n 1p))"
    return 1
}

refuse() {
    echo "attnlab needs Python ${wanted:-3.12 or later}; found ${found:-, nothing that runs}. $1" | sed 's/found , /found /' >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    [ -n "$found" ] || found=", PYTHON=$PYTHON, which does not run"
    refuse 'Point PYTHON at a newer one: make PYTHON=/path/to/python3.13'
fi
for name in python3.14 python3.13 python3.12 python3; do
    command -v $name >/dev/null && try $name
done
for minor in 14 13 12; do
    for root in "${PYENV_ROOT:-}" "$HOME/.pyenv"; do
        for path in "$root"/versions/3.$minor.*/bin/python; do
            try "$path"
        done
    done
done
if command -v uv >/dev/null; then
    version=${wanted:-3.13}
    uv python install --quiet "$version" >&2 && try "$(uv python find --managed-python "$version" 2>/dev/null)"
fi
refuse 'Install one, or point PYTHON at it: make PYTHON=/path/to/python3.13'
