// Forward without options, in float32: the states, with the target held apart. Each logit is read once. Launched by
// cuda.py.
#include <exponential.cuh>
#include <softmax_state.cuh>

// `states` is (rows, splits, fields).
template <typename T>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    fill_states(const T* logits, int64 pitch, int64 rows, int64 classes, int chunk, int group_size,
                 const int64* target_column, const double* weight, double scale, unsigned fields, double* states) {
  const RowTile tile(rows, classes, chunk, group_size);
  const bool has_row = tile.row < rows;
  const T* row = logits + (has_row ? tile.row * pitch + tile.first_class : 0);
  const VectorizedSpan<T> span(row, tile.count);
  const int target = has_row ? tile.local_index(target_column[tile.row]) : -1;
  Exponential<T, float> exponential(scale);
  float max = -infinity<float>();
  double sum = 0.0;

  const int step = LOADS * group_size;
  // The first round has the scalars, if there are any, each as a vector with one element. They fit into one round.
  for (int start = span.scalars ? tile.thread_rank - step : tile.thread_rank; start < span.vectors; start += step) {
    Vector v[LOADS];
    unsigned largest = Storage<T>::minus_inf;
    int count = 0;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      v[i] = vector_of_minus_inf<T>();
      if (start >= 0) {
        if (start + i * group_size < span.vectors) {
          v[i] = load_constant(row + span.vector_start(start + i * group_size));
          count = i + 1;
        }
      } else if (start + step + i * group_size < span.scalars) {
        v[i] = vector_of(row[span.scalar_index(start + step + i * group_size)]);
        count = i + 1;
      }
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int at =
          start >= 0 ? span.vector_start(start + i * group_size) : span.scalar_index(start + step + i * group_size);
      const unsigned target_index = static_cast<unsigned>(target - at);
      if (start >= 0 || target_index == 0) mask<T>(v[i], target_index);
      largest = max_into<T>(largest, v[i]);
    }
    const float highest = max_of_word<T>(largest);
    max = fmaxf(max, highest);
    if (highest > exponential.limit) {
      const Exponential<T, float> before = exponential;
      exponential.set_reference(highest);
      if (sum != 0.0) sum *= exp(before.log_rescale(exponential, scale));
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i >= count) break;
      float x[Storage<T>::width];
      unpack<T>(v[i], x);
      sum += static_cast<double>(exponential.sum_of(x));
    }
  }

  reduce_sums(max, sum, exponential, scale, group_size);
  if (!has_row || tile.thread_rank != 0) return;
  State state = identity();
  state.max = max;
  state.sum_exp = sum;
  if (target >= 0) {
    state.held = static_cast<double>(widen(row[target]));
    state.held_weight = weight == nullptr ? 1.0 : weight[tile.first_class + target];
  }
  store(state, states + (tile.row * gridDim.y + blockIdx.y) * num_fields(fields), fields, scale);
}
