// What one instruction set offers. Every table holds the same functions with the same bits.
#pragma once

#include <cstdint>

namespace offloadtrain {

enum class DType : int { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Elements per segment of a sum of squares, counted from a parameter's start.
constexpr std::int64_t kSegment = 2048;
// Elements that share a scale of their 8-bit moments, counted from a parameter's start.
constexpr std::int64_t kBlock = 128;

// One step's hyperparameters as the loops use them.
struct Adam {
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

struct Gradient {
  const void* values;
  DType dtype;
};

struct Fp32State {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
};

// weight and low are the two halves of the fp32 master's bits, weight rounded and low signed.
struct Split16State {
  std::uint16_t* weight;  // bf16
  std::int16_t* low;
  std::uint16_t* exp_avg;  // bf16
  std::uint16_t* exp_avg_sq;
};

// weight and correction are the upper 24 bits of the master; moments have a scale per block.
struct Int8State {
  std::uint16_t* weight;
  std::int8_t* correction;
  std::uint8_t* exp_avg;
  std::uint8_t* exp_avg_sq;
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
};

// Elements [lo, hi) of a bucket, all of one parameter, and what their random bits depend on: `key`
// on seed, step and parameter; `element`, that of lo within the parameter, counts on from there.
struct Run {
  std::int64_t lo, hi;
  std::uint64_t key;
  std::uint32_t element;
};

// A step reads `in` and writes `out`, which are the same memory or have none in common.
struct Kernels {
  const char* name;
  // `working` null: none wanted. It may be the memory of the gradient.
  void (*adam_fp32)(const Adam& adam, const Fp32State& in, const Fp32State& out,
                    const Gradient& grad, void* working, DType working_dtype, std::int64_t lo,
                    std::int64_t hi);
  void (*adam_split16)(const Adam& adam, const Split16State& in, const Split16State& out,
                       const Gradient& grad, const Run& run);
  // run.lo is a block's start; a last block may be shorter.
  void (*adam_int8)(const Adam& adam, const Int8State& in, const Int8State& out,
                    const Gradient& grad, DType weight_dtype, const Run& run);
  // The rest work on the elements [lo, hi).
  void (*accumulate)(float* sum, const void* grad, DType dtype, bool first, std::int64_t lo,
                     std::int64_t hi);
  void (*cast)(const float* source, void* target, DType dtype, std::int64_t lo, std::int64_t hi);
  // Sum of squares of `count` <= kSegment elements: a halving tree in double.
  double (*segment)(const void* values, DType dtype, std::int64_t lo, std::int64_t count);
  // The memory traffic of adam_fp32 with 16-bit gradients and weights, and next to no arithmetic.
  void (*traffic)(const Fp32State& state, const std::uint16_t* grad, std::uint16_t* working,
                  std::int64_t lo, std::int64_t hi);
};

}  // namespace offloadtrain
