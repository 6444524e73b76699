// Of the records of each row's parts, (rows, parts, columns), one: a warp for each row. Launched by cuda.py.
#include <record.cuh>

constexpr int THREADS = 128;

__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    merge_records(const double* parts, int64 rows, int count, double scale, unsigned fields, double* records) {
  const int64 row = static_cast<int64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  Record* own = own_record();
  *own = identity();
  for (int first = 0; first < count; first += 32) {
    const int part = first + lane;
    Record& other = own[THREADS];
    other = row < rows && part < count ? load(parts + (row * count + part) * columns(fields), fields) : identity();
    __syncwarp();  // or the compiler would keep both in registers
    merge(*own, other, fields, scale);
  }
  merge_group(32, fields, scale);
  if (row < rows && lane == 0) store(*own, records + row * columns(fields), fields, scale);
}
