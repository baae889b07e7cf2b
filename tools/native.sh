#!/usr/bin/env bash
# Adds Mooncake and NIXL to a virtual environment (.venv, or the one named), without root.
# System libraries that Mooncake needs and this machine lacks are fetched as Debian packages and unpacked
# beside it. What cannot be had is said in one line and left out; that is not a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

venv=${1:-.venv}
python=$venv/bin/python
native=$venv/native
mooncake=mooncake-transfer-engine-non-cuda==0.3.13.post1
nixl=nixl-cu13==1.5.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say_skipped() { # name, cause, remedy
    echo "$1 skipped: $2; $3"
}

# Whether the transport finds its library, the way the transport itself looks for it.
is_there() { # module
    "$python" -c 'import sys; from baton.transport.library.base import import_native as find
find((sys.argv[1],))' "$1" >"$work/found" 2>&1
}

# A wheel alone: what these two ask for besides (torch, an HTTP server) is not needed to move bytes.
install_wheel() { # requirement
    "$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps "$1" \
        >"$work/pip" 2>&1
}

last_line() { # file
    grep -v '^[[:space:]]*$' "$1" | tail -n 1
}

# The folders with unpacked libraries, as a search path.
unpacked() {
    find "$native" -name 'lib*.so.*' -printf '%h\n' 2>/dev/null | sort -u | paste -sd :
}

# Libraries that Mooncake's engine needs and neither the system nor the unpacked folders have.
lacking() {
    local engine
    engine=$(find "$venv"/lib/python*/site-packages/mooncake -name 'engine*.so' -print -quit)
    LD_LIBRARY_PATH=$(unpacked) ldd "$engine" | awk '/not found/ { print $1 }' | sort -u
}

# The package of a library; some distributions renamed theirs when time_t grew.
package_of() { # soname
    case $1 in
    libibverbs.so.1) echo libibverbs1 ;;
    libnuma.so.1) echo libnuma1 ;;
    libcurl.so.4) echo libcurl4t64 libcurl4 ;;
    libnl-3.so.200) echo libnl-3-200 ;;
    libnl-route-3.so.200) echo libnl-route-3-200 ;;
    esac
}

# apt with lists of its own, where the system has none that a user could read.
apt_options=()
use_own_lists() {
    mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial"
    apt_options=(-o "Dir::State=$work/state" -o "Dir::State::lists=$work/state/lists" -o "Dir::Cache=$work/cache"
        -o Dir::State::status=/var/lib/dpkg/status -o Debug::NoLocking=1 -o APT::Sandbox::User=)
    apt-get "${apt_options[@]}" update >"$work/apt" 2>&1
}

# The first of some packages that can be downloaded.
choose_package() { # packages
    local name
    for name in "$@"; do
        [[ $(apt-cache "${apt_options[@]}" show "$name" 2>/dev/null) == *Filename:* ]] && echo "$name" && return
    done
    return 1
}

# The libraries that a package depends on itself.
depends_on() { # package
    apt-cache "${apt_options[@]}" depends --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances "$1" | awk '$1 ~ /Depends:/ && $2 ~ /^lib/ { print $2 }' | grep -vx libc6
}

is_installed() { # package
    [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == *'ok installed'* ]]
}

# A package and all libraries below it, as far as they are not installed.
needed() { # package
    local waiting=("$1") found=" " name other
    while [ ${#waiting[@]} -gt 0 ]; do
        name=${waiting[0]}
        waiting=("${waiting[@]:1}")
        case $found in *" $name "*) continue ;; esac
        is_installed "$name" && continue
        found+="$name "
        for other in $(depends_on "$name"); do waiting+=("$other"); done
    done
    echo "$found"
}

unpack() { # package
    local name
    for name in $(needed "$1"); do
        (cd "$work" && apt-get "${apt_options[@]}" download "$name" >"$work/apt" 2>&1) || return 1
    done
    for name in "$work"/*.deb; do
        dpkg-deb -x "$name" "$native" || return 1
    done
    rm -f "$work"/*.deb
}

# Fetches what is lacking, until nothing is; says why not.
complete() {
    local soname candidates package
    for soname in $(lacking); do
        candidates=$(package_of "$soname")
        [ -n "$candidates" ] || { echo "$soname is missing and its package is not known here" && return 1; }
        command -v apt-get dpkg-deb >/dev/null ||
            { echo "$soname is missing and there is no apt-get to fetch it with" && return 1; }
        # shellcheck disable=SC2086  # candidates are words
        package=$(choose_package $candidates) || { use_own_lists && package=$(choose_package $candidates); } ||
            { echo "$soname is missing and apt-get knows no package for it ($(last_line "$work/apt"))" && return 1; }
        unpack "$package" || { echo "$package cannot be fetched ($(last_line "$work/apt"))" && return 1; }
    done
}

add_mooncake() {
    local remedy="install libibverbs1, libnuma1 and libcurl4, then run tools/native.sh again" cause
    is_there mooncake.engine && echo "mooncake ready" && return
    install_wheel "$mooncake" ||
        { say_skipped mooncake "$(last_line "$work/pip")" "$mooncake has wheels for Linux on x86_64 and aarch64" && return; }
    cause=$(complete) || { say_skipped mooncake "$cause" "$remedy" && return; }
    is_there mooncake.engine && echo "mooncake ready" && return
    say_skipped mooncake "$(last_line "$work/found")" "$remedy"
}

add_nixl() {
    is_there nixl_cu13._bindings && echo "nixl ready" && return
    install_wheel "$nixl" ||
        { say_skipped nixl "$(last_line "$work/pip")" "$nixl has wheels for Linux on x86_64 and aarch64" && return; }
    is_there nixl_cu13._bindings && echo "nixl ready" && return
    say_skipped nixl "$(last_line "$work/found")" "see the wheel's notes for this system"
}

[ -x "$python" ] || { echo "native skipped: no $python; run make setup first" && exit 0; }
add_mooncake
add_nixl
exit 0
