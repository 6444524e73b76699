// The record of every row in float32 arithmetic, the target held apart, each logit read once. Launched by cuda.py.
#include <exponential.cuh>
#include <record.cuh>

constexpr int THREADS = 256, LOADS = 4;

// `records` (rows, parts, columns): of the classes in each part of a row.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    fill_records(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int lanes,
                 const int64* target_column, const double* weight, double scale, unsigned fields, double* records) {
  const Place place(rows, classes, chunk, lanes);
  const bool has_row = place.row < rows;
  const T* row = logits + (has_row ? place.row * pitch + place.first : 0);
  const Stretch<T> stretch(row, place.count);
  const int target = has_row ? place.relative(target_column[place.row]) : -1;
  Exponential<T, float> exponential(scale);
  float max = -infinity<float>();
  double sum = 0.0;

  const int step = LOADS * lanes;
  // First, where there are any, single classes: as vectors of one number.
  for (int start = stretch.edges ? place.lane - step : place.lane; start < stretch.body; start += step) {
    Vector v[LOADS];
    unsigned largest = Storage<T>::lowest;
    int count = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      v[i] = vector_of_lowest<T>();
      if (start >= 0) {
        if (start + i * lanes < stretch.body) {
          v[i] = load_constant(row + stretch.vector_at(start + i * lanes));
          count = i + 1;
        }
      } else if (start + step + i * lanes < stretch.edges) {
        v[i] = vector_of(row[stretch.edge_at(start + step + i * lanes)]);
        count = i + 1;
      }
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int at = start >= 0 ? stretch.vector_at(start + i * lanes) : stretch.edge_at(start + step + i * lanes);
      const unsigned place_of_target = static_cast<unsigned>(target - at);
      if (start >= 0 || place_of_target == 0) mask<T>(v[i], place_of_target);
      largest = larger<T>(largest, v[i]);
    }
    const float highest = largest_of<T>(largest);
    max = fmaxf(max, highest);
    if (highest > exponential.limit) {
      const Exponential<T, float> before = exponential;
      exponential.refer_to(highest);
      if (sum != 0.0) sum *= exp(before.over(exponential, scale));
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i >= count) break;
      float x[Storage<T>::width];
      unpack<T>(v[i], x);
      sum += static_cast<double>(exponential.sum_of(x));
    }
  }

  reduce_sums(max, sum, exponential, scale, lanes);
  if (!has_row || place.lane != 0) return;
  Record record = identity();
  record.max = max;
  record.sum_exp = sum;
  if (target >= 0) {
    record.held = static_cast<double>(number(row[target]));
    record.held_weight = weight == nullptr ? 1.0 : weight[place.first + target];
  }
  store(record, records + (place.row * gridDim.y + blockIdx.y) * columns(fields), fields, scale);
}
