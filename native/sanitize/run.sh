#!/usr/bin/env bash
# Builds the kernels under AddressSanitizer and UBSan, for every instruction set of this CPU, and the
# pool and the queue under ThreadSanitizer, and runs them; `refused` is the pool where threads cannot be made.
# Usage: run.sh kernels|pool|queue|refused [compiler flags...]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
out="$(mktemp -d)"
trap 'rm -rf "$out"' EXIT
part="$1"
shift
compiler="${CXX:-c++}"
common=(-std=c++17 -g -O1 -Wno-unknown-pragmas "$@")

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
checks=(-fsanitize=address,undefined -fno-sanitize-recover=all)
"$compiler" "${common[@]}" "${checks[@]}" -c "$here/kernels.cpp" -o "$out/driver.o"
for isa in $(isas); do
  # shellcheck disable=SC2046
  "$compiler" "${common[@]}" "${checks[@]}" -ffp-contract=off -fno-math-errno -fno-trapping-math \
    $(flags_of "$isa") -DOT_TABLE=kTested "-DOT_NAME=\"$isa\"" -c "$here/../kernels.cpp" -o "$out/$isa.o"
  "$compiler" "${checks[@]}" "$out/driver.o" "$out/$isa.o" -o "$out/$isa"
  "$out/$isa"
done
