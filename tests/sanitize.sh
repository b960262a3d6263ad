#!/usr/bin/env bash
# Runs Python tests against an extension built with a sanitizer, in a folder of its own.
#   tests/sanitize.sh thread|address [pytest arguments]
# Fails if a test fails or the sanitizer has anything to report. Needs make setup and GCC.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python

case "${1:-}" in
    # Thread sanitizer gives up on a forked child that starts threads.
    thread) sanitizers=thread libraries=(libtsan.so) selection=(-m "not forks and not nightly") ;;
    # libstdc++ comes along, so that address sanitizer finds the C++ throw that it wraps.
    address) sanitizers=address,undefined libraries=(libasan.so libstdc++.so) selection=() ;;
    *) echo "usage: tests/sanitize.sh thread|address [pytest arguments]" >&2; exit 2 ;;
esac
build=$PWD/build/python-$1
shift

# Debug leaves out link-time optimisation, half of the time of this build.
"$python" -m pip install --quiet --quiet --no-deps --no-build-isolation --upgrade \
    --target "$build/site" --config-settings "build-dir=$build/cmake" \
    --config-settings cmake.build-type=Debug --config-settings cmake.define.CMAKE_CXX_FLAGS=-O1 \
    --config-settings "cmake.define.PYKERN_SANITIZE=$sanitizers" .

# The venv's interpreter would import its own editable build first. Its base interpreter, given the
# venv's packages by path, runs no .pth file and so knows of the sanitized build only.
base=$("$python" -c 'import sys; print(sys._base_executable)')
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH=$build/site:$packages:$PWD PYTHONSAFEPATH=1
export PYKERN_EXAMPLES=few
# OpenMP's library is not instrumented: its threads would seem to read the stack of their caller
# when they have long ended.
export OMP_NUM_THREADS=1
export PYTHONMALLOC=malloc  # every Python object is an allocation that the sanitizer sees

# Reports go to files, so that one from a process that a test starts is seen as well. The undefined
# behaviour sanitizer knows standard error only, which pytest must therefore leave alone.
# Python never frees all it allocates, so leaks are looked for by the C++ tests only.
rm -f "$build"/report.*
export TSAN_OPTIONS="log_path=$build/report:suppressions=$PWD/tests/thread_sanitizer.supp"
export ASAN_OPTIONS="log_path=$build/report:detect_leaks=0"
export UBSAN_OPTIONS=print_stacktrace=1
preload=$(for library in "${libraries[@]}"; do "${CXX:-c++}" -print-file-name="$library"; done)
# Thread sanitizer of GCC 12 cannot start under some kernels' address space randomisation.
run=(env "LD_PRELOAD=${preload//$'\n'/ }" "$base")
setarch -R true 2>/dev/null && run=(setarch -R "${run[@]}")

"${run[@]}" - "$build/site" <<'EOF'
import sys, pykern._C
if not pykern._C.__file__.startswith(sys.argv[1]):
    sys.exit(f"not the sanitized build: {pykern._C.__file__}")
EOF
status=0
# The project's pytest setting for pythonpath would put the checkout, which has no extension, first.
"${run[@]}" -m pytest -o pythonpath= --capture=sys -p no:cacheprovider "${selection[@]}" "$@" || status=$?
for report in "$build"/report.*; do
    [ -e "$report" ] || continue
    cat "$report" >&2
    status=1
done
exit "$status"
