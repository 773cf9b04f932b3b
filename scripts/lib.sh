# shellcheck shell=bash
# What every script here shares: where things are, and how it speaks.
# Source it; it changes nothing but shell variables.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${MILLRACE_TARGET_DIR:-$repo/target}
guest_root=${MILLRACE_GUEST_ROOT:-$target/guest-root}
guest_dir=$target/guest
export repo target guest_root guest_dir

say() { printf 'millrace: %s\n' "$*"; }

# Ends the script. The first argument is what went wrong, each further one a line of advice.
die() {
    printf 'millrace: %s\n' "$1" >&2
    shift
    local line
    for line in "$@"; do printf '          %s\n' "$line" >&2; done
    exit 1
}

# stage TEXT COMMAND...: runs the command and says how long it took. Not to be used in a
# condition: that would switch off the shell's stop-at-errors inside the command.
stage() {
    local text=$1 start=$SECONDS
    shift
    say "$text ..."
    "$@"
    say "$text: $((SECONDS - start)) s"
}

have() { command -v "$1" >/dev/null 2>&1; }

# Runs a command as root: directly, or through sudo where that asks nothing or can ask.
as_root() {
    if ((EUID == 0)); then
        "$@"
    elif have sudo && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
        sudo "$@"
    else
        return 126
    fi
}

# install_packages PACKAGE...: Debian packages, on the host.
install_packages() {
    have apt-get || die "these packages are missing, and there is no apt-get to install them: $*" \
        "Install them (or your system's equivalents), then run this again."
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null || {
        (($? != 126)) || die "these packages are missing: $*" \
            "Run as root:  apt-get install $*"
        die "apt-get update failed: is the network there?"
    }
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        die "apt-get install $* failed; its message is above."
}
