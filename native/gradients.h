// Gradients: summed over microbatches, and squared.
#pragma once

#include "kernels.h"
#include "numbers.h"
#include "stream.h"

namespace offloadtrain {
namespace {

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

// Squares of fp32 and narrower values are exact in double, so that only the order of the additions
// matters: element i meets i + 1024, then i + 512, and so on. So do the elements of each half of the words
// that hold two narrow ones, in a tree per half up to the last addition. The first three levels are
// taken at once while loading.
constexpr i32 kEighth = static_cast<i32>(kSegment) / 8;

// The product is exact, so that a fused multiply-add has the same bits: where there is none, this is
// faster than the library's.
inline double square_sum(double a, double b) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, a, b * b);
#else
  return a * a + b * b;
#endif
}

template <int kHalf, typename Values>
OT_INLINE double eight_squares(const typename Values::Storage* x, i32 i) {
  constexpr i32 eighth = kEighth / Values::kPerWord;
  const auto at = [&](i32 part) {
    return static_cast<double>(Values::template of_word<kHalf>(x, i + part * eighth));
  };
  const double a = square_sum(at(0), at(4)), b = square_sum(at(2), at(6));
  const double c = square_sum(at(1), at(5)), d = square_sum(at(3), at(7));
  return (a + b) + (c + d);
}

template <i32 kWidth>
OT_INLINE double folded(double* sums) {
  if constexpr (kWidth == 1) {
    return sums[0];
  } else {
    for (i32 i = 0; i < kWidth / 2; ++i) sums[i] = sums[i] + sums[i + kWidth / 2];
    return folded<kWidth / 2>(sums);
  }
}

// The sums of half a word's elements, while the cache takes in the next segment's.
template <typename Values>
double tree(const typename Values::Storage* x) {
  constexpr i32 width = kEighth / Values::kPerWord, stride = 16;
  constexpr i64 lines = kSegment * stride / width;
  alignas(64) double sums[Values::kPerWord][width];
  for (i32 from = 0; from < width; from += stride) {
    prefetch<lines>(x + kSegment - kAhead + from * (kSegment / width));
    OT_INDEPENDENT
    for (i32 i = from; i < from + stride; ++i) {
      sums[0][i] = eight_squares<0, Values>(x, i);
      if constexpr (Values::kPerWord == 2) sums[1][i] = eight_squares<1, Values>(x, i);
    }
  }
  if constexpr (Values::kPerWord == 1) return folded<width>(sums[0]);
  return folded<width>(sums[0]) + folded<width>(sums[Values::kPerWord - 1]);
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
}  // namespace offloadtrain
