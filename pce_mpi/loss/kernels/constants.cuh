// The constants that Python needs as well. They stand once, in launch_config.py and compilation.py, and come from there
// as -DPCE_...
#pragma once

using int64 = long long;

constexpr int WARP_SIZE = PCE_WARP_SIZE;
constexpr int RESIDENT_THREADS = PCE_RESIDENT_THREADS;

constexpr int BLOCK_THREADS = PCE_BLOCK_THREADS;
constexpr int LOADS = PCE_LOADS;
constexpr int MERGE_BLOCK_THREADS = PCE_MERGE_BLOCK_THREADS;

constexpr int FUSED_BLOCK_THREADS = PCE_FUSED_BLOCK_THREADS;
constexpr int FUSED_VECTORS_OF_2_BYTES = PCE_FUSED_VECTORS_OF_2_BYTES;
constexpr int FUSED_VECTORS_OF_4_BYTES = PCE_FUSED_VECTORS_OF_4_BYTES;
constexpr int MAX_CLUSTER_SIZE = PCE_MAX_CLUSTER_SIZE;

constexpr int64 NO_CLASS = PCE_NO_CLASS;  // loses every tie against a class

// The dtype of an array that has it as an argument, and not as a template parameter.
enum DType {
  FLOAT16 = PCE_DTYPE_FLOAT16,
  BFLOAT16 = PCE_DTYPE_BFLOAT16,
  FLOAT32 = PCE_DTYPE_FLOAT32,
  FLOAT64 = PCE_DTYPE_FLOAT64,
};

// The fields of a state, in their order. A set of fields is the sum of their bits.
enum Field : unsigned {
  HELD = PCE_FIELD_HELD,
  MAX = PCE_FIELD_MAX,
  SUM_EXP = PCE_FIELD_SUM_EXP,
  SCALE = PCE_FIELD_SCALE,
  TARGET = PCE_FIELD_TARGET,
  HELD_WEIGHT = PCE_FIELD_HELD_WEIGHT,
  WEIGHT = PCE_FIELD_WEIGHT,
  WEIGHTED_GAP = PCE_FIELD_WEIGHTED_GAP,
  EXP_GAP = PCE_FIELD_EXP_GAP,
  ARGMAX = PCE_FIELD_ARGMAX,  // if set, the class held apart is the largest, otherwise it is the target
};
