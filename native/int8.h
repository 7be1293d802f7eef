// A step on int8 state, block by block.
#pragma once

#include "rules.h"
#include "stream.h"

namespace offloadtrain {
namespace {

using SignedCode = Minifloat<3, 127>;
using UnsignedCode = Minifloat<3, 256>;  // stored less one: zero, which would blow an update up, is no code

// A block between decoding and encoding, and the bits of its largest moments. As integers these have
// a total order: not-a-number above infinity above the rest, whatever the order of comparison.
struct Block {
  alignas(64) float master[kBlock];
  alignas(64) float first[kBlock];
  alignas(64) float second[kBlock];
  i32 largest_first, largest_second;
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
  float first_scale = 0.0f, second_scale = 0.0f;
  if constexpr (Rule::kMoments > 0) first_scale = *in.first_scale;
  if constexpr (Rule::kMoments > 1) second_scale = *in.second_scale;
  i32 largest_m = 0, largest_v = 0;
  OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    float m = 0.0f, v = 0.0f;
    if constexpr (Rule::kMoments > 0) {
      const u32 stored = old.first[i];
      const float size = SignedCode::decode(stored & 0x7fu, first_scale);
      m = float_of(bits_of(size) | ((stored & 0x80u) << 24));
    }
    if constexpr (Rule::kMoments > 1) v = UnsignedCode::decode(old.second[i] + 1u, second_scale);
    const float g = Grad::load_canonical(grad[i]);
    const Values x = rule(g, Weight::join(old.weight[i], old.correction[i]), m, v);
    block.master[i] = x.master;
    if constexpr (Rule::kMoments > 0) {
      block.first[i] = x.first;
      largest_m = larger(largest_m, x.first);
    }
    if constexpr (Rule::kMoments > 1) {
      block.second[i] = x.second;
      largest_v = larger(largest_v, x.second);
    }
  }
  block.largest_first = largest_m;
  block.largest_second = largest_v;
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

template <typename Rule, typename Weight>
OT_INLINE void int8_encode(const Random& given_random, u32 element, const Block& block,
                           float first_inverse, float second_inverse, const Int8State& out,
                           i32 count) {
  const Random random = given_random;
  const Int8State fresh = out;
  const float least = 1.0f + UnsignedCode::decode(1);
  OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    const u32 bits = random.bits(element + static_cast<u32>(i));
    const u32 x = Weight::encode(block.master[i], bits & 0xffu);
    fresh.weight[i] = Plus8::weight(x);
    fresh.correction[i] = Plus8::correction(x);
    if constexpr (Rule::kMoments > 0) {
      const u32 m = bits_of(block.first[i]);
      const float m_kept = SignedCode::widened(float_of(m & kMagnitude), first_inverse);
      const u32 m_code = SignedCode::encode(m_kept, (bits >> 8) & 0xfffu);
      fresh.first[i] = static_cast<u8>(m_code | ((m & kSign) >> 24));
    }
    if constexpr (Rule::kMoments > 1) {
      const float v = UnsignedCode::widened(block.second[i], second_inverse);
      const float v_kept = v < least ? least : v;
      fresh.second[i] = static_cast<u8>(UnsignedCode::encode(v_kept, bits >> 20) - 1u);
    }
  }
}

Int8State at(const Int8State& s, i64 lo) {
  return {s.weight + lo,           s.correction + lo,       shifted(s.first, lo),
          shifted(s.second, lo),   shifted(s.first_scale, lo / kBlock),
          shifted(s.second_scale, lo / kBlock)};
}

// A block's scales, and its codes on their way out.
template <typename Grad, typename Weight, typename Rule>
OT_INLINE void int8_block(const Rule& rule, const Random& random, u32 element,
                          const Int8State& in, const Int8State& out,
                          const typename Grad::Storage* grad, i32 count) {
  Block block;
  int8_update<Grad, Weight>(rule, in, grad, block, count);
  const Scale m = Scale::of<SignedCode>(block.largest_first);
  const Scale v = Scale::of<UnsignedCode>(block.largest_second);
  if (m.inverse == 0.0f || v.inverse == 0.0f) {
    for (i32 i = 0; i < count; ++i) block.first[i] = block.second[i] = 0.0f;
  }
  int8_encode<Rule, Weight>(random, element, block, m.inverse, v.inverse, out, count);
  if constexpr (Rule::kMoments > 0) *out.first_scale = m.scale;
  if constexpr (Rule::kMoments > 1) *out.second_scale = v.scale;
}

template <typename Grad, typename Weight, typename Rule>
void int8_state(const Rule& rule, const Int8State& in, const Int8State& out, const Gradient& grad,
                const Run& run) {
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.weight != in.weight;
  Output<u16> weight(out.weight, doubled);
  Output<i8> correction(out.correction, doubled);
  Output<u8> first(out.first, doubled), second(out.second, doubled);
  for (i64 i = run.lo; i < run.hi; i += kBlock) {
    const i32 count = static_cast<i32>(run.hi - i < kBlock ? run.hi - i : kBlock);
    const u32 element = run.element + static_cast<u32>(i - run.lo);
    const Int8State scales = at(out, i);
    const Int8State target = {weight.at(i), correction.at(i),   first.at(i),
                              second.at(i), scales.first_scale, scales.second_scale};
    if (count == kBlock) {
      int8_block<Grad, Weight>(rule, random, element, at(in, i), target, grads + i, kBlock);
    } else {
      int8_block<Grad, Weight>(rule, random, element, at(in, i), target, grads + i, count);
    }
    weight.done(i, count);
    correction.done(i, count);
    if constexpr (Rule::kMoments > 0) first.done(i, count);
    if constexpr (Rule::kMoments > 1) second.done(i, count);
  }
  if (doubled) finish_streaming();
}

// Adagrad's sum is neither signed nor does it ever decay: see docs/state_formats.md.
template <typename Rule>
constexpr bool kKeptInInt8 = true;
template <>
constexpr bool kKeptInInt8<Adagrad> = false;

void update_int8(const Step& step, const Int8State& in, const Int8State& out, const Gradient& grad,
                 DType weight_dtype, const Run& run) {
  with_rule(step, [&](auto rule) {
    if constexpr (kKeptInInt8<decltype(rule)>) {
      with_format(grad.dtype, [&](auto format) {
        using Grad = decltype(format);
        if (weight_dtype == DType::bfloat16) int8_state<Grad, BFloat16Plus8>(rule, in, out, grad, run);
        if (weight_dtype == DType::float16) int8_state<Grad, Float16Plus8>(rule, in, out, grad, run);
      });
    }
  });
}

}  // namespace
}  // namespace offloadtrain
