# shellcheck shell=bash
# A daemon of our own in a temporary folder, for the demo and the benchmark. Source it after lib.sh.

millrace=${MILLRACE_BIN:-$target/release/millrace}
work=$(mktemp -d "${TMPDIR:-/tmp}/millrace.XXXXXX")
export MILLRACE_RUN_DIR=$work/run
daemon=

stop_daemon() {
    if [[ -n $daemon ]]; then
        kill "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap stop_daemon EXIT

start_daemon() { # OPTION-OF-SERVE...
    [[ -x $millrace ]] || die "there is no $millrace" "Run scripts/build first."
    "$millrace" serve --state-dir "$work/state" --run-dir "$MILLRACE_RUN_DIR" "$@" 2>"$work/serve.log" &
    daemon=$!
    local tries=0
    until "$millrace" status >/dev/null 2>&1; do
        if ! kill -0 "$daemon" 2>/dev/null || ((++tries > 100)); then
            cat "$work/serve.log" >&2
            die "millrace serve did not come up; what it said is above."
        fi
        sleep 0.1
    done
}

# Runs a command of the daemon's client, and shows it.
step() {
    printf '$ millrace %s\n' "$*"
    "$millrace" "$@"
}
