// The constants that Python needs as well. They are defined once, in compilation.py, which passes
// them as -DPCE_...
#pragma once

constexpr int WARP_SIZE = PCE_WARP_SIZE;
constexpr int RESIDENT_THREADS = PCE_RESIDENT_THREADS;
constexpr int ROW_RESIDENT_THREADS = PCE_ROW_RESIDENT_THREADS;

constexpr int BLOCK_THREADS = PCE_BLOCK_THREADS;
constexpr int LOADS = PCE_LOADS;
constexpr int MERGE_BLOCK_THREADS = PCE_MERGE_BLOCK_THREADS;

// The dtype of an array that has it as an argument, and not as a template parameter.
enum DType {
  FLOAT16 = PCE_DTYPE_FLOAT16,
  BFLOAT16 = PCE_DTYPE_BFLOAT16,
  FLOAT32 = PCE_DTYPE_FLOAT32,
  FLOAT64 = PCE_DTYPE_FLOAT64,
};
