// Master weights into narrow state, rounded to nearest, and out of it. The moments stay what they are.
#pragma once

#include "kernels.h"
#include "numbers.h"

namespace offloadtrain {
namespace {

void encode_split16(const float* master, u16* weight, i16* low, i64 lo, i64 hi) {
  OT_INDEPENDENT
  for (i64 i = lo; i < hi; ++i) {
    const float p = canonical(master[i]);
    weight[i] = Split::weight(p);
    low[i] = Split::low(p);
  }
}

// Half of the correction's last place, where a step has random bits.
constexpr u32 kHalf = 0x80u;

template <typename Weight>
void encode_loop(const float* master, u16* weight, i8* correction, i64 lo, i64 hi) {
  OT_INDEPENDENT
  for (i64 i = lo; i < hi; ++i) {
    const u32 sign = bits_of(master[i]) & kSign;
    const float magnitude = canonical(float_of(bits_of(master[i]) & kMagnitude));
    const u32 x = Weight::encode(magnitude, kHalf);
    weight[i] = static_cast<u16>(Plus8::weight(x) | (sign >> 16));
    correction[i] = Plus8::correction(x);
  }
}

void encode_int8(const float* master, u16* weight, i8* correction, DType weight_dtype, i64 lo,
                 i64 hi) {
  if (weight_dtype == DType::bfloat16) encode_loop<BFloat16Plus8>(master, weight, correction, lo, hi);
  if (weight_dtype == DType::float16) encode_loop<Float16Plus8>(master, weight, correction, lo, hi);
}

void decode_split16(const u16* weight, const i16* low, float* master, i64 lo, i64 hi) {
  OT_INDEPENDENT
  for (i64 i = lo; i < hi; ++i) master[i] = Split::join(weight[i], low[i]);
}

template <typename Weight>
void decode_loop(const u16* weight, const i8* correction, float* master, i64 lo, i64 hi) {
  OT_INDEPENDENT
  for (i64 i = lo; i < hi; ++i) {
    master[i] = Weight::join(static_cast<u32>(weight[i]) << 16, correction[i]);
  }
}

void decode_int8(const u16* weight, DType weight_dtype, const i8* correction, float* master, i64 lo,
                 i64 hi) {
  if (weight_dtype == DType::bfloat16) decode_loop<BFloat16Plus8>(weight, correction, master, lo, hi);
  if (weight_dtype == DType::float16) decode_loop<Float16Plus8>(weight, correction, master, lo, hi);
}

}  // namespace
}  // namespace offloadtrain
