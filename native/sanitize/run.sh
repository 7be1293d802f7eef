#!/usr/bin/env bash
# Builds the kernels under AddressSanitizer and UBSan, for every instruction set of this CPU, and the
# pool and the queue under ThreadSanitizer, and runs them; `refused` is the pool where threads cannot be made.
# `bits` compares what the kernels write, compiled as they are shipped, among these instruction sets; with
# CROSS naming a compiler for aarch64, such as aarch64-linux-gnu-g++, also with NEON, run by QEMU.
# Usage: run.sh kernels|bits|pool|queue|refused [compiler flags...]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
part="$1"
shift
compiler="${CXX:-c++}"
common=(-std=c++17 -g1 -O1 -Wno-unknown-pragmas "$@")

has() { grep -qw "$1" /proc/cpuinfo; }

isas() {
  echo baseline
  [ "$(uname -m)" = x86_64 ] || return 0
  if has avx2 && has fma; then echo avx2; else return 0; fi
  if has avx512f && has avx512bw && has avx512dq && has avx512vl; then echo avx512; fi
}

flags_of() {
  case "$1" in
    avx2) echo "-mavx2 -mfma" ;;
    avx512) echo "-mavx2 -mfma -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512" ;;
  esac
}

if [ "$part" = pool ] || [ "$part" = queue ]; then
  "$compiler" "${common[@]}" -fsanitize=thread -pthread "$here/$part.cpp" "$here/../$part.cpp" -o "$out/$part"
  TSAN_OPTIONS=halt_on_error=1 "$out/$part"
  exit
fi
if [ "$part" = refused ]; then
  "$compiler" "${common[@]}" -pthread "$here/refused.cpp" "$here/../pool.cpp" -ldl -o "$out/refused"
  "$out/refused"
  exit
fi
if [ "$part" = bits ]; then
  shipped=(-std=c++17 -O3 -Wno-unknown-pragmas -ffp-contract=off -fno-math-errno -fno-trapping-math "$@")
  # A compiler, a name for the instruction set, its flags, what runs programs: leaves what its kernels write in $out/NAME.
  written() {
    local build="$1" isa="$2" start="${4:-}"
    # shellcheck disable=SC2086
    "$build" "${shipped[@]}" $3 -DOT_TABLE=kTested "-DOT_NAME=\"$isa\"" -c "$here/../kernels.cpp" -o "$out/$isa.o"
    "$build" -std=c++17 -O1 ${start:+-static} "$here/bits.cpp" "$out/$isa.o" -o "$out/$isa.run"
    # shellcheck disable=SC2086
    $start "$out/$isa.run" >"$out/$isa"
    diff "$out/baseline" "$out/$isa" || { echo "$isa writes other bits than baseline" >&2; exit 1; }
    echo "$isa: $(wc -l <"$out/$isa") cases"
  }
  for isa in $(isas); do written "$compiler" "$isa" "$(flags_of "$isa")"; done
  [ -z "${CROSS:-}" ] || written "$CROSS" neon "" "${QEMU:-qemu-aarch64}"
  exit
fi
checks=(-fsanitize=address,undefined -fno-sanitize-recover=all)
"$compiler" "${common[@]}" "${checks[@]}" -c "$here/kernels.cpp" -o "$out/driver.o"
"$compiler" "${common[@]}" "${checks[@]}" -DPLANT_FAULT -c "$here/kernels.cpp" -o "$out/faulty.o"
for isa in $(isas); do
  # shellcheck disable=SC2046
  "$compiler" "${common[@]}" "${checks[@]}" -ffp-contract=off -fno-math-errno -fno-trapping-math \
    $(flags_of "$isa") -DOT_TABLE=kTested "-DOT_NAME=\"$isa\"" -c "$here/../kernels.cpp" -o "$out/$isa.o"
  "$compiler" "${checks[@]}" "$out/driver.o" "$out/$isa.o" -o "$out/$isa"
  "$out/$isa"
done
# Proof that a fault is seen: a buffer that is too short by one.
"$compiler" "${checks[@]}" "$out/faulty.o" "$out/baseline.o" -o "$out/faulty"
if "$out/faulty" 2>"$out/seen" || ! grep -q heap-buffer-overflow "$out/seen"; then
  cat "$out/seen" >&2
  echo "the planted fault was not seen" >&2
  exit 1
fi
echo "planted fault: seen"
