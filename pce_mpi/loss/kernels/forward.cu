// Forward without options, in float32: the states, with the target held apart. Each logit is read once. Launched by
// cuda.py.
#include <groups.cuh>

namespace pce {

// The exponentials of a thread's logits, summed as digits of 21 bits: the limb j is sum_i digit_(j + i) 2^(21 i).
template <bool SCALED>
class Exponentials {
  // The fast way takes logits z of which the largest is in this range. Beside it, those below -2,048 count for nothing.
  static constexpr float MOST = 2047.0f, LEAST = -1848.0f;
  static constexpr double LN_2 = 0.69314;
  static constexpr uint32_t DIGIT = (1u << Single::WIDTH) - 1;

  float scale_, inverse_;
  uint32_t limit_ = 0;  // the exponent of the grid's largest element, in the form of `bits(k)` in `add`

  __device__ __forceinline__ float over_scale(float z) const { return SCALED ? product32(z, inverse_) : z; }

 public:
  Sum digits;
  float top;    // the largest logit; nan if one is
  float bound;  // a larger logit needs a coarser grid

  __device__ __forceinline__ explicit Exponentials(double scale)
      : scale_(narrow(scale)), inverse_(narrow(1.0 / scale)) {
    forget();
    top = bound;
  }

  __device__ __forceinline__ void forget() {
    digits = {NO_SUM, {0, 0, 0}};
    bound = from_bits(0xff800000u);
  }

  // Raise the grid for logits of which `highest` is the largest. False if `add` cannot take them.
  __device__ __forceinline__ bool rises_to(float highest) {
    const float z = SCALED ? product32(highest, scale_) : highest;
    if (!(z <= MOST && z >= LEAST)) return false;
    const int n = static_cast<int>(bits(fma32(z, LOG2E32, MAGIC32))) - MAGIC32_BITS;
    digits.raise(floor_div(n, Single::WIDTH));
    const int64_t largest = Single::WIDTH * digits.grid + Single::WIDTH - 1;
    if (largest > 4096) return false;  // the grid of a logit that was beyond MOST
    limit_ = static_cast<uint32_t>(static_cast<int>(largest) + MAGIC32_BITS);
    const double end = static_cast<double>(largest) * LN_2;
    bound = over_scale(narrow(end < MOST ? end : MOST));
    return true;
  }

  // Add logits to the low halves of three limbs; none is larger than `bound`, or than the logit that the grid has been
  // raised to.
  template <typename T>
  __device__ __forceinline__ void add(const Vector& logits, uint32_t (&sums)[3]) const {
    constexpr int N = Storage<T>::width;
    float x[N];
    unpack<T>(logits, x);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float v = x[i];
      float k = fma32(SCALED ? product32(v, scale_) : v, LOG2E32, MAGIC32);
      // 64 or more for each z from -infinity to -2,048, also where k is no integer: its element is shifted away,
      // whatever it is.
      const uint32_t shift = limit_ - bits(k);
      k = sum32(k, -MAGIC32);
      const float f = SCALED ? fma32(v, scale_, product32(k, -HI32)) : fma32(k, -HI32, v);
      const uint32_t fixed = fixed_point(polynomial(fma32(k, -LO32, f)));
      const uint64_t element = shifted_right(static_cast<uint64_t>(fixed) << 32, shift);
      sums[0] += static_cast<uint32_t>(element);
      sums[1] += static_cast<uint32_t>(element >> 21);
      sums[2] += static_cast<uint32_t>(element >> 42);
    }
  }

  // The sums of `add` over at most 2,048 logits: those of the digits do not overflow.
  __device__ __forceinline__ void add_sums(const uint32_t (&sums)[3]) {
    const uint32_t second = sums[1] - (sums[2] << 21), first = sums[0] - (second << 21);
    digits.limbs[0] += first;
    digits.limbs[1] += second;
    digits.limbs[2] += sums[2];
  }

  // Add any logit, after `top` has been raised. Beside a huge one only equal ones count.
  __device__ __forceinline__ void add_any(double x, bool huge, const Transform& transform) {
    if (!finite(x) || (huge && x != wide(top))) return;
    const Exponential<float> e = exponential<Single>(x, transform);
    digits.raise(floor_div(e.n, Single::WIDTH));
    bound = from_bits(0xff800000u);  // `rises_to` has to look at the grid
    const int64_t shift = Single::WIDTH * digits.grid + Single::WIDTH - 1 - e.n;
    const uint64_t element =
        shifted_right(static_cast<uint64_t>(fixed_point(e.t)) << 32, static_cast<uint32_t>(shift < 64 ? shift : 64));
    digits.limbs[0] += element & DIGIT;
    digits.limbs[1] += element >> 21 & DIGIT;
    digits.limbs[2] += element >> 42;
  }

  __device__ __forceinline__ Sum limbs() const {
    const uint64_t *d = digits.limbs;
    return {digits.grid, {d[0] + (d[1] << 21) + (d[2] << 42), d[1] + (d[2] << 21), d[2]}};
  }
};

// `states` is (rows, splits, words).
template <typename T, bool SCALED>
__global__ void __launch_bounds__(BLOCK_THREADS, RESIDENT_THREADS / BLOCK_THREADS)
    fill_states(const T* logits, int64_t pitch, int64_t rows, int64_t classes, int chunk, int group_size,
                const int64_t* target_column, const double* weight, double scale, int fields, uint64_t* states) {
  constexpr int WIDTH = Storage<T>::width;
  const RowTile tile(rows, classes, chunk, group_size);
  const bool has_row = tile.row < rows;
  const T* row = logits + (has_row ? tile.row * pitch + tile.first_class : 0);
  const VectorizedSpan<T> span(row, tile.count);
  const int target = has_row ? tile.local_index(target_column[tile.row]) : -1;
  const Call call = {fields, {scale, 0.0}};
  Exponentials<SCALED> exponentials(scale);

  const int step = LOADS * group_size;
  // The first round has the scalars, if there are any, each as a vector with one element. They fit into one round.
  for (int start = span.scalars ? tile.thread_rank - step : tile.thread_rank; start < span.vectors; start += step) {
    const bool single = start < 0;
    Vector v[LOADS];
    if (!single && start + (LOADS - 1) * group_size < span.vectors) {
      const T* from = row + span.vector_start(start);
#pragma unroll
      for (int i = 0; i < LOADS; ++i) v[i] = load_constant(from + i * group_size * WIDTH);
    } else {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        const int index = start + i * group_size;
        v[i] = vector_of_minus_inf<T>();
        if (single && index + step < span.scalars) v[i] = vector_of(row[span.scalar_index(index + step)]);
        if (!single && index < span.vectors) v[i] = load_constant(row + span.vector_start(index));
      }
    }
    const auto place = [&](int i) {
      const int index = start + i * group_size;
      return single ? span.scalar_index(index + step) : span.vector_start(index);
    };
    if (single || static_cast<unsigned>(target - place(0)) < static_cast<unsigned>(step * WIDTH)) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i)
        if (!single || target == place(i)) mask<T>(v[i], static_cast<unsigned>(target - place(i)));
    }
    unsigned largest = Storage<T>::minus_inf;
#pragma unroll
    for (int i = 0; i < LOADS * 4; ++i) largest = maximum<T>(largest, v[i / 4].word[i % 4]);
    const float highest = max_of_word<T>(largest), before = exponentials.top;
    exponentials.top = maximum_or_nan(before, highest);
    if (!(highest <= exponentials.bound) && !exponentials.rises_to(highest)) {
      const double top = wide(exponentials.top);
      const bool huge = is_huge(top, call.transform);
      if (!finite(top)) continue;
      if (huge && top != wide(before)) exponentials.forget();
#pragma unroll 1
      for (int i = 0; i < LOADS * WIDTH; ++i) {
        const int index = start + i / WIDTH * group_size + (single ? step : 0);
        if (single ? i % WIDTH != 0 || index >= span.scalars : index >= span.vectors) continue;
        const int at = single ? span.scalar_index(index) : span.vector_start(index) + i % WIDTH;
        if (at != target) exponentials.add_any(number_of(row[at]), huge, call.transform);
      }
      continue;
    }
    uint32_t sums[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < LOADS; ++i) exponentials.template add<T>(v[i], sums);
    exponentials.add_sums(sums);
  }

  const float top = reduce(exponentials.top, group_size, [](float a, float b) { return maximum_or_nan(a, b); });
  if (is_huge(wide(top), call.transform) && wide(exponentials.top) != wide(top)) exponentials.forget();
  Sum sum = exponentials.limbs();
  reduce_sums(sum, group_size);
  if (!has_row || tile.thread_rank != 0) return;
  State state = State::identity();
  state.top = canonical(top < from_bits(0x7f800000u) ? wide(top) : not_a_number());
  if (finite(state.top)) state.sum = sum;
  if (target >= 0) {
    state.held = canonical(number_of(row[target]));
    state.held_weight = weight == nullptr ? 1.0 : weight[tile.first_class + target];
  }
  state.store<Single>(states + (tile.row * gridDim.y + blockIdx.y) * words_of(fields), call);
}

}  // namespace pce
