// Conversions of dtypes that keep subnormal numbers, as CuPy's own do not. Launched by cuda.py.
#include <storage.cuh>

namespace pce {

__global__ void __launch_bounds__(BLOCK_THREADS)
    convert(const void* values, int dtype, int64_t count, void* converted, int to_dtype) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (i < count) set_element(converted, to_dtype, i, element(values, dtype, i));
}

}  // namespace pce
