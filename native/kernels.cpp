// The kernels, in plain C++. This file is compiled once per instruction set, with
//   -ffp-contract=off           a multiply-add is fused where it is written so, and nowhere else:
//                               the same bits from every instruction set
//   -fno-math-errno -fno-trapping-math   or the loops do not vectorise
// and OT_TABLE naming the table. Everything else has internal linkage, and nothing of the standard
// library is used: an inline function merged by the linker from the AVX-512 object would crash an
// older CPU.
#include "kernels.h"

namespace offloadtrain {
namespace {

using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;

inline u32 bits_of(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Branch-free choice: a condition that the compiler hoists out of a loop as a second loop, or cannot
// if-convert, costs the vectorisation of both.
inline u32 mask_of(bool condition) { return 0u - static_cast<u32>(condition); }
inline u32 select(u32 mask, u32 chosen, u32 otherwise) {
  return (chosen & mask) | (otherwise & ~mask);
}
inline float select(u32 mask, float chosen, float otherwise) {
  return float_of(select(mask, bits_of(chosen), bits_of(otherwise)));
}

struct Float32 {
  using Storage = float;
  static float load(float stored) { return stored; }
  static float store(float value) { return value; }
};

struct BFloat16 {
  using Storage = u16;
  static float load(u16 stored) { return float_of(static_cast<u32>(stored) << 16); }

  // Round to nearest even. A NaN must not be rounded: its mantissa could carry into infinity.
  static u16 store(float value) {
    const u32 bits = bits_of(value);
    const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32 is_nan = mask_of((bits & 0x7fffffffu) > 0x7f800000u);
    return static_cast<u16>(select(is_nan, 0x7fc0u, rounded));
  }
};

struct Float16 {
  using Storage = u16;

  // Shifted into place, the exponent is 112 too small; the multiplication is exact and also
  // normalises denormals.
  static float load(u16 stored) {
    const u32 magnitude = static_cast<u32>(stored & 0x7fffu) << 13;
    const u32 sign = static_cast<u32>(stored & 0x8000u) << 16;
    const u32 scaled = bits_of(float_of(magnitude) * 0x1p112f);
    const u32 special = magnitude | 0x7f800000u;
    return float_of(sign | select(mask_of(magnitude >= 0x0f800000u), special, scaled));
  }

  // Round to nearest even, to infinity from 65520 on.
  static u16 store(float value) {
    const u32 bits = bits_of(value);
    const u32 sign = (bits >> 16) & 0x8000u;
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves a denormal half's mantissa, rounded, in the low bits.
    const u32 denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const u32 finite = select(mask_of(magnitude < 0x38800000u), denormal, normal);
    const u32 special = select(mask_of(magnitude > 0x7f800000u), 0x7e00u, 0x7c00u);
    return static_cast<u16>(sign | select(mask_of(magnitude >= 0x47800000u), special, finite));
  }
};

struct Nothing {
  using Storage = u16;
  static u16 store(float) { return 0; }
};

// The arithmetic, operation by operation, of torch.optim.AdamW(fused=True) on the CPU.
// `grad` and `working` may be the same memory: each element is read before it is written.
template <typename Grad, typename Working, bool kEmit>
void adam_loop(const AdamArgs& args, i64 lo, i64 hi) {
  const AdamArgs a = args;
  const auto* grad = static_cast<const typename Grad::Storage*>(a.grad);
  auto* working = static_cast<typename Working::Storage*>(a.working);
  float* __restrict master = a.master;
  float* __restrict exp_avg = a.exp_avg;
  float* __restrict exp_avg_sq = a.exp_avg_sq;
  const u32 coupled = mask_of(a.l2 != 0.0f);
  const u32 towards_grad = mask_of(a.towards_grad);
#pragma GCC ivdep
  for (i64 i = lo; i < hi; ++i) {
    float p = master[i];
    const float scaled = Grad::load(grad[i]) * a.grad_scale;
    const float g = select(coupled, __builtin_fmaf(p, a.l2, scaled), scaled);
    p = p * a.decay;
    const float m_old = exp_avg[i];
    const float base = select(towards_grad, g, m_old);
    const float m = __builtin_fmaf(a.exp_avg_weight, g - m_old, base);
    const float v = __builtin_fmaf(a.exp_avg_sq_weight * g, g, exp_avg_sq[i] * a.beta2);
    const float denominator = __builtin_sqrtf(v) / a.bias_correction2_sqrt + a.eps;
    p = p + (a.negative_step_size * m) / denominator;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = p;
    if (kEmit) working[i] = Working::store(p);
  }
}

template <typename Grad>
void adam_from(const AdamArgs& args, i64 lo, i64 hi) {
  switch (args.working_dtype) {
    case DType::float32: return adam_loop<Grad, Float32, true>(args, lo, hi);
    case DType::bfloat16: return adam_loop<Grad, BFloat16, true>(args, lo, hi);
    case DType::float16: return adam_loop<Grad, Float16, true>(args, lo, hi);
    case DType::none: return adam_loop<Grad, Nothing, false>(args, lo, hi);
  }
}

void adam(const AdamArgs& args, i64 lo, i64 hi) {
  switch (args.grad_dtype) {
    case DType::float32: return adam_from<Float32>(args, lo, hi);
    case DType::bfloat16: return adam_from<BFloat16>(args, lo, hi);
    case DType::float16: return adam_from<Float16>(args, lo, hi);
    case DType::none: return;
  }
}

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

}  // namespace

extern const Kernels OT_TABLE;
const Kernels OT_TABLE = {OT_NAME, adam, accumulate, cast, segment};

}  // namespace offloadtrain
