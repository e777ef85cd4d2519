#!/bin/sh
# Builds and runs the native stress test and the fuzzing of the trace reader and of segments (files: TRACES="...", SEGMENTS="...") plain and under each sanitizer: csrc/sanitize.sh [address|thread|undefined ...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
for sanitizer in ${*:-none address undefined thread}; do
  build="${TMPDIR:-/tmp}/mappnb-sanitize-$sanitizer"
  [ "$sanitizer" = none ] && flag="" || flag="$sanitizer"
  cmake -S "$here" -B "$build" -DCMAKE_BUILD_TYPE=Release -DMAPPNB_STRESS=ON -DMAPPNB_SANITIZE="$flag" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  cmake --build "$build" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
  printf "== %s\n" "$sanitizer"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=${LEAKS:-1} \
    "$build/recorder_stress" "${SPANS:-20000}"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/tensor_stats_stress"
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/trace_fuzz" "${MUTATIONS:-2000}" ${TRACES:-}
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 "$build/segment_fuzz" "${MUTATIONS:-2000}" ${SEGMENTS:-}
done
echo "sanitizers: all clean"
