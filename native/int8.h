// A step on int8 state, block by block.
#pragma once

#include "rule.h"
#include "stream.h"

namespace offloadtrain {
namespace {

using ExpAvgCode = Minifloat<3, 127>;
using ExpAvgSqCode = Minifloat<3, 256>;  // stored less one: zero, which would blow an update up, is no code

// A block between decoding and encoding, and the bits of its largest moments. As integers these have
// a total order: not-a-number above infinity above the rest, whatever the order of comparison.
struct Block {
  alignas(64) float master[kBlock];
  alignas(64) float exp_avg[kBlock];
  alignas(64) float exp_avg_sq[kBlock];
  i32 largest_exp_avg, largest_exp_avg_sq;
};

inline i32 larger(i32 found, float value) {
  const i32 magnitude = static_cast<i32>(bits_of(value) & kMagnitude);
  return found < magnitude ? magnitude : found;
}

template <typename Grad, typename Weight, typename Rule>
OT_INLINE void int8_update(const Rule& given, const Int8State& in,
                           const typename Grad::Storage* grad, Block& block, i32 count) {
  const Rule rule = given;
  const Int8State old = in;
  const float exp_avg_scale = *in.exp_avg_scale, exp_avg_sq_scale = *in.exp_avg_sq_scale;
  i32 largest_m = 0, largest_v = 0;
  OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    const u32 stored = old.exp_avg[i];
    const float size = ExpAvgCode::decode(stored & 0x7fu, exp_avg_scale);
    const float m = float_of(bits_of(size) | ((stored & 0x80u) << 24));
    const float v = ExpAvgSqCode::decode(old.exp_avg_sq[i] + 1u, exp_avg_sq_scale);
    const float g = Grad::load_canonical(grad[i]);
    const Moments x = rule(g, Weight::join(old.weight[i], old.correction[i]), m, v);
    block.master[i] = x.master;
    block.exp_avg[i] = x.exp_avg;
    block.exp_avg_sq[i] = x.exp_avg_sq;
    largest_m = larger(largest_m, x.exp_avg);
    largest_v = larger(largest_v, x.exp_avg_sq);
  }
  block.largest_exp_avg = largest_m;
  block.largest_exp_avg_sq = largest_v;
}

// What a block's codes are multiplied by, and its inverse. Below kLeast nothing matters to Adam's
// eps, and inverses would overflow. A block with a value that is not finite is NaN as a whole.
struct Scale {
  float scale, inverse;

  template <typename Code>
  static Scale of(i32 bits) {
    const float largest = float_of(static_cast<u32>(bits));
    if (!less(static_cast<u32>(bits), kInfinity)) return {float_of(kNan), 0.0f};
    constexpr float kLeast = 0x1p-80f;
    const float bound = largest < kLeast ? kLeast : largest;
    return {bound * (1.0f / Code::top()), Code::top() / bound};
  }
};

template <typename Weight>
OT_INLINE void int8_encode(const Random& given_random, u32 element, const Block& block,
                           float exp_avg_inverse, float exp_avg_sq_inverse, const Int8State& out,
                           i32 count) {
  const Random random = given_random;
  const Int8State fresh = out;
  const float least = 1.0f + ExpAvgSqCode::decode(1);
  OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    const u32 bits = random.bits(element + static_cast<u32>(i));
    const u32 x = Weight::encode(block.master[i], bits & 0xffu);
    fresh.weight[i] = Plus8::weight(x);
    fresh.correction[i] = Plus8::correction(x);
    const u32 m = bits_of(block.exp_avg[i]);
    const float m_kept = ExpAvgCode::widened(float_of(m & kMagnitude), exp_avg_inverse);
    const u32 m_code = ExpAvgCode::encode(m_kept, (bits >> 8) & 0xfffu);
    fresh.exp_avg[i] = static_cast<u8>(m_code | ((m & kSign) >> 24));
    const float v = ExpAvgSqCode::widened(block.exp_avg_sq[i], exp_avg_sq_inverse);
    const float v_kept = v < least ? least : v;
    fresh.exp_avg_sq[i] = static_cast<u8>(ExpAvgSqCode::encode(v_kept, bits >> 20) - 1u);
  }
}

Int8State at(const Int8State& s, i64 lo) {
  return {s.weight + lo,  s.correction + lo, s.exp_avg + lo, s.exp_avg_sq + lo, s.exp_avg_scale + lo / kBlock,
          s.exp_avg_sq_scale + lo / kBlock};
}

// A block's scales, and its codes on their way out.
template <typename Grad, typename Weight, typename Rule>
OT_INLINE void int8_block(const Rule& rule, const Random& random, u32 element,
                          const Int8State& in, const Int8State& out,
                          const typename Grad::Storage* grad, i32 count) {
  Block block;
  int8_update<Grad, Weight>(rule, in, grad, block, count);
  const Scale m = Scale::of<ExpAvgCode>(block.largest_exp_avg);
  const Scale v = Scale::of<ExpAvgSqCode>(block.largest_exp_avg_sq);
  if (m.inverse == 0.0f || v.inverse == 0.0f) {
    for (i32 i = 0; i < count; ++i) block.exp_avg[i] = block.exp_avg_sq[i] = 0.0f;
  }
  int8_encode<Weight>(random, element, block, m.inverse, v.inverse, out, count);
  *out.exp_avg_scale = m.scale;
  *out.exp_avg_sq_scale = v.scale;
}

template <typename Grad, typename Weight, typename Rule>
void int8_state(const Rule& rule, const Int8State& in, const Int8State& out, const Gradient& grad,
                const Run& run) {
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.weight != in.weight;
  Output<u16> weight(out.weight, doubled);
  Output<i8> correction(out.correction, doubled);
  Output<u8> exp_avg(out.exp_avg, doubled), exp_avg_sq(out.exp_avg_sq, doubled);
  for (i64 i = run.lo; i < run.hi; i += kBlock) {
    const i32 count = static_cast<i32>(run.hi - i < kBlock ? run.hi - i : kBlock);
    const u32 element = run.element + static_cast<u32>(i - run.lo);
    const Int8State target = {weight.at(i),     correction.at(i), exp_avg.at(i),
                              exp_avg_sq.at(i), out.exp_avg_scale + i / kBlock,
                              out.exp_avg_sq_scale + i / kBlock};
    if (count == kBlock) {
      int8_block<Grad, Weight>(rule, random, element, at(in, i), target, grads + i, kBlock);
    } else {
      int8_block<Grad, Weight>(rule, random, element, at(in, i), target, grads + i, count);
    }
    weight.done(i, count);
    correction.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
  }
  if (doubled) finish_streaming();
}

template <typename Grad>
void int8_from(const Adam& adam, const Int8State& in, const Int8State& out, const Gradient& grad,
               DType weight_dtype, const Run& run) {
  with_rule(adam, [&](const auto& rule) {
    if (weight_dtype == DType::bfloat16) int8_state<Grad, BFloat16Plus8>(rule, in, out, grad, run);
    if (weight_dtype == DType::float16) int8_state<Grad, Float16Plus8>(rule, in, out, grad, run);
  });
}

void adam_int8(const Adam& adam, const Int8State& in, const Int8State& out, const Gradient& grad,
               DType weight_dtype, const Run& run) {
  switch (grad.dtype) {
    case DType::float32: return int8_from<Float32>(adam, in, out, grad, weight_dtype, run);
    case DType::bfloat16: return int8_from<BFloat16>(adam, in, out, grad, weight_dtype, run);
    case DType::float16: return int8_from<Float16>(adam, in, out, grad, weight_dtype, run);
    case DType::none: return;
  }
}

}  // namespace
}  // namespace offloadtrain
