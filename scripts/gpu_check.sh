#!/usr/bin/env bash
# What only a CUDA device can show, within six minutes: the tests marked gpu, exactness, and predicted against observed
# peak memory. The last line is one JSON object in the benchmarks' form; with OUT set it is also written to that folder.
#
# Without a device: one line, exit 0. Uses the first Python whose torch sees a device: $PYTHON, python3, .venv's. Wheels
# in a folder wheels/ are installed aside, for this run only.
set -uo pipefail
cd "$(dirname "$0")/.."

python=""
for candidate in "${PYTHON:-}" python3 .venv/bin/python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        python="$candidate"
        break
    fi
done
if [ -z "$python" ]; then
    echo "gpu_check: skipped: there is no CUDA device that the torch of \$PYTHON, python3 or .venv sees"
    exit 0
fi

export PYTHONPATH="$PWD/src:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
if compgen -G 'wheels/*.whl' >/dev/null; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --target "$site" \
        wheels/*.whl || exit 1
    PYTHONPATH="$site:$PYTHONPATH"
fi
"$python" scripts/gpu_requirements.py || exit 1

status=0
echo "== tests"
# Another machine's packages may warn about things that are not ours to fix.
timeout 160 "$python" -m pytest -m gpu tests/gpu -p no:cacheprovider -W default || status=1
echo "== exactness and memory"
timeout 170 "$python" scripts/gpu_protocol.py ${OUT:+--output "$OUT"} || status=1
exit $status
