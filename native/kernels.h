// What one instruction set offers. Every table holds the same functions with the same bits.
#pragma once

#include <cstdint>

namespace offloadtrain {

enum class DType : int { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Elements per segment of a sum of squares, counted from a parameter's start.
constexpr std::int64_t kSegment = 2048;

struct AdamArgs {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;  // may be the same memory as `working`
  void* working;     // null: none wanted
  DType grad_dtype;
  DType working_dtype;
  float grad_scale;
  float decay;           // decoupled: master *= decay; 1 otherwise
  float l2;              // coupled: grad += l2 * master; 0 otherwise
  float exp_avg_weight;  // 1 - beta1, or -beta1 where `towards_grad`
  bool towards_grad;     // the moment starts from the gradient's end (1 - beta1 >= 0.5)
  float beta2;
  float exp_avg_sq_weight;  // 1 - beta2
  float negative_step_size;
  float bias_correction2_sqrt;
  float eps;
};

struct Kernels {
  const char* name;
  // Each works on the elements [lo, hi).
  void (*adam)(const AdamArgs& args, std::int64_t lo, std::int64_t hi);
  void (*accumulate)(float* sum, const void* grad, DType dtype, bool first, std::int64_t lo,
                     std::int64_t hi);
  void (*cast)(const float* source, void* target, DType dtype, std::int64_t lo, std::int64_t hi);
  // Sum of squares of `count` <= kSegment elements: a halving tree in double.
  double (*segment)(const void* values, DType dtype, std::int64_t lo, std::int64_t count);
};

}  // namespace offloadtrain
