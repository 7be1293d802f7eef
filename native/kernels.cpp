// The kernels, in plain C++. This file is compiled once per instruction set, with
//   -ffp-contract=off           a multiply-add is fused where it is written so, and nowhere else:
//                               the same bits from every instruction set
//   -fno-math-errno -fno-trapping-math   or the loops do not vectorise
// and OT_TABLE naming the table; all else has internal linkage (see numbers.h).
#include "kernels.h"

#include "numbers.h"
#include "stream.h"

// Before a loop whose elements are independent of each other, although memory that it reads may be
// memory that it writes.
#if defined(__clang__)
#define OT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define OT_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace offloadtrain {
namespace {

struct Moments {
  float master, exp_avg, exp_avg_sq;
};

// An update rule: coefficients, and one element's step in fp32. Another optimizer with these states
// is another such class; the loops over formats below take any.
// The arithmetic, operation by operation, of torch.optim.AdamW(fused=True) on the CPU.
class AdamRule {
 public:
  explicit AdamRule(const Adam& adam)
      : a_(adam), coupled_(mask_of(adam.l2 != 0.0f)), towards_grad_(mask_of(adam.towards_grad)) {}

  Moments operator()(float grad, float p, float m_old, float v_old) const {
    const float scaled = grad * a_.grad_scale;
    const float g = select(coupled_, __builtin_fmaf(p, a_.l2, scaled), scaled);
    const float decayed = p * a_.decay;
    const float base = select(towards_grad_, g, m_old);
    const float m = __builtin_fmaf(a_.exp_avg_weight, g - m_old, base);
    const float v = __builtin_fmaf(a_.exp_avg_sq_weight * g, g, v_old * a_.beta2);
    const float denominator = __builtin_sqrtf(v) / a_.bias_correction2_sqrt + a_.eps;
    return {decayed + (a_.negative_step_size * m) / denominator, m, v};
  }

 private:
  Adam a_;
  u32 coupled_, towards_grad_;
};

template <typename Grad>
const typename Grad::Storage* values_of(const Gradient& grad) {
  return static_cast<const typename Grad::Storage*>(grad.values);
}

// ---- fp32 state --------------------------------------------------------------------------------

// `grad` and `working` may be the same memory: each element is read before it is written.
template <typename Grad, typename Working, bool kEmit>
void fp32_loop(const AdamRule& given, const Fp32State& in, const Fp32State& out,
               const typename Grad::Storage* grad, typename Working::Storage* working, i64 count) {
  const AdamRule rule = given;
  const float *master = in.master, *exp_avg = in.exp_avg, *exp_avg_sq = in.exp_avg_sq;
  float *new_master = out.master, *new_exp_avg = out.exp_avg, *new_exp_avg_sq = out.exp_avg_sq;
OT_INDEPENDENT
  for (i64 i = 0; i < count; ++i) {
    const Moments x = rule(Grad::load(grad[i]), master[i], exp_avg[i], exp_avg_sq[i]);
    new_exp_avg[i] = x.exp_avg;
    new_exp_avg_sq[i] = x.exp_avg_sq;
    new_master[i] = x.master;
    if (kEmit) working[i] = Working::store(x.master);
  }
}

Fp32State at(const Fp32State& state, i64 lo) {
  return {state.master + lo, state.exp_avg + lo, state.exp_avg_sq + lo};
}

template <typename Grad, typename Working, bool kEmit>
void fp32_state(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
                void* emitted, i64 lo, i64 hi) {
  const AdamRule rule(adam);
  const auto* grads = values_of<Grad>(grad);
  auto* working = static_cast<typename Working::Storage*>(emitted);
  const bool doubled = out.master != in.master;
  const bool streams = kEmit && emitted != grad.values;
  if (!doubled && !streams) {
    auto* target = kEmit ? working + lo : nullptr;
    return fp32_loop<Grad, Working, kEmit>(rule, at(in, lo), at(out, lo), grads + lo, target, hi - lo);
  }
  Output<float> master(out.master, doubled), exp_avg(out.exp_avg, doubled);
  Output<float> exp_avg_sq(out.exp_avg_sq, doubled);
  Output<typename Working::Storage> weights(working, streams);
  for (i64 i = lo; i < hi; i += kSlab) {
    const i64 count = hi - i < kSlab ? hi - i : kSlab;
    const Fp32State target = {master.at(i), exp_avg.at(i), exp_avg_sq.at(i)};
    auto* weight = kEmit ? weights.at(i) : nullptr;
    fp32_loop<Grad, Working, kEmit>(rule, at(in, i), target, grads + i, weight, count);
    master.done(i, count);
    exp_avg.done(i, count);
    exp_avg_sq.done(i, count);
    if (kEmit) weights.done(i, count);
  }
  finish_streaming();
}

template <typename Grad>
void fp32_from(const Adam& adam, const Fp32State& in, const Fp32State& out, const Gradient& grad,
               void* working, DType working_dtype, i64 lo, i64 hi) {
  switch (working_dtype) {
    case DType::float32: return fp32_state<Grad, Float32, true>(adam, in, out, grad, working, lo, hi);
    case DType::bfloat16: return fp32_state<Grad, BFloat16, true>(adam, in, out, grad, working, lo, hi);
    case DType::float16: return fp32_state<Grad, Float16, true>(adam, in, out, grad, working, lo, hi);
    case DType::none: return fp32_state<Grad, Nothing, false>(adam, in, out, grad, nullptr, lo, hi);
  }
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

template <typename Grad>
void split16_loop(const AdamRule& given, const Random& given_random, u32 element,
                  const Split16State& in, const Split16State& out,
                  const typename Grad::Storage* grad, i64 count) {
  const AdamRule rule = given;
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

template <typename Grad>
void split16_state(const Adam& adam, const Split16State& in, const Split16State& out,
                   const Gradient& grad, const Run& run) {
  const AdamRule rule(adam);
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

void adam_split16(const Adam& adam, const Split16State& in, const Split16State& out,
                  const Gradient& grad, const Run& run) {
  switch (grad.dtype) {
    case DType::float32: return split16_state<Float32>(adam, in, out, grad, run);
    case DType::bfloat16: return split16_state<BFloat16>(adam, in, out, grad, run);
    case DType::float16: return split16_state<Float16>(adam, in, out, grad, run);
    case DType::none: return;
  }
}

// ---- int8 state --------------------------------------------------------------------------------

using ExpAvgCode = Minifloat<3, 127>;
using ExpAvgSqCode = Minifloat<3, 256>;  // stored less one: zero, which would blow an update up, is no code

// A block between decoding and encoding.
struct Block {
  alignas(64) float master[kBlock];
  alignas(64) float exp_avg[kBlock];
  alignas(64) float exp_avg_sq[kBlock];
};

template <typename Grad, typename Weight>
void int8_update(const AdamRule& given, const Int8State& in, float exp_avg_scale,
                 float exp_avg_sq_scale, const typename Grad::Storage* grad, Block& block,
                 i32 count) {
  const AdamRule rule = given;
  const Int8State old = in;
OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    const u32 stored = old.exp_avg[i];
    const float size = ExpAvgCode::decode(stored & 0x7fu) * exp_avg_scale;
    const float m = float_of(bits_of(size) | ((stored & 0x80u) << 24));
    const float v = ExpAvgSqCode::decode(static_cast<u32>(old.exp_avg_sq[i]) + 1u) * exp_avg_sq_scale;
    const float g = Grad::load_canonical(grad[i]);
    const Moments x = rule(g, Weight::join(old.weight[i], old.correction[i]), m, v);
    block.master[i] = x.master;
    block.exp_avg[i] = x.exp_avg;
    block.exp_avg_sq[i] = x.exp_avg_sq;
  }
}

// As an integer the order is total: not-a-number above infinity above the rest, whatever the order
// of comparison.
inline float largest(const float* values, i32 count) {
  i32 found = 0;
  for (i32 i = 0; i < count; ++i) {
    const i32 magnitude = static_cast<i32>(bits_of(values[i]) & kMagnitude);
    found = found < magnitude ? magnitude : found;
  }
  return float_of(static_cast<u32>(found));
}

// What a block's codes are multiplied by, and its inverse. Below kLeast nothing matters to Adam's
// eps, and inverses would overflow. A block with a value that is not finite is NaN as a whole.
struct Scale {
  float scale, inverse;

  template <typename Code>
  static Scale of(float largest) {
    if (!(bits_of(largest) < kInfinity)) return {float_of(kNan), 0.0f};
    constexpr float kLeast = 0x1p-80f;
    const float bound = largest < kLeast ? kLeast : largest;
    return {bound * (1.0f / Code::top()), Code::top() / bound};
  }
};

template <typename Weight>
void int8_encode(const Random& given_random, u32 element, const Block& block, float exp_avg_inverse,
                 float exp_avg_sq_inverse, const Int8State& out, i32 count) {
  const Random random = given_random;
  const Int8State fresh = out;
  const float least = ExpAvgSqCode::decode(1);
OT_INDEPENDENT
  for (i32 i = 0; i < count; ++i) {
    const u32 bits = random.bits(element + static_cast<u32>(i));
    const u32 x = Weight::encode(block.master[i], bits & 0xffu);
    fresh.weight[i] = Plus8::weight(x);
    fresh.correction[i] = Plus8::correction(x);
    const u32 m = bits_of(block.exp_avg[i]);
    const float m_size = float_of(m & kMagnitude) * exp_avg_inverse;
    const u32 m_code = ExpAvgCode::encode(m_size, (bits >> 8) & 0xfffu);
    fresh.exp_avg[i] = static_cast<u8>(m_code | ((m & kSign) >> 24));
    const float v_size = block.exp_avg_sq[i] * exp_avg_sq_inverse;
    const float v_kept = v_size < least ? least : v_size;
    fresh.exp_avg_sq[i] = static_cast<u8>(ExpAvgSqCode::encode(v_kept, bits >> 20) - 1u);
  }
}

Int8State at(const Int8State& s, i64 lo) {
  return {s.weight + lo,  s.correction + lo, s.exp_avg + lo, s.exp_avg_sq + lo, s.exp_avg_scale + lo / kBlock,
          s.exp_avg_sq_scale + lo / kBlock};
}

// A block's scales, and its codes on their way out.
template <typename Grad, typename Weight>
void int8_block(const AdamRule& rule, const Random& random, u32 element, const Int8State& in,
                const Int8State& out, const typename Grad::Storage* grad, i32 count) {
  Block block;
  int8_update<Grad, Weight>(rule, in, *in.exp_avg_scale, *in.exp_avg_sq_scale, grad, block, count);
  const Scale m = Scale::of<ExpAvgCode>(largest(block.exp_avg, count));
  const Scale v = Scale::of<ExpAvgSqCode>(largest(block.exp_avg_sq, count));
  if (m.inverse == 0.0f || v.inverse == 0.0f) {
    for (i32 i = 0; i < count; ++i) block.exp_avg[i] = block.exp_avg_sq[i] = 0.0f;
  }
  int8_encode<Weight>(random, element, block, m.inverse, v.inverse, out, count);
  *out.exp_avg_scale = m.scale;
  *out.exp_avg_sq_scale = v.scale;
}

template <typename Grad, typename Weight>
void int8_state(const Adam& adam, const Int8State& in, const Int8State& out, const Gradient& grad,
                const Run& run) {
  const AdamRule rule(adam);
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
    int8_block<Grad, Weight>(rule, random, element, at(in, i), target, grads + i, count);
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
  if (weight_dtype == DType::bfloat16) return int8_state<Grad, BFloat16Plus8>(adam, in, out, grad, run);
  if (weight_dtype == DType::float16) return int8_state<Grad, Float16Plus8>(adam, in, out, grad, run);
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

template <typename Target>
void cast_loop(const float* __restrict source, void* targets, i64 lo, i64 hi) {
  auto* __restrict target = static_cast<typename Target::Storage*>(targets);
  for (i64 i = lo; i < hi; ++i) target[i] = Target::store(source[i]);
}

void cast(const float* source, void* target, DType dtype, i64 lo, i64 hi) {
  switch (dtype) {
    case DType::float32: return cast_loop<Float32>(source, target, lo, hi);
    case DType::bfloat16: return cast_loop<BFloat16>(source, target, lo, hi);
    case DType::float16: return cast_loop<Float16>(source, target, lo, hi);
    case DType::none: return;
  }
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
