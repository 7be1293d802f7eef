// The kernels, in plain C++. This file is compiled once per instruction set, with
//   -ffp-contract=off           a multiply-add is fused where it is written so, and nowhere else:
//                               the same bits from every instruction set
//   -fno-math-errno -fno-trapping-math   or the loops do not vectorise
// and OT_TABLE naming the table; all else has internal linkage (see numbers.h).
#include "kernels.h"

#include "numbers.h"
#include "stream.h"

// Before a loop whose elements are independent of each other, although memory that it reads may be
// memory that it writes. Vectorised and not unrolled: a loop of known length would be unrolled whole.
#if defined(__clang__)
#define OT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety) unroll(disable)")
#else
#define OT_INDEPENDENT _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#endif
// For what is called once with a length known to the compiler and once without.
#define OT_INLINE [[gnu::always_inline]] inline

namespace offloadtrain {
namespace {

struct Moments {
  float master, exp_avg, exp_avg_sq;
};

// An update rule: coefficients, and one element's step in fp32. Another optimizer with these states
// is another such class; the loops over formats below take any.
// The arithmetic, operation by operation, of torch.optim.AdamW(fused=True) on the CPU. What hardly
// any run needs, decay in the gradient and beta1 below 0.5, has a class of its own: choosing per
// element cost a tenth of the narrow states' time.
template <bool kGeneral>
class AdamRule {
 public:
  explicit AdamRule(const Adam& adam)
      : a_(adam), coupled_(mask_of(adam.l2 != 0.0f)), towards_grad_(mask_of(adam.towards_grad)) {}

  Moments operator()(float grad, float p, float m_old, float v_old) const {
    float g = grad * a_.grad_scale;
    if constexpr (kGeneral) g = select(coupled_, __builtin_fmaf(p, a_.l2, g), g);
    const float decayed = p * a_.decay;
    const float base = kGeneral ? select(towards_grad_, g, m_old) : m_old;
    const float m = __builtin_fmaf(a_.exp_avg_weight, g - m_old, base);
    const float v = __builtin_fmaf(a_.exp_avg_sq_weight * g, g, v_old * a_.beta2);
    const float denominator = __builtin_sqrtf(v) / a_.bias_correction2_sqrt + a_.eps;
    return {decayed + (a_.negative_step_size * m) / denominator, m, v};
  }

 private:
  Adam a_;
  u32 coupled_, towards_grad_;
};

template <typename Body>
void with_rule(const Adam& adam, const Body& body) {
  if (adam.l2 != 0.0f || adam.towards_grad) return body(AdamRule<true>(adam));
  body(AdamRule<false>(adam));
}

template <typename Grad>
const typename Grad::Storage* values_of(const Gradient& grad) {
  return static_cast<const typename Grad::Storage*>(grad.values);
}

// ---- fp32 state --------------------------------------------------------------------------------

template <typename Grad, typename Rule>
void fp32_loop(const Rule& given, const Fp32State& in, const Fp32State& out,
               const typename Grad::Storage* grad, i64 count) {
  const Rule rule = given;
  const float *master = in.master, *exp_avg = in.exp_avg, *exp_avg_sq = in.exp_avg_sq;
  float *new_master = out.master, *new_exp_avg = out.exp_avg, *new_exp_avg_sq = out.exp_avg_sq;
  OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    const Moments x = rule(Grad::load(grad[i]), master[i], exp_avg[i], exp_avg_sq[i]);
    new_exp_avg[i] = x.exp_avg;
    new_exp_avg_sq[i] = x.exp_avg_sq;
    new_master[i] = x.master;
  }
}

template <typename Target>
void cast_loop(const float* source, typename Target::Storage* target, i64 count) {
  for (i64 i = 0; i < count; ++i) target[i] = Target::store(source[i]);
}

void cast_any(const float* source, void* targets, DType dtype, i64 lo, i64 count) {
  switch (dtype) {
    case DType::float32: return cast_loop<Float32>(source, static_cast<float*>(targets) + lo, count);
    case DType::bfloat16: return cast_loop<BFloat16>(source, static_cast<u16*>(targets) + lo, count);
    case DType::float16: return cast_loop<Float16>(source, static_cast<u16*>(targets) + lo, count);
    case DType::none: return;
  }
}

Fp32State at(const Fp32State& state, i64 lo) {
  return {state.master + lo, state.exp_avg + lo, state.exp_avg_sq + lo};
}

// The new weights of a slab, from masters that the cache still holds. A second loop, because one that
// writes 16-bit weights beside the state ran at half the speed on some placements of the buffers
// (measured on Zen 5: exp_avg_sq 64 bytes off; the arithmetic alone did not mind).
class Emitter {
 public:
  Emitter(void* working, DType dtype, bool streamed)
      : working_(working), dtype_(dtype), streamed_(streamed && dtype > DType::float32) {}

  void emit(const float* master, i64 lo, i64 count) {
    if (!streamed_) return cast_any(master, working_, dtype_, lo, count);
    cast_any(master, slab_, dtype_, 0, count);
    stream(static_cast<u16*>(working_) + lo, slab_, count);
  }

 private:
  void* working_;
  DType dtype_;
  bool streamed_;
  alignas(64) u16 slab_[kSlab];
};

// The weights may go where the gradient was: its slab is read by then.
template <typename Grad, typename Rule>
void fp32_state(const Rule& rule, const Fp32State& in, const Fp32State& out, const Gradient& grad,
                void* working, DType working_dtype, i64 lo, i64 hi) {
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.master != in.master;
  Output<float> master(out.master, doubled), exp_avg(out.exp_avg, doubled);
  Output<float> exp_avg_sq(out.exp_avg_sq, doubled);
  Emitter weights(working, working_dtype, working != grad.values);
  for (i64 i = lo; i < hi; i += kSlab) {
    const i64 count = hi - i < kSlab ? hi - i : kSlab;
    const Fp32State target = {master.at(i), exp_avg.at(i), exp_avg_sq.at(i)};
    fp32_loop<Grad>(rule, at(in, i), target, grads + i, count);
    weights.emit(target.master, i, count);
    master.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
  }
  finish_streaming();
}

template <typename Grad>
void fp32_from(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
               void* working, DType working_dtype, i64 lo, i64 hi) {
  with_rule(adam, [&](const auto& rule) {
    fp32_state<Grad>(rule, in, out, grad, working, working_dtype, lo, hi);
  });
}

void adam_fp32(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
               void* working, DType working_dtype, i64 lo, i64 hi) {
  switch (grad.dtype) {
    case DType::float32: return fp32_from<Float32>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::bfloat16: return fp32_from<BFloat16>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::float16: return fp32_from<Float16>(adam, in, out, grad, working, working_dtype, lo, hi);
    case DType::none: return;
  }
}

// ---- split16 state -----------------------------------------------------------------------------

template <typename Grad, typename Rule>
void split16_loop(const Rule& given, const Random& given_random, u32 element,
                  const Split16State& in, const Split16State& out,
                  const typename Grad::Storage* grad, i64 count) {
  const Rule rule = given;
  const Random random = given_random;
  const Split16State old = in, fresh = out;
OT_INDEPENDENT
  for (i32 i = 0; i < static_cast<i32>(count); ++i) {
    const u32 bits = random.bits(element + static_cast<u32>(i));
    const Moments x = rule(Grad::load_canonical(grad[i]), Split::join(old.weight[i], old.low[i]),
                           BFloat16::load(old.exp_avg[i]), BFloat16::load(old.exp_avg_sq[i]));
    fresh.weight[i] = Split::weight(x.master);
    fresh.low[i] = Split::low(x.master);
    fresh.exp_avg[i] = BFloat16::store(x.exp_avg, bits & 0xffffu);
    fresh.exp_avg_sq[i] = BFloat16::store(x.exp_avg_sq, bits >> 16);
  }
}

Split16State at(const Split16State& state, i64 lo) {
  return {state.weight + lo, state.low + lo, state.exp_avg + lo, state.exp_avg_sq + lo};
}

template <typename Grad, typename Rule>
void split16_state(const Rule& rule, const Split16State& in, const Split16State& out,
                   const Gradient& grad, const Run& run) {
  const Random random(run.key);
  const auto* grads = values_of<Grad>(grad);
  const bool doubled = out.weight != in.weight;
  Output<u16> weight(out.weight, doubled), exp_avg(out.exp_avg, doubled);
  Output<u16> exp_avg_sq(out.exp_avg_sq, doubled);
  Output<i16> low(out.low, doubled);
  for (i64 i = run.lo; i < run.hi; i += kSlab) {
    const i64 count = run.hi - i < kSlab ? run.hi - i : kSlab;
    const u32 element = run.element + static_cast<u32>(i - run.lo);
    const Split16State target = {weight.at(i), low.at(i), exp_avg.at(i), exp_avg_sq.at(i)};
    split16_loop<Grad>(rule, random, element, at(in, i), target, grads + i, count);
    weight.done(i, count);
    low.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
  }
  if (doubled) finish_streaming();
}

template <typename Grad>
void split16_from(const Adam& adam, const Split16State& in, const Split16State& out,
                  const Gradient& grad, const Run& run) {
  with_rule(adam, [&](const auto& rule) { split16_state<Grad>(rule, in, out, grad, run); });
}

void adam_split16(const Adam& adam, const Split16State& in, const Split16State& out,
                  const Gradient& grad, const Run& run) {
  switch (grad.dtype) {
    case DType::float32: return split16_from<Float32>(adam, in, out, grad, run);
    case DType::bfloat16: return split16_from<BFloat16>(adam, in, out, grad, run);
    case DType::float16: return split16_from<Float16>(adam, in, out, grad, run);
    case DType::none: return;
  }
}

// ---- int8 state --------------------------------------------------------------------------------

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

// ---- gradients ---------------------------------------------------------------------------------

template <typename Grad>
void accumulate_loop(float* __restrict sum, const void* grads, bool first, i64 lo, i64 hi) {
  const auto* __restrict grad = static_cast<const typename Grad::Storage*>(grads);
  if (first) {
    for (i64 i = lo; i < hi; ++i) sum[i] = Grad::load(grad[i]);
  } else {
    for (i64 i = lo; i < hi; ++i) sum[i] = sum[i] + Grad::load(grad[i]);
  }
}

void accumulate(float* sum, const void* grad, DType dtype, bool first, i64 lo, i64 hi) {
  switch (dtype) {
    case DType::float32: return accumulate_loop<Float32>(sum, grad, first, lo, hi);
    case DType::bfloat16: return accumulate_loop<BFloat16>(sum, grad, first, lo, hi);
    case DType::float16: return accumulate_loop<Float16>(sum, grad, first, lo, hi);
    case DType::none: return;
  }
}

void cast(const float* source, void* target, DType dtype, i64 lo, i64 hi) {
  cast_any(source + lo, target, dtype, lo, hi - lo);
}

// Squares of fp32 and narrower values are exact in double, so that only the order of the additions
// matters: element i meets i + 1024, then i + 512, and so on. The first three levels are taken at
// once while loading, the rest in a small buffer.
constexpr i64 kEighth = kSegment / 8;

template <typename Values>
double tree(const typename Values::Storage* x) {
  const auto square = [x](i64 i) {
    const double value = static_cast<double>(Values::load(x[i]));
    return value * value;
  };
  double sums[kEighth];
  for (i64 i = 0; i < kEighth; ++i) {
    const double a = square(i) + square(i + 4 * kEighth);
    const double b = square(i + 2 * kEighth) + square(i + 6 * kEighth);
    const double c = square(i + kEighth) + square(i + 5 * kEighth);
    const double d = square(i + 3 * kEighth) + square(i + 7 * kEighth);
    sums[i] = (a + b) + (c + d);
  }
  for (i64 width = kEighth / 2; width > 0; width /= 2) {
    for (i64 i = 0; i < width; ++i) sums[i] = sums[i] + sums[i + width];
  }
  return sums[0];
}

template <typename Values>
double segment_of(const void* values, i64 lo, i64 count) {
  const auto* x = static_cast<const typename Values::Storage*>(values) + lo;
  if (count == kSegment) return tree<Values>(x);
  typename Values::Storage padded[kSegment] = {};
  for (i64 i = 0; i < count; ++i) padded[i] = x[i];
  return tree<Values>(padded);
}

double segment(const void* values, DType dtype, i64 lo, i64 count) {
  switch (dtype) {
    case DType::float32: return segment_of<Float32>(values, lo, count);
    case DType::bfloat16: return segment_of<BFloat16>(values, lo, count);
    case DType::float16: return segment_of<Float16>(values, lo, count);
    case DType::none: break;
  }
  return 0.0;
}

// ---- the limit ---------------------------------------------------------------------------------

void traffic_loop(const Fp32State& state, const u16* grad, u16* working, i64 count) {
  float *master = state.master, *exp_avg = state.exp_avg, *exp_avg_sq = state.exp_avg_sq;
OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    master[i] = master[i] * 0.999f;
    exp_avg[i] = exp_avg[i] * 0.999f;
    exp_avg_sq[i] = exp_avg_sq[i] * 0.999f;
    working[i] = static_cast<u16>(grad[i] ^ 1u);
  }
}

void traffic(const Fp32State& state, const u16* grad, u16* working, i64 lo, i64 hi) {
  Output<u16> weights(working, true);
  for (i64 i = lo; i < hi; i += kSlab) {
    const i64 count = hi - i < kSlab ? hi - i : kSlab;
    traffic_loop(at(state, i), grad + i, weights.at(i), count);
    weights.done(i, count);
  }
  finish_streaming();
}

}  // namespace

extern const Kernels OT_TABLE;
const Kernels OT_TABLE = {OT_NAME,    adam_fp32, adam_split16, adam_int8, accumulate,
                          cast,       segment,   traffic};

}  // namespace offloadtrain
