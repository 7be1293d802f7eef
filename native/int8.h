// A step on int8 state, block by block.
#pragma once

#include "rules.h"
#include "stream.h"

namespace offloadtrain {
namespace {

using SignedCode = Minifloat<3, 127>;
using UnsignedCode = Minifloat<3, 256>;  // stored less one: zero, which would blow an update up, is no code

constexpr i32 kQuads = static_cast<i32>(kBlock) / 4;

// A block between the passes over it: element 4 * i + k is at [k][i], see [Note: Words of several
// elements]. `ahead`: what a master needs beside the first moment.
struct Block {
  alignas(64) float master[4][kQuads];
  alignas(64) float first[4][kQuads];
  alignas(64) float second[4][kQuads];
  alignas(64) float ahead[4][kQuads];
  alignas(64) u32 random[4][kQuads];
};

// The first products in Random of a block's elements, less that of the block's upper bits: to add that one is
// less work than to multiply each element. They change with every 2^16th element.
class Products {
 public:
  // `shifted`: Random::shifted() of the block's first element.
  OT_INLINE void prepare(u32 shifted) {
    if (low_ == (shifted & kLow)) return;
    low_ = shifted & kLow;
    for (u32 i = 0; i <= kLow; ++i) products_[i % 4][i / 4] = Random::multiplied(low_ ^ i);
  }
  OT_INLINE static u32 of_block(u32 shifted) { return Random::multiplied(shifted & ~kLow); }
  template <int kElement>
  OT_INLINE u32 of(i32 i) const { return products_[kElement][i]; }

 private:
  static constexpr u32 kLow = static_cast<u32>(kBlock) - 1u;
  alignas(64) u32 products_[4][kQuads];
  u32 low_ = ~0u;  // of no block
};

// Bits of magnitudes. As integers these have a total order, not-a-number above infinity above the rest,
// whatever the order of comparison.
OT_INLINE i32 magnitude(float value) { return static_cast<i32>(bits_of(value) & kMagnitude); }
OT_INLINE i32 larger(i32 a, i32 b) { return a < b ? b : a; }

// The bits of the largest magnitude of four elements, as a tree: as a chain of single elements this took a
// tenth of the step longer with AVX-512, on Zen 5.
OT_INLINE i32 largest_of_four(const float (&moments)[4][kQuads], i32 i) {
  const i32 front = larger(magnitude(moments[0][i]), magnitude(moments[1][i]));
  const i32 back = larger(magnitude(moments[2][i]), magnitude(moments[3][i]));
  return larger(front, back);
}

// The bits of the largest magnitude of each moment of a block.
struct Largest {
  i32 first, second;
};

template <int kElement, typename Rule>
OT_INLINE void int8_move(const Rule& rule, float g, u32 firsts, Halves first_codes, Halves second_codes,
                         float first_scale, float second_scale, Block& block, i32 i) {
  float m = 0.0f, v = 0.0f;
  if constexpr (Rule::kMoments > 0) {
    const float size = SignedCode::decode(upper_half<kElement>(first_codes), first_scale);
    m = float_of(bits_of(size) | (byte_at<kElement, 24>(firsts) & kSign));
  }
  if constexpr (Rule::kMoments > 1) {
    v = UnsignedCode::decode(upper_half<kElement>(second_codes), second_scale);
  }
  const Moved x = rule.moved(g, block.master[kElement][i], m, v);
  block.first[kElement][i] = x.first;
  block.second[kElement][i] = x.second;
  block.ahead[kElement][i] = x.ahead;
}

// The first pass: the old masters, and the moments. The largest first moment is searched afterwards: with both
// searches in the loop, AVX2 has too few registers.
template <typename Grad, typename Weight, typename Rule>
OT_INLINE Largest int8_moments(const Rule& given, const Int8State& in, const typename Grad::Storage* grad,
                            Block& block) {
  const Rule rule = given;
  const Int8State old = in;
  float first_scale = 0.0f, second_scale = 0.0f;
  if constexpr (Rule::kMoments > 0) first_scale = *in.first_scale;
  if constexpr (Rule::kMoments > 1) second_scale = *in.second_scale;
  i32 largest_first = 0, largest_second = 0;
  OT_INDEPENDENT
  for (i32 i = 0; i < kQuads; ++i) {
    const u32 front = word_at(old.weight, 2 * i), back = word_at(old.weight, 2 * i + 1);
    const u32 corrections = word_at(old.correction, i);
    block.master[0][i] = Weight::join(upper_half<0>(front), signed_byte<0>(corrections));
    block.master[1][i] = Weight::join(upper_half<1>(front), signed_byte<1>(corrections));
    block.master[2][i] = Weight::join(upper_half<0>(back), signed_byte<2>(corrections));
    block.master[3][i] = Weight::join(upper_half<1>(back), signed_byte<3>(corrections));
    u32 m = 0;
    Halves first = {}, second = {};
    if constexpr (Rule::kMoments > 0) {
      m = word_at(old.first, i);
      first = SignedCode::widened_codes<0x7fu, 0u>(m);
    }
    if constexpr (Rule::kMoments > 1) second = UnsignedCode::widened_codes<0xffu, 1u>(word_at(old.second, i));
    const float g0 = Grad::template of_pair<0>(grad, 2 * i), g1 = Grad::template of_pair<1>(grad, 2 * i);
    const float g2 = Grad::template of_pair<0>(grad, 2 * i + 1);
    const float g3 = Grad::template of_pair<1>(grad, 2 * i + 1);
    int8_move<0>(rule, g0, m, first, second, first_scale, second_scale, block, i);
    int8_move<1>(rule, g1, m, first, second, first_scale, second_scale, block, i);
    int8_move<2>(rule, g2, m, first, second, first_scale, second_scale, block, i);
    int8_move<3>(rule, g3, m, first, second, first_scale, second_scale, block, i);
    if constexpr (Rule::kMoments > 1) largest_second = larger(largest_second, largest_of_four(block.second, i));
  }
  if constexpr (Rule::kMoments > 0) {
    OT_INDEPENDENT
    for (i32 i = 0; i < kQuads; ++i) largest_first = larger(largest_first, largest_of_four(block.first, i));
  }
  return {largest_first, largest_second};
}

// The second pass: the new masters, rounded. `product`: Random::multiplied() of the element.
template <int kElement, typename Weight, typename Rule>
OT_INLINE u32 int8_master(const Rule& rule, const Random& random, u32 product, Block& block, i32 i) {
  const u32 bits = random.finished(product);
  block.random[kElement][i] = bits;
  const float p = rule.master(block.master[kElement][i], block.first[kElement][i], block.ahead[kElement][i]);
  return Weight::encode(p, bits & 0xffu);
}

template <typename Weight, typename Rule>
OT_INLINE void int8_masters(const Rule& given, const Random& given_random, const Products& products,
                            u32 shifted, Block& block, const Int8State& out) {
  const Rule rule = given;
  const Random random = given_random;
  const u32 start = Products::of_block(shifted);
  const Int8State fresh = out;
  OT_INDEPENDENT
  for (i32 i = 0; i < kQuads; ++i) {
    const u32 a = int8_master<0, Weight>(rule, random, start + products.of<0>(i), block, i);
    const u32 b = int8_master<1, Weight>(rule, random, start + products.of<1>(i), block, i);
    const u32 c = int8_master<2, Weight>(rule, random, start + products.of<2>(i), block, i);
    const u32 d = int8_master<3, Weight>(rule, random, start + products.of<3>(i), block, i);
    set_word(fresh.weight, 2 * i, word_of_upper(Plus8::rounding(a), Plus8::rounding(b)));
    set_word(fresh.weight, 2 * i + 1, word_of_upper(Plus8::rounding(c), Plus8::rounding(d)));
    set_word(fresh.correction, i, word_of_bytes<8>(a, b, c, d));
  }
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

// The code of a moment above kShift lower bits.
template <int kElement>
OT_INLINE u32 first_code(const Block& block, i32 i, float inverse) {
  const u32 m = bits_of(block.first[kElement][i]);
  const u32 widened = SignedCode::widened(float_of(m & kMagnitude), inverse);
  const u32 code = SignedCode::rounding(widened, (block.random[kElement][i] >> 8) & 0xfffu);
  return code | ((m & kSign) >> (24 - SignedCode::kShift));
}

template <int kElement>
OT_INLINE u32 second_code(const Block& block, i32 i, float inverse) {
  const u32 widened = UnsignedCode::widened(block.second[kElement][i], inverse);
  constexpr u32 least = UnsignedCode::kOne + (1u << UnsignedCode::kShift);  // of code 1
  const u32 raised = static_cast<u32>(larger(static_cast<i32>(widened), static_cast<i32>(least)));
  return UnsignedCode::rounding(raised, block.random[kElement][i] >> 20) - (1u << UnsignedCode::kShift);
}

// The last pass: the moments, once their scales are known.
template <int kMoments>
OT_INLINE void int8_codes(const Block& block, float first_inverse, float second_inverse,
                          const Int8State& out) {
  const Int8State fresh = out;
  OT_INDEPENDENT
  for (i32 i = 0; i < kQuads; ++i) {
    if constexpr (kMoments > 0) {
      const u32 a = first_code<0>(block, i, first_inverse), b = first_code<1>(block, i, first_inverse);
      const u32 c = first_code<2>(block, i, first_inverse), d = first_code<3>(block, i, first_inverse);
      set_word(fresh.first, i, word_of_bytes<SignedCode::kShift>(a, b, c, d));
    }
    if constexpr (kMoments > 1) {
      const u32 a = second_code<0>(block, i, second_inverse), b = second_code<1>(block, i, second_inverse);
      const u32 c = second_code<2>(block, i, second_inverse), d = second_code<3>(block, i, second_inverse);
      set_word(fresh.second, i, word_of_bytes<UnsignedCode::kShift>(a, b, c, d));
    }
  }
}

template <int kMoments>
Int8State at(const Int8State& s, i64 lo) {
  Int8State result = {s.weight + lo, s.correction + lo, nullptr, nullptr, nullptr, nullptr};
  if constexpr (kMoments > 0) {
    result.first = s.first + lo;
    result.first_scale = s.first_scale + lo / kBlock;
  }
  if constexpr (kMoments > 1) {
    result.second = s.second + lo;
    result.second_scale = s.second_scale + lo / kBlock;
  }
  return result;
}

template <typename Grad, typename Weight, typename Rule>
OT_INLINE void int8_block(const Rule& rule, const Random& random, Products& products, u32 element,
                          const Int8State& in, const Int8State& out, const typename Grad::Storage* grad) {
  Block block;
  const u32 shifted = random.shifted(element);  // kBlock divides element
  products.prepare(shifted);
  const Largest largest = int8_moments<Grad, Weight>(rule, in, grad, block);
  const Scale m = Scale::of<SignedCode>(largest.first);
  const Scale v = Scale::of<UnsignedCode>(largest.second);
  int8_masters<Weight>(rule, random, products, shifted, block, out);
  if (m.inverse == 0.0f || v.inverse == 0.0f) {
    __builtin_memset(block.first, 0, sizeof block.first);
    __builtin_memset(block.second, 0, sizeof block.second);
  }
  int8_codes<Rule::kMoments>(block, m.inverse, v.inverse, out);
  if constexpr (Rule::kMoments > 0) *out.first_scale = m.scale;
  if constexpr (Rule::kMoments > 1) *out.second_scale = v.scale;
}

template <int kMoments>
void copy(const Int8State& from, const Int8State& to, i64 count) {
  copy(from.weight, to.weight, count);
  copy(from.correction, to.correction, count);
  if constexpr (kMoments > 0) copy(from.first, to.first, count);
  if constexpr (kMoments > 1) copy(from.second, to.second, count);
}

// Memory for one block's state.
struct Int8Slab {
  alignas(64) u16 weight[kBlock];
  alignas(64) i8 correction[kBlock];
  alignas(64) u8 first[kBlock];
  alignas(64) u8 second[kBlock];
};

template <int kMoments>
void stream_block(const Int8Slab& slab, const Int8State& out) {
  stream<kBlock>(out.weight, slab.weight);
  stream<kBlock>(out.correction, slab.correction);
  if constexpr (kMoments > 0) stream<kBlock>(out.first, slab.first);
  if constexpr (kMoments > 1) stream<kBlock>(out.second, slab.second);
}

Int8State state_of(Int8Slab& slab, const Int8State& scales) {
  return {slab.weight, slab.correction, slab.first, slab.second, scales.first_scale, scales.second_scale};
}

// A block shorter than the others, by way of one filled up with zeros. These change no scale: no moment of
// theirs is larger than one of the block's own.
template <typename Grad, typename Weight, typename Rule>
[[gnu::noinline]] void int8_rest(const Rule& rule, const Random& random, u32 element, const Int8State& in,
                                 const Int8State& out, const typename Grad::Storage* grad, i64 count) {
  Int8Slab slab = {};
  typename Grad::Storage grads[kBlock] = {};
  Products products;
  copy<Rule::kMoments>(in, state_of(slab, in), count);
  copy(grad, grads, count);
  int8_block<Grad, Weight>(rule, random, products, element, state_of(slab, in), state_of(slab, out), grads);
  copy<Rule::kMoments>(state_of(slab, out), out, count);
}

template <typename Rule, typename Grad>
OT_INLINE void prefetch(const Int8State& state, const Grad* grad) {
  prefetch<kBlock>(state.weight);
  prefetch<kBlock>(state.correction);
  if constexpr (Rule::kMoments > 0) prefetch<kBlock>(state.first);
  if constexpr (Rule::kMoments > 1) prefetch<kBlock>(state.second);
  prefetch<kBlock>(grad);
}

// [Note: A second copy] A step that writes another copy of the state reads the old one where it is, and
// streams each block out of a slab in the cache. To clear the slab and copy the old state into it first took
// two to three times as long as the step.
template <bool kDoubled, typename Grad, typename Weight, typename Rule>
void int8_loop(const Rule& rule, const Int8State& in, const Int8State& out, const Gradient& grad,
               const Run& run) {
  constexpr int moments = Rule::kMoments;
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  Int8Slab slab;
  Products products;
  u32 element = run.element;
  i64 i = run.lo;
  for (; i + kBlock <= run.hi; i += kBlock, element += static_cast<u32>(kBlock)) {
    const Int8State old = at<moments>(in, i), fresh = at<moments>(out, i);
    prefetch<Rule>(old, grads + i);
    const Int8State target = kDoubled ? state_of(slab, fresh) : fresh;
    int8_block<Grad, Weight>(rule, random, products, element, old, target, grads + i);
    if constexpr (kDoubled) stream_block<moments>(slab, fresh);
  }
  if (i < run.hi) {
    int8_rest<Grad, Weight>(rule, random, element, at<moments>(in, i), at<moments>(out, i), grads + i,
                            run.hi - i);
  }
  if constexpr (kDoubled) finish_streaming();
}

template <typename Grad, typename Weight, typename Rule>
void int8_state(const Rule& rule, const Int8State& in, const Int8State& out, const Gradient& grad,
                const Run& run) {
  if (in.weight == out.weight) return int8_loop<false, Grad, Weight>(rule, in, out, grad, run);
  int8_loop<true, Grad, Weight>(rule, in, out, grad, run);
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
