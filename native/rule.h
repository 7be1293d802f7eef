// One element of one step, and how its loops are written. Included by kernels.cpp only.
#pragma once

#include "kernels.h"
#include "numbers.h"

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

}  // namespace
}  // namespace offloadtrain
