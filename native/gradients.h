// Gradients: summed over microbatches, and squared.
#pragma once

#include "kernels.h"
#include "numbers.h"

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
}  // namespace offloadtrain
