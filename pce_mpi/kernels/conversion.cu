// Conversions of dtypes that keep subnormal numbers, as CuPy's own do not. Launched by cuda.py.
#include <storage.cuh>

namespace pce {

__global__ void __launch_bounds__(BLOCK_THREADS)
    convert(const void* values, int dtype, int64_t count, void* converted, int to_dtype) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count) set_element(converted, to_dtype, i, element(values, dtype, i));
}

// A matrix of float32 numbers, times `scale` unless that is null, as the sum of two of float16 or bfloat16: `high`, and
// `low` unless that is null. `parts` blocks have the columns of a row.
__global__ void __launch_bounds__(BLOCK_THREADS)
    split_halves(const float* values, int64_t pitch, unsigned parts, int64_t columns, const float* scale, void* high,
                 void* low, int dtype) {
  const int64_t row = blockIdx.x / parts;
  const int64_t column = static_cast<int64_t>(blockIdx.x % parts) * BLOCK_THREADS + threadIdx.x;
  if (column >= columns) return;
  const float given = values[row * pitch + column], value = scale == nullptr ? given : product32(given, *scale);
  const float rounded = dtype == FLOAT16 ? widen(narrowed<float16>(value)) : widen(narrowed<bfloat16>(value));
  set_element(high, dtype, row * columns + column, wide(rounded));
  // CuPy compiles with -ftz=true, and a sign would be changed by an instruction that flushes.
  if (low != nullptr) set_element(low, dtype, row * columns + column, wide(fma32(rounded, -1.0f, value)));
}

}  // namespace pce
