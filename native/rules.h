// Update rules: one element's step in fp32. Included by kernels.cpp only.
//
// A rule is a class with the number of its moments, a constructor from a step's numbers (as
// offloadtrain/runtime/kernels/scalars.py orders them), and one element's step. The loops over
// formats take any rule. Where torch has a fused rule for the CPU, the arithmetic is its own,
// operation by operation: a multiply-add is fused where torch's compiler fuses it.
#pragma once

#include "kernels.h"
#include "numbers.h"

namespace offloadtrain {
namespace {

// A rule with fewer moments leaves the others zero.
struct Values {
  float master, first, second;
};

// The first half of a step: the new moments, and what the master needs beside the first of them. Loops
// that take the halves one after the other keep the divider busy, where a whole step's chain of
// operations would fill the CPU's window with what waits for it.
struct Moved {
  float first, second, ahead;
};

template <typename Rule>
OT_INLINE Values whole_step(const Rule& rule, float grad, float p, float m, float v) {
  const Moved x = rule.moved(grad, p, m, v);
  return {rule.master(p, x.first, x.ahead), x.first, x.second};
}

#if defined(__AVX512F__)
// x / divisor for x >= 0 and 0 < divisor <= 1, rounded as a division rounds, by multiplications: a
// CPU has one divider, which the root and the other division keep busy.
class Divisor {
 public:
  explicit Divisor(float divisor)
      : divisor_(divisor), inverse_(static_cast<float>(1.0 / static_cast<double>(divisor))),
        rest_(static_cast<float>(1.0 / static_cast<double>(divisor) - static_cast<double>(inverse_))) {}

  float operator()(float x) const {
    const float near = __builtin_fmaf(x, inverse_, x * rest_);
    const float left = __builtin_fmaf(-near, divisor_, x);
    const float quotient = __builtin_fmaf(left, inverse_, near);
    return quotient > x ? quotient : x;
  }

 private:
  float divisor_, inverse_, rest_;
};
#else
class Divisor {
 public:
  explicit Divisor(float divisor) : divisor_(divisor) {}
  float operator()(float x) const { return x / divisor_; }

 private:
  float divisor_;
};
#endif

// What hardly any run needs, decay in the gradient and beta1 below 0.5, has a class of its own:
// choosing per element cost a tenth of the narrow states' time.
template <bool kGeneral>
class Adam {
 public:
  static constexpr int kMoments = 2;
  explicit Adam(const float* n)
      : grad_scale_(n[0]), decay_(n[1]), l2_(n[2]), weight_(n[3]), beta2_(n[5]), weight_sq_(n[6]),
        step_(n[7]), correction_(n[8]), eps_(n[9]),
        coupled_(mask_of(n[2] != 0.0f)), towards_grad_(mask_of(n[4] != 0.0f)) {}
  static bool is_general(const float* n) { return n[2] != 0.0f || n[4] != 0.0f; }

  Moved moved(float grad, float p, float m_old, float v_old) const {
    float g = grad * grad_scale_;
    if constexpr (kGeneral) g = select(coupled_, __builtin_fmaf(p, l2_, g), g);
    const float base = kGeneral ? select(towards_grad_, g, m_old) : m_old;
    const float m = __builtin_fmaf(weight_, g - m_old, base);
    const float v = __builtin_fmaf(weight_sq_ * g, g, v_old * beta2_);
    return {m, v, __builtin_sqrtf(v)};
  }
  float master(float p, float m, float root) const {
    return p * decay_ + (step_ * m) / (correction_(root) + eps_);
  }

 private:
  float grad_scale_, decay_, l2_, weight_, beta2_, weight_sq_, step_;
  Divisor correction_;
  float eps_;
  u32 coupled_, towards_grad_;
};

// The sign of a NaN is zero, as torch.sign has it.
class Lion {
 public:
  static constexpr int kMoments = 1;
  explicit Lion(const float* n)
      : grad_scale_(n[0]), decay_(n[1]), beta1_(n[2]), weight1_(n[3]), beta2_(n[4]), weight2_(n[5]),
        step_(n[6]) {}

  Moved moved(float grad, float, float m, float) const {
    const float g = grad * grad_scale_;
    const float towards = __builtin_fmaf(g, weight1_, m * beta1_);
    const float up = select(mask_of(0.0f < towards), 1.0f, 0.0f);
    const float down = select(mask_of(towards < 0.0f), 1.0f, 0.0f);
    return {__builtin_fmaf(g, weight2_, m * beta2_), 0.0f, up - down};
  }
  float master(float p, float, float sign) const { return p * decay_ + sign * step_; }

 private:
  float grad_scale_, decay_, beta1_, weight1_, beta2_, weight2_, step_;
};

class Sgd {
 public:
  static constexpr int kMoments = 0;
  explicit Sgd(const float* n)
      : grad_scale_(n[0]), l2_(n[1]), step_(n[2]), coupled_(mask_of(n[1] != 0.0f)) {}

  Moved moved(float grad, float p, float, float) const { return {0.0f, 0.0f, gradient(grad, p)}; }
  float master(float p, float, float g) const { return __builtin_fmaf(g, step_, p); }

 protected:
  float gradient(float grad, float p) const {
    const float g = grad * grad_scale_;
    return select(coupled_, __builtin_fmaf(p, l2_, g), g);
  }
  float grad_scale_, l2_, step_;
  u32 coupled_;
};

// The first step's buffer is its gradient, undamped.
class Momentum : Sgd {
 public:
  static constexpr int kMoments = 1;
  explicit Momentum(const float* n)
      : Sgd(n), momentum_(n[3]), weight_(n[4]), first_(mask_of(n[5] != 0.0f)),
        nesterov_(mask_of(n[6] != 0.0f)) {}

  Moved moved(float grad, float p, float buffer, float) const {
    const float g = gradient(grad, p);
    const float m = select(first_, g, __builtin_fmaf(weight_, g, buffer * momentum_));
    return {m, 0.0f, select(nesterov_, __builtin_fmaf(m, momentum_, g), m)};
  }
  using Sgd::master;

 private:
  float momentum_, weight_;
  u32 first_, nesterov_;
};

class Adagrad {
 public:
  static constexpr int kMoments = 1;
  explicit Adagrad(const float* n)
      : grad_scale_(n[0]), l2_(n[1]), lr_(n[2]), eps_(n[3]), coupled_(mask_of(n[1] != 0.0f)) {}

  Moved moved(float grad, float p, float sum, float) const {
    const float scaled = grad * grad_scale_;
    const float g = select(coupled_, __builtin_fmaf(p, l2_, scaled), scaled);
    return {__builtin_fmaf(g, g, sum), 0.0f, lr_ * g};
  }
  float master(float p, float total, float step) const { return p - step / (__builtin_sqrtf(total) + eps_); }

 private:
  float grad_scale_, l2_, lr_, eps_;
  u32 coupled_;
};

template <typename Body>
void with_rule(const Step& step, const Body& body) {
  const float* n = step.numbers;
  switch (step.rule) {
    case Rule::adam: return Adam<false>::is_general(n) ? body(Adam<true>(n)) : body(Adam<false>(n));
    case Rule::lion: return body(Lion(n));
    case Rule::sgd: return body(Sgd(n));
    case Rule::momentum: return body(Momentum(n));
    case Rule::adagrad: return body(Adagrad(n));
  }
}

// `body` with a number format for the gradient's dtype.
template <typename Body>
void with_format(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::float32: return body(Float32{});
    case DType::bfloat16: return body(BFloat16{});
    case DType::float16: return body(Float16{});
    case DType::none: return;
  }
}

template <typename Grad>
const typename Grad::Storage* values_of(const Gradient& grad) {
  return static_cast<const typename Grad::Storage*>(grad.values);
}

}  // namespace
}  // namespace offloadtrain
