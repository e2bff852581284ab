#!/usr/bin/env bash
# Every check, and the tests: all.sh those that take twenty-five minutes together, all.sh long the others.
# Goes on past a failure, and closes with one line for each part.
#
# A part that needs what this machine lacks is skipped with the reason; with CI=true that is a failure, so
# that CI never passes on tests that it did not run.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=.venv/bin
chosen=$([ "${1:-}" = long ] && echo "long and not quality" || echo "not long and not quality")
summary=()
failed=0

part() {
    local name=$1 begun=$SECONDS
    shift
    printf '\n=== %s\n' "$name"
    if "$@" </dev/null; then
        summary+=("passed   $name ($((SECONDS - begun)) s)")
    else
        summary+=("FAILED   $name ($((SECONDS - begun)) s)")
        failed=1
    fi
}

skip() {
    local name=$1 reason=$2
    printf '\n=== %s: skipped, %s\n' "$name" "$reason"
    if [ "${CI:-}" = true ]; then
        summary+=("FAILED   $name: $reason, and CI must run it")
        failed=1
    else
        summary+=("skipped  $name: $reason")
    fi
}

# Chained with &&, because `set -e` has no effect in what an `if` calls.
front_end() (
    cd widgets &&
        npm ci --no-audit --no-fund &&
        npm ci --no-audit --no-fund --prefix labextension &&
        npm run typecheck &&
        npm run typecheck --prefix labextension &&
        npm test
)

# What is committed must be what the sources give: nobody reviews a bundle by eye.
built_front_end() (
    before=$(mktemp -d) || exit 1
    trap 'rm -rf "$before"' EXIT
    cp -R nbgpu/static nbgpu/labextension "$before" &&
        (cd widgets && npm run build && npm run build --prefix labextension) || exit 1
    diff -rq "$before/static" nbgpu/static && diff -rq "$before/labextension" nbgpu/labextension ||
        { echo "nbgpu/static or nbgpu/labextension was not what widgets/ builds. It is now: commit it."; exit 1; }
)

# Most tests wait for processes that start, so that several files side by side take little more than half the time;
# tests/conftest.py says how many.
# Each run says where its time went. What failed beside others is tried once more alone: a failure that does not come
# again is shown with its reason, and is to be mended, but does not hide what all the other tests say.
python_tests() {
    "$bin/python" -m pytest -m "$chosen" -n auto --maxprocesses 4 --dist loadfile \
        --durations=40 --durations-min=2 && return
    [ $? -eq 1 ] || return 1
    printf '\n--- what failed above, alone\n'
    "$bin/python" -m pytest -m "$chosen" --last-failed --last-failed-no-failures none
}

if [ "${1:-}" != long ]; then
    part "style" "$bin/ruff" check .
    part "format" "$bin/ruff" format --check .
    part "types" "$bin/mypy"
    if command -v npm >/dev/null && command -v node >/dev/null; then
        part "front end" front_end
        part "front end, as committed" built_front_end
    else
        skip "front end" "there is no node or npm here (apt-get install nodejs npm)"
    fi
fi
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    skip "browser tests" "there is no Chromium here (apt-get install chromium)"
fi
part "pytest" python_tests

printf '\n=== summary\n'
printf '%s\n' "${summary[@]}"
exit $failed
