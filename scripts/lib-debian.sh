# shellcheck shell=bash
# Private trees of Debian packages: resolved with an apt configuration of their own, checked against the Debian archive's keys,
# unpacked. Nothing is installed on the host, root is not needed. For scripts/guest-root and scripts/hw-tools, which source it
# after scripts/lib.sh and set:
#
#   work      the tree under construction; apt's files go into $work/apt, packages into $work/debs
#   suites    the suites to take packages from
#   unneeded  a pattern of dependencies to leave out

# Prints the URI of the host's own apt sources whose path ends in $1, the first one there is.
host_mirror() {
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
        sed -e 's/#.*//' | tr -s '[:blank:]' '\n' | grep -E "^[a-z+]+:.*/($1)/?$" | head -n1 || true
}

archive_keys() {
    local key
    for key in /usr/share/keyrings/debian-archive-keyring.{pgp,gpg}; do
        if [[ -e $key ]]; then echo "$key" && return; fi
    done
    die "the Debian archive's keys are not on this machine." "apt-get install debian-archive-keyring"
}

# write_apt_sources SECURITY: the suites, and that one of the security archive if it is not empty.
write_apt_sources() {
    local keys mirror security
    keys=$(archive_keys)
    mirror=${MILLRACE_DEBIAN_MIRROR:-$(host_mirror 'debian|mirrors/debian.list')}
    security=$(host_mirror 'debian-security|mirrors/debian-security.list')
    [[ -n $mirror ]] || die "the host's apt sources name no Debian archive." \
        "Set MILLRACE_DEBIAN_MIRROR to the URI of one and run this again."
    mkdir -p "$work/apt/state/lists/partial" "$work/apt/cache/archives/partial" "$work/debs"
    : >"$work/apt/status"
    : >"$work/apt/preferences"
    {
        # shellcheck disable=SC2154
        printf "deb [signed-by=$keys] $mirror %s main\n" "${suites[@]}"
        [[ -z $1 || -z $security ]] || printf 'deb [signed-by=%s] %s %s main\n' "$keys" "$security" "$1"
    } >"$work/apt/sources.list"
}

# apt's settings: read after the host's own, whose proxy still applies, and whose hooks do not.
write_apt_settings() {
    local dir=$work/apt
    cat >"$dir/apt.conf" <<EOF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
#clear APT::Architectures;
Dir::State "$dir/state";
Dir::State::status "$dir/status";
Dir::Cache "$dir/cache";
Dir::Log "/dev/null";
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "$dir/preferences";
Dir::Etc::preferencesparts "/dev/null";
APT::Architecture "amd64";
APT::Architectures:: "amd64";
APT::Default-Release "";
APT::Install-Recommends "false";
APT::Sandbox::User "";
APT::Update::Error-Mode "any";
Debug::NoLocking "true";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::Retries "3";
Acquire::http::Timeout "60";
EOF
}

private_apt() { # PROGRAM ARGUMENT...
    local program=$1
    shift
    "$program" -qq -c "$work/apt/apt.conf" "$@"
}

fetch_lists() {
    private_apt apt-get update || die "the Debian archive's package lists could not be fetched." \
        "Is the network there? Is a proxy needed (apt's Acquire::http::Proxy)?" \
        "NO_PUBKEY above means old keys: apt-get install --only-upgrade debian-archive-keyring"
}

# resolve PACKAGE...: writes these and what they need to $work/packages, as NAME=VERSION.
resolve() {
    # shellcheck disable=SC2154
    private_apt apt-get install --simulate -q=1 "$@" |
        awk '$1 == "Inst" { sub(/^\(/, "", $3); print $2 "=" $3 }' |
        grep -vE "^($unneeded)=" >"$work/packages" || true
    [[ -s $work/packages ]] || die "apt could not resolve $*; its message is above."
}

download() { # WHAT
    local list
    mapfile -t list <"$work/packages"
    (cd "$work/debs" && private_apt apt-get download "${list[@]}") ||
        die "the packages of $1 could not be downloaded: is there network, and 1 GiB of disk?"
}

unpack_one() { # DEB DIRECTORY
    dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink --no-same-owner -C "$2" \
        --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' \
        --exclude='./usr/share/info' --exclude='./usr/lib/modules/*/kernel' --exclude='./boot/System.map*' \
        --exclude='./usr/lib/x86_64-linux-gnu/gconv'
}

unpack() {
    local name
    for name in bin sbin lib lib64; do
        mkdir -p "$work/usr/$name"
        ln -s "usr/$name" "$work/$name"
    done
    export -f unpack_one
    # shellcheck disable=SC2016
    find "$work/debs" -name '*.deb' -print0 |
        xargs -0 -P "$(nproc)" -I{} bash -euo pipefail -c 'unpack_one "$1" "$2"' unpack {} "$work" ||
        die "a package could not be unpacked: is the disk full?"
}

# check_programs PROGRAM...: do they find all their libraries in the tree?
check_programs() {
    local program missing
    for program in "$@"; do
        missing=$(MILLRACE_GUEST_ROOT=$work "$repo/scripts/in-root" --libraries "$program" 2>&1 | grep -E 'not found|cannot open shared object' || true)
        [[ -z $missing ]] || die "$program in $work lacks libraries: $missing" \
            "Debian's dependencies changed: adapt 'unneeded' in ${0##*/}."
    done
}

require_apt() { # WHAT ADVICE
    if have apt-get && have dpkg-deb; then return; fi
    die "$1 from Debian packages, and this host has no apt." "$2"
}
