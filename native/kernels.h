// What one instruction set offers. Every table holds the same functions with the same bits.
#pragma once

#include <cstdint>

namespace offloadtrain {

enum class DType : int { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Elements per segment of a sum of squares, counted from a parameter's start.
constexpr std::int64_t kSegment = 2048;
// Elements that share a scale of their 8-bit moments, counted from a parameter's start.
constexpr std::int64_t kBlock = 128;

enum class Rule : int { adam = 0, lion = 1, sgd = 2, momentum = 3, adagrad = 4 };

// One step of a rule, with its hyperparameters as the loops use them.
constexpr std::int64_t kNumbers = 10;
struct Step {
  Rule rule;
  float numbers[kNumbers];  // in the order of the rule's class; it ignores the rest
};

// Of a matrix rule: how its moving average takes in a gradient, and how far the direction is ahead of
// it. A weight of 0.5 or more is less one, and counts from the other end.
struct Blend {
  float grad_scale, weight, nesterov_weight;
  bool towards_grad, towards_average, nesterov;
};

// What masters are multiplied by, and what is then added of the update.
struct Decay {
  float factor, negative_rate;
};

struct Gradient {
  const void* values;
  DType dtype;
};

// In each state the moments that the rule does not have are null.
struct Fp32State {
  float* master;
  float* first;
  float* second;
};

// weight and low are the two halves of the fp32 master's bits, weight rounded and low signed.
struct Split16State {
  std::uint16_t* weight;  // bf16
  std::int16_t* low;
  std::uint16_t* first;  // bf16
  std::uint16_t* second;
};

// weight and correction are the upper 24 bits of the master; moments have a scale per block. The
// first moment is signed, the second is not.
struct Int8State {
  std::uint16_t* weight;
  std::int8_t* correction;
  std::uint8_t* first;
  std::uint8_t* second;
  float* first_scale;
  float* second_scale;
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
  void (*update_fp32)(const Step& step, const Fp32State& in, const Fp32State& out,
                      const Gradient& grad, void* working, DType working_dtype, std::int64_t lo,
                      std::int64_t hi);
  void (*update_split16)(const Step& step, const Split16State& in, const Split16State& out,
                         const Gradient& grad, const Run& run);
  // run.lo is a block's start, run.element a multiple of kBlock; a last block may be shorter. Not for
  // Adagrad.
  void (*update_int8)(const Step& step, const Int8State& in, const Int8State& out,
                      const Gradient& grad, DType weight_dtype, const Run& run);
  // The rest work on the elements [lo, hi).
  void (*accumulate)(float* sum, const void* grad, DType dtype, bool first, std::int64_t lo,
                     std::int64_t hi);
  void (*cast)(const float* source, void* target, DType dtype, std::int64_t lo, std::int64_t hi);
  // Sum of squares of `count` <= kSegment elements: a halving tree in double.
  double (*segment)(const void* values, DType dtype, std::int64_t lo, std::int64_t count);
  // The memory traffic of Adam on fp32 state with 16-bit gradients and weights, and next to no arithmetic.
  void (*traffic)(const Fp32State& state, const std::uint16_t* grad, std::uint16_t* working,
                  std::int64_t lo, std::int64_t hi);
  // Masters into a state's weights and what they lack, rounded to nearest.
  void (*encode_split16)(const float* master, std::uint16_t* weight, std::int16_t* low,
                         std::int64_t lo, std::int64_t hi);
  void (*encode_int8)(const float* master, std::uint16_t* weight, std::int8_t* correction,
                      DType weight_dtype, std::int64_t lo, std::int64_t hi);
  // And back into fp32, exactly.
  void (*decode_split16)(const std::uint16_t* weight, const std::int16_t* low, float* master,
                         std::int64_t lo, std::int64_t hi);
  void (*decode_int8)(const std::uint16_t* weight, DType weight_dtype,
                      const std::int8_t* correction, float* master, std::int64_t lo,
                      std::int64_t hi);
  // Of a matrix rule. `target`, bf16, may be the memory of 16-bit gradients, and `working` that of
  // `update` if its elements have 16 bits.
  void (*blend_fp32)(const Blend& blend, float* average, const Gradient& grad, std::uint16_t* target,
                     std::int64_t lo, std::int64_t hi);
  void (*blend_split16)(const Blend& blend, std::uint16_t* average, const Gradient& grad,
                        std::uint16_t* target, const Run& run);
  void (*subtract_fp32)(const Decay& decay, float* master, const std::uint16_t* update,
                        void* working, DType working_dtype, std::int64_t lo, std::int64_t hi);
  void (*subtract_split16)(const Decay& decay, std::uint16_t* weight, std::int16_t* low,
                           const std::uint16_t* update, std::int64_t lo, std::int64_t hi);
};

}  // namespace offloadtrain
