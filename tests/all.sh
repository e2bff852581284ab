#!/usr/bin/env bash
# Every check, and the tests. With no argument the checks and the tests of `make test`, with `quick` the tests that
# start no ranks, with `long` what CI runs besides, with `all` everything, also what CI does not run.
# Goes on past a failure, and closes with one line for each part.
#
# A part that needs what this machine lacks is skipped with the reason; with CI=true that is a failure, so
# that CI never passes on tests that it did not run.
set -uo pipefail
cd "$(dirname "$0")/.."

bin=.venv/bin
artifacts=tests/_artifacts
summary=()
failed=0
num_tried_again=0

case "${1:-}" in
    quick) chosen="not long and not release and not quality and not slow" ;;
    long) chosen="long and not release and not quality" ;;
    all) chosen="" ;;
    *) chosen="not long and not release and not quality" ;;
esac

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

# Installs what package-lock.json names, where it is not there yet.
packages() {
    [ "$1/node_modules/.package-lock.json" -nt "$1/package-lock.json" ] ||
        npm ci --no-audit --no-fund --prefix "$1"
}

# Chained with &&, because `set -e` has no effect in what an `if` calls.
front_end() {
    packages widgets &&
        packages widgets/labextension &&
        npm run typecheck --prefix widgets &&
        npm run typecheck --prefix widgets/labextension &&
        npm test --prefix widgets
}

# What is committed must be what the sources give: nobody reviews a bundle by eye.
built_front_end() (
    before=$(mktemp -d) || exit 1
    trap 'rm -rf "$before"' EXIT
    cp -R nbgpu/static nbgpu/labextension "$before" &&
        npm run build --prefix widgets && npm run build --prefix widgets/labextension || exit 1
    diff -rq "$before/static" nbgpu/static && diff -rq "$before/labextension" nbgpu/labextension ||
        { echo "nbgpu/static or nbgpu/labextension was not what widgets/ builds. It is now: commit it."; exit 1; }
)

# All that the two parts read and write, so that they run again only after a change of it.
front_end_now() {
    find widgets nbgpu/static nbgpu/labextension -type f -not -path '*/node_modules/*' -not -path '*/lib/*' \
        -not -name '*.tsbuildinfo' -exec sha256sum {} + | sort | sha256sum
}

# Several files side by side take less time, because some tests wait; tests/conftest.py says how many.
# What failed beside others is tried once more alone: a failure that does not come again is shown with its reason and
# counted in the summary, and is to be mended, but does not hide what all the other tests say.
python_tests() {
    "$bin/python" -m pytest -m "$chosen" "$@" -n auto --dist loadfile --no-loadscope-reorder \
        --durations=40 --durations-min=2 && return
    [ $? -eq 1 ] || return 1
    num_tried_again=$(grep -c ': true' .pytest_cache/v/cache/lastfailed 2>/dev/null)
    printf '\n--- what failed above, alone\n'
    "$bin/python" -m pytest -m "$chosen" "$@" --last-failed --last-failed-no-failures none
}

if [ "${1:-}" = quick ]; then
    part "pytest" python_tests tests/unit
else
    if [ "${1:-}" != long ]; then
        part "style" "$bin/ruff" check .
        part "format" "$bin/ruff" format --check .
        part "types" "$bin/mypy"
        if command -v npm >/dev/null && command -v node >/dev/null; then
            stamp=$(front_end_now)
            if [ "$stamp" = "$(cat "$artifacts/front-end-passed" 2>/dev/null)" ]; then
                summary+=("passed   front end (before: nothing of it has changed)")
            else
                before=$failed
                part "front end" front_end
                part "front end, as committed" built_front_end
                [ "$failed" -ne "$before" ] || { mkdir -p "$artifacts" && front_end_now >"$artifacts/front-end-passed"; }
            fi
        else
            skip "front end" "there is no node or npm here (apt-get install nodejs npm)"
        fi
    fi
    if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
        skip "browser tests" "there is no Chromium here (apt-get install chromium)"
    fi
    # The long tests have two hosts each, or a browser: one file more than cores keeps both cores busy.
    part "pytest" python_tests $([ "${1:-}" != long ] || echo "--maxprocesses $(($(nproc) + 1))")
fi

printf '\n=== summary\n'
printf '%s\n' "${summary[@]}" "tests that failed beside others and were tried again alone: $num_tried_again"
exit $failed
